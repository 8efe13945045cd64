"""What the root of a save decides for all ranks, and what it remembers of them from one save to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from reknit.engine import messages
from reknit.engine.commit import check_destination, commit
from reknit.errors import CommitError, ProtocolError
from reknit.format import paths
from reknit.planner.resolve import blob_owners, shard_owners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.commit import Destination

PLANS_KEPT = 4
"""How many plans a rank keeps."""

_Kept = TypeVar("_Kept")


class _Claimed(NamedTuple):
    """What a rank claimed under a plan, and what it was answered."""

    shards: messages.ShardClaims
    owners: bytes


class Coordinator:
    """Rank 0's part in the saves of a group.

    Ranks that save again what they saved before send only the digest of its layout; the root knows the rest.
    """

    def __init__(self) -> None:
        self._claims: dict[tuple[int, bytes], _Claimed] = {}
        self._columns: dict[tuple[int, bytes], messages.Columns] = {}

    def assign(self, to: Destination, requests: Sequence[bytes]) -> list[bytes]:
        """Answer every rank's `Claims`.

        Raises `CheckpointExistsError`, `StateError` for unfit metadata, and `CommitError` when a rank that
        made its plan before cannot keep it, because other ranks now hold other things.
        """
        check_destination(to)
        claims = [messages.decode(request, messages.Claims) for request in requests]
        write_id = _agreed_write_id(claims)
        before = [self._claims.get((rank, c.plan)) for rank, c in enumerate(claims)]
        shards = [
            c.shards if c.shards is not None else _known(b, rank).shards
            for rank, (c, b) in enumerate(zip(claims, before, strict=True))
        ]
        owners = shard_owners(
            [messages.unpacked(s.keys, "u8") for s in shards],
            [messages.unpacked(s.nbytes, "i8") for s in shards],
        )
        packed = [messages.packed(o, "i8") for o in owners]
        stale = [
            rank
            for rank, (c, b) in enumerate(zip(claims, before, strict=True))
            if c.shards is None and b is not None and b.owners != packed[rank]
        ]
        if stale:
            changed = [rank for rank, c in enumerate(claims) if c.shards is not None]
            raise CommitError(
                f"rank {changed[0]} now holds other tensors than at the last save, and the plan that rank "
                f"{stale[0]} made then does not fit any more; nothing was committed",
                rank=changed[0],
                remedy="save again: each rank then makes a new plan",
            )
        for rank, c in enumerate(claims):
            _keep(self._claims, rank, c.plan, _Claimed(shards[rank], packed[rank]))
        blobs = blob_owners(
            [messages.unpacked(c.blob_keys, "u8") for c in claims],
            [messages.unpacked(c.blob_digests, "u8") for c in claims],
        )
        return [
            messages.encode(messages.Assignment(write_id, s, messages.packed(b, "i8")))
            for s, b in zip(packed, blobs, strict=True)
        ]

    def commit(self, to: Destination, write_id: str, requests: Sequence[bytes]) -> list[bytes]:
        """Make one checkpoint of all ranks' `Receipt`s, and tell every rank the outcome.

        Raises `CommitError` when the parts do not make a whole.
        """
        receipts = [messages.decode(request, messages.Receipt) for request in requests]
        columns = []
        for receipt in receipts:
            mine = receipt.columns or _known(self._columns.get((receipt.rank, receipt.plan)), receipt.rank)
            _keep(self._columns, receipt.rank, receipt.plan, mine)
            columns.append(mine)
        return [messages.encode(commit(to, write_id, receipts, columns))] * len(requests)


def _agreed_write_id(claims: Sequence[messages.Claims]) -> str:
    """Return the id of the save that all ranks are at, a new one where they have none."""
    first = claims[0]
    for rank, other in enumerate(claims):
        if (other.write_id, other.step) != (first.write_id, first.step):
            raise ProtocolError(
                f"rank {rank} is at another save than rank 0: it saves step {other.step}, rank 0 step "
                f"{first.step}",
                rank=rank,
                remedy="let every rank make the same calls of save; one that missed a call is in step again "
                "when every rank has called reknit.close()",
            )
    return first.write_id or paths.new_write_id()


def _known(kept: _Kept | None, rank: int) -> _Kept:
    """Return what was kept of a rank's plan, which is there as long as rank and root count alike."""
    if kept is None:
        raise CommitError(
            f"rank {rank} refers to a plan that the root does not know",
            rank=rank,
            remedy="save again: each rank then makes a new plan",
        )
    return kept


def _keep(kept: dict[tuple[int, bytes], _Kept], rank: int, plan: bytes, value: _Kept) -> None:
    """Keep a value of a rank's plan as its latest, and forget the rank's oldest where there are too many."""
    kept.pop((rank, plan), None)
    kept[rank, plan] = value
    mine = [key for key in kept if key[0] == rank]
    if len(mine) > PLANS_KEPT:
        del kept[mine[0]]
