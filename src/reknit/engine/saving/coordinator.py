"""The decisions of the root for all ranks, its cache of their plans, and the receipts of their files."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from reknit.engine import messages
from reknit.engine.memory.write import write_small
from reknit.engine.saving.layout import PLANS_KEPT, keep_latest
from reknit.engine.saving.packing import Sections, merge_claims, merge_receipts, merged_chunks
from reknit.engine.saving.root import begin, commit
from reknit.engine.stored.manifest_content import KINDS, receipts_to_manifest
from reknit.engine.stored.marker import remove_marker
from reknit.errors import CommitError, ProtocolError, StateError, UndecidedError, UsageError
from reknit.format import paths
from reknit.format.index import encode_index
from reknit.format.index.checks import check_index
from reknit.format.index.plain_file import MAX_ROWS
from reknit.planner.assemble import assemble, chunk_files, differing
from reknit.planner.columns import NOTHING, columns_of, distinct, merged, packed, unpacked
from reknit.planner.save import blob_owners, shard_owners
from reknit.types.small import spelled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.engine.memory.write import Written
    from reknit.engine.saving.part import CopySplit, EncodedFile
    from reknit.engine.saving.task import SaveTask
    from reknit.engine.stored.marker import Marker
    from reknit.planner.assemble import ChunkFiles
    from reknit.planner.columns import Blocks, RankColumns
    from reknit.storage.base import Storage
    from reknit.types.manifest import Index

    Ints = NDArray[np.int64]


class PlanCache:
    """The last columns of every rank under each of its latest plans.

    Each rank has a fixed number of slots, so memory is bounded.  Ranks that change plans together use the
    same slot, and share the columns in it.
    """

    def __init__(
        self, num_slots: int, merge: Callable[[Sequence[RankColumns]], RankColumns] = merged
    ) -> None:
        self._merge = merge
        self.slots: list[RankColumns] = [NOTHING] * num_slots
        self._plans = np.zeros((0, num_slots, 2), np.int64)
        self._kept_at = np.zeros((0, num_slots), np.int64)
        """The time at which a slot was filled, as a number that grows; 0 for an empty slot."""
        self._used = np.zeros((0, num_slots), np.int64)
        self._clock = 0

    def find(self, ranks: Ints, plans: Ints) -> Ints:
        """Return the slot of each rank's plan (two numbers), or -1 for an unknown plan."""
        self._grow(ranks)
        self._clock += 1
        fits = (self._plans[ranks] == plans[:, None]).all(axis=2) & (self._kept_at[ranks] > 0)
        slots = np.where(fits.any(axis=1), fits.argmax(axis=1), -1)
        self._used[ranks[slots >= 0], slots[slots >= 0]] = self._clock
        return slots

    def keep(self, plans: Ints, latest: RankColumns) -> None:
        """Keep the columns of ranks under their plans, in place of the least recently used plan of a rank."""
        ranks = latest.ranks
        slots = self.find(ranks, plans)
        slots = np.where(slots >= 0, slots, self._used[ranks].argmin(axis=1))
        self._clock += 1
        self._plans[ranks, slots] = plans
        self._kept_at[ranks, slots] = self._used[ranks, slots] = self._clock
        for slot in distinct(slots):
            fresh = _only(latest, slots == slot)
            before = self.slots[slot]
            rest = _only(before, ~np.isin(before.ranks, fresh.ranks))
            self.slots[slot] = self._merge([rest, fresh])

    def latest(self, ranks: Ints, slots: Ints) -> RankColumns:
        """Return the columns of ranks that are in these slots."""
        parts = []
        for slot in distinct(slots):
            part = self.slots[slot]
            parts.append(_only(part, np.isin(part.ranks, ranks[slots == slot])))
        return self._merge(parts)

    def version(self, ranks: Ints, slots: Ints) -> bytes:
        """Return bytes that change whenever the contents of the ranks' slots change."""
        return np.stack((slots, self._kept_at[ranks, slots])).tobytes()

    def _grow(self, ranks: Ints) -> None:
        """Make room for new ranks."""
        more = int(ranks.max(initial=-1)) + 1 - len(self._plans)
        if more > 0:
            self._plans, self._kept_at, self._used = (
                np.concatenate((column, np.zeros((more, *column.shape[1:]), np.int64)))
                for column in (self._plans, self._kept_at, self._used)
            )


def _only(latest: RankColumns, which: NDArray[np.bool_]) -> RankColumns:
    """Return the columns of some of the ranks; for all ranks, the same object."""
    if which.all():
        return latest
    return latest.select(np.flatnonzero(which)) if which.any() else NOTHING


_Value = TypeVar("_Value")

_MOST_WRITERS = 64
"""Files of blobs that are written at once, since a request to an object store takes tens of milliseconds."""


def write_blobs(
    task: SaveTask, files: Sequence[EncodedFile], write_id: str, written: list[Written]
) -> list[dict[str, int]]:
    """Write the files of blobs of a rank, add each to `written`, and return the coordinates of its values.

    Several files are written at once, unless the options allow only one thread: many small files wait for
    requests rather than for the disk.
    """
    storage, threads = task.storage, task.options.threads
    places: list[dict[str, int]] = []
    named: list[tuple[str, bytes]] = []
    for file in files:
        number = None if file.coordinate is None else len(places)
        path = paths.blob_path(file.item, task.group.rank, write_id, own=number)
        named.append((path, file.data))
        if file.coordinate is not None:
            places.append(file.coordinate)
    here = f"{storage.url}/{named[0][0]}" if len(named) == 1 else storage.url
    if named:
        with task.recorder.phase("write", path=here, nbytes=sum([len(data) for _, data in named])):
            write_small(storage, named, written, threads=1 if threads == 1 else _MOST_WRITERS)
    return places


def receipt(
    task: SaveTask,
    items: Sequence[str],
    written: Sequence[Written],
    *,
    plan: bytes,
    columns: messages.ArrayColumns | None,
    places: Sequence[Mapping[str, int]],
    copies: CopySplit,
) -> Sections:
    """Return the receipt of a rank for the root, after its files are written (see `manifest_content`).

    `plan` identifies the layout of its holdings; `columns` is None if the root has the columns of this plan.
    """
    rank = task.group.rank
    names = [name for file in written if (name := paths.parse_path(file.path)) is not None]
    folder, folders = _numbered([name.item or "" for name in names])
    place, kinds = _numbered([tuple(sorted(place)) for place in places])
    own = columns_of(
        rank,
        {
            "urls": [task.storage.url],
            "items": list(dict.fromkeys(items)),
            "folders": folders,
            "kept": copies.kept,
            "unequal": copies.unequal,
        },
        {
            "plan": (unpacked(plan, "i8"), ""),
            "folder": (folder, "folders"),
            "kind": ([KINDS.index(name.kind) for name in names], ""),
            "number": ([name.part for name in names], ""),
            "nbytes": ([file.nbytes for file in written], ""),
            "num_blocks": ([len(file.digests) for file in written], ""),
            "digests": (np.concatenate([np.zeros(0, np.uint64), *[file.digests for file in written]]), ""),
            "coordinates": ([n for place in places for _, n in sorted(place.items())], ""),
        },
    )
    own = own.with_names("places", kinds, place)
    return Sections(own, NOTHING if columns is None else chunk_columns(rank, columns))


def chunk_columns(rank: int, columns: messages.ArrayColumns) -> RankColumns:
    """Return a rank's chunks in the form that the root merges (`planner.assemble.widened`)."""
    offsets, lengths = (
        unpacked(c, "i8").reshape(-1, columns.ndim) for c in (columns.offsets, columns.lengths)
    )
    folder, folders = _numbered([item for item, _ in columns.files])
    boxes = {f"offset.{d}": (offsets[:, d], "") for d in range(columns.ndim)}
    boxes |= {f"length.{d}": (lengths[:, d], "") for d in range(columns.ndim)}
    return columns_of(
        rank,
        {"tensors": columns.tensors, "folders": folders, "aliases": list(dict.fromkeys(columns.aliases))},
        {
            "tensor": (unpacked(columns.tensor, "i8"), "tensors"),
            **boxes,
            "file": (unpacked(columns.file, "i8"), ""),
            "start": (unpacked(columns.start, "i8"), ""),
            "nbytes": (unpacked(columns.nbytes, "i8"), ""),
            "folder": (folder, "folders"),
            "part": ([part for _, part in columns.files], ""),
        },
    )


def _numbered(values: Sequence[_Value]) -> tuple[list[int], list[_Value]]:
    """Return the number of each value among the distinct values, and the distinct values."""
    numbers: dict[_Value, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values], list(numbers)


_ANY_ID = "0" * 32
"""Any write id, for checks."""
INDEXES_KEPT = 2
"""Number of assembled indexes that the root keeps, since a job may save two states in turn."""


class Assembled(Struct, frozen=True):
    """An index without the names of its files, which differ between saves."""

    nameless: Index
    files: ChunkFiles
    warnings: list[str]

    def named(self, write_id: str) -> Index:
        """Return the index of one save."""
        return replace(self.nameless, files=_paths(self.files, write_id))


class _EncodedIndex(Struct, frozen=True):
    """The bytes of an index, and the warnings from its assembly."""

    data: bytes
    warnings: list[str]


class Coordinator:
    """The part of rank 0 in the saves of a group.

    Ranks that save a layout again send only its digest; the root has the rest in its cache.  With
    `plans_follow`, ranks plan after the root has answered, so that a known layout may get other owners.
    """

    def __init__(self, *, plans_follow: bool = False) -> None:
        self._plans_follow = plans_follow
        self._begun: tuple[Storage, Marker] | None = None
        self._claims = PlanCache(PLANS_KEPT)
        self.chunks = PlanCache(PLANS_KEPT, merged_chunks)
        self._owners: dict[bytes, Blocks] = {}
        self.indexes: dict[bytes, Assembled] = {}
        self._ahead: _EncodedIndex | None = None
        self._num_shards = 0

    def assign(
        self, task: SaveTask | None, requests: Sequence[Sections], *, first: bool = False
    ) -> list[messages.Assignment]:
        """Answer the `claims` of all ranks, merged or not; without a `task`, no save begins.

        With `first` the answers have the files of the newest checkpoint of the same folder, since the root
        has not committed there.

        Raises `CheckpointExistsError`, `FencedError`, and `StateError` for unfit metadata and for copies
        without a main copy on any rank.  Raises `UsageError` if ranks promote to different numbers of places.
        Raises `CommitError` if a rank cannot keep its plan, because the holdings of other ranks changed.
        """
        claims, shards = merge_claims(requests) if len(requests) > 1 else requests[0]
        write_id = _agreed_write_id(claims)
        _refuse_other_places(claims)
        _refuse_lone_copies(claims)
        if task is not None:
            self._begun = task.storage, begin(task, write_id)
        owners = self._shard_owners(claims, shards)
        self._num_shards = int(owners.counts.sum())
        blobs = blob_owners(claims.lists["blob_keys"], claims.lists["blob_digests"])
        copies: list[tuple[int, list[int]]] = [*differing(claims)]
        pairs = owners.number * len(blobs.sizes) + blobs.number
        _, leads, number = np.unique(pairs, return_index=True, return_inverse=True)
        # Ranks with equal answers share one object, which the tree sends once.
        answers = [
            messages.Assignment(write_id, packed(owners.at(k), "i8"), packed(blobs.at(k), "i8"), copies)
            for k in leads.tolist()
        ]
        earlier = _earlier_files(task) if first and task is not None else {}
        return [
            answers[k] if rank not in earlier else replace(answers[k], earlier=earlier[rank])
            for rank, k in zip(claims.ranks.tolist(), number.tolist(), strict=True)
        ]

    def give_up(self) -> None:
        """Remove the marker of the last save, so that it never can be committed, if it is not yet.

        The marker stays where the store may still commit it.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            remove_marker(*begun)

    def commit(self, task: SaveTask, requests: Sequence[Sections]) -> messages.CommitOutcome:
        """Commit the save of `assign` from the receipts of all ranks, and return the outcome for all.

        The receipts may be merged.  Raises `CommitError` when the parts do not make a whole.
        """
        receipts, chunks = merge_receipts(requests) if len(requests) > 1 else requests[0]
        assert self._begun is not None
        mine = self._begun[1]
        collected = receipts_to_manifest(receipts, mine.write_id)
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            assembled = self.assembled(receipts, chunks)
            ahead = _encoded(assembled, mine, collected.kept)
        try:
            outcome = commit(task, mine, ahead.data, collected, ahead.warnings)
        except UndecidedError:
            self._begun = None
            raise
        self._begun = None
        return outcome

    def import_ahead(self) -> None:
        """Import the encoder of a large index, while the root of several ranks writes its files."""
        if self._num_shards > MAX_ROWS:
            import reknit.format.index.arrow_file  # noqa: F401

    def encode_ahead(self, columns: messages.ArrayColumns) -> None:
        """Encode the index of a group of one rank while that rank writes its files.

        Its receipt then has no chunks.
        """
        assert self._begun is not None
        chunks = merged_chunks([chunk_columns(0, columns)])
        self._ahead = _encoded(_assembled(chunks), self._begun[1])

    def assembled(self, receipts: RankColumns, fresh: RankColumns) -> Assembled:
        """Return the index of the chunks of all ranks, from the cache if all plans are the same."""
        ranks, plans, planned = _plans(receipts)
        silent = ~np.isin(ranks, fresh.ranks)
        slots = _slots(self.chunks, ranks[silent], plans[silent])
        version = self.chunks.version(ranks, slots) if silent.all() else b""
        if version in self.indexes:
            return keep_latest(self.indexes, version, self.indexes[version], INDEXES_KEPT)
        chunks = merged_chunks([fresh, self.chunks.latest(ranks[silent], slots)])
        if (new := planned & ~silent).any():
            self.chunks.keep(plans[new], fresh.select(np.flatnonzero(planned[~silent])))
        assembled = _assembled(chunks)
        if planned.all():
            version = self.chunks.version(ranks, self.chunks.find(ranks, plans))
            keep_latest(self.indexes, version, assembled, INDEXES_KEPT)
        return assembled

    def _shard_owners(self, claims: RankColumns, fresh: RankColumns) -> Blocks:
        """Return the owner of each shard that ranks claim, and keep the owners with the claims."""
        ranks, plans, planned = _plans(claims)
        silent = ~np.isin(ranks, fresh.ranks)
        slots = _slots(self._claims, ranks[silent], plans[silent])
        version = self._claims.version(ranks, slots) if silent.all() else b""
        if version in self._owners:
            return keep_latest(self._owners, version, self._owners[version], PLANS_KEPT)
        before = self._claims.latest(ranks[silent], slots)
        both = merged([fresh, before.without("owners")])
        owners = shard_owners(both.lists["keys"], both.lists["nbytes"])
        if not self._plans_follow:
            _refuse_stale(before, owners.select(np.flatnonzero(silent)), fresh.ranks)
        if version:
            keep_latest(self._owners, version, owners, PLANS_KEPT)
        if (new := planned & ~silent).any():
            latest = fresh.with_list("owners", owners.select(np.flatnonzero(~silent)))
            self._claims.keep(plans[new], latest.select(np.flatnonzero(planned[~silent])))
        return owners


def _earlier_files(task: SaveTask) -> dict[int, messages.EarlierFiles]:
    """Return the files of each rank that a first save may take over."""
    from reknit.engine.saving.reuse import earlier_files

    return earlier_files(task.storage) if task.options.reuse else {}


def _assembled(chunks: RankColumns) -> Assembled:
    index, warnings = assemble(chunks)
    assembled = Assembled(index, chunk_files(chunks), warnings)
    check_index(assembled.named(_ANY_ID))
    return assembled


def _encoded(assembled: Assembled, mine: Marker, kept: Collection[tuple[str, str]] = ()) -> _EncodedIndex:
    """Return the index of one save, without the tensors that ranks keep as values of their own."""
    index = assembled.named(mine.write_id).without(kept)
    return _EncodedIndex(encode_index(index, checked=not kept), assembled.warnings)


def _agreed_write_id(claims: RankColumns) -> str:
    """Return the write id on which all ranks agree, or a new one if they have none."""
    step = claims.lists["step"]
    astray = np.flatnonzero((claims.lists["write_ids"].number > 0) | (step.number > 0))
    if len(astray):
        rank = int(astray[0])
        steps = [next(iter(step.at(k).tolist()), None) for k in (rank, 0)]
        raise ProtocolError(
            f"rank {rank} is at another save than rank 0: it saves step {steps[0]}, rank 0 step {steps[1]}",
            rank=rank,
            remedy="let every rank make the same calls of save; one that missed a call is in step again "
            "when every rank has called reknit.close()",
        )
    write_id: str = claims.tables["write_ids"][0]
    return write_id or paths.new_write_id()


def _refuse_other_places(claims: RankColumns) -> None:
    """Raise `UsageError` if ranks promote to different numbers of places, as some would wait for others."""
    places = claims.lists["places"]
    if len(places.sizes) > 1:
        numbers = places.flat()
        other = numbers != numbers[0]
        theirs = " or ".join(map(str, np.unique(numbers[other])))
        raise UsageError(
            f"ranks promote to different numbers of places: rank {claims.ranks[0]} to {numbers[0]}, "
            f"{spelled(claims.ranks[other].tolist())} to {theirs}",
            remedy="pass the same promote_to, or the same tiers, on every rank",
        )


def _refuse_lone_copies(claims: RankColumns) -> None:
    """Raise `StateError` if ranks have copies of a value, but no rank has the main copy, which is saved."""
    keys = claims.lists["witness_keys"]
    saved = np.concatenate([claims.lists[name].values for name in ("blob_keys", "placed_keys")])
    if np.isin(keys.values, saved).all():
        return
    lone = ~np.isin(keys.flat(), saved)
    names = claims.lists["witnesses"].flat()[lone]
    holders = np.repeat(claims.ranks, keys.counts)[lone][names == names[0]].tolist()
    others = len(np.unique(names)) - 1
    raise StateError(
        f"no rank has the main copy of {claims.tables['witnesses'][names[0]]}; copies are on "
        + spelled(holders)
        + (f", and the same is true of {others} more" if others else ""),
        remedy="give it the replica_id 0 (in all places of a tuple) on one rank",
    )


def _plans(latest: RankColumns) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return all ranks, the plan of each as two numbers, and whether it has a plan."""
    column = latest.lists["plan"]
    planned = column.counts == 2
    plans = np.zeros((len(latest.ranks), 2), np.int64)
    plans[planned] = column.flat().reshape(-1, 2)
    return latest.ranks, plans, planned


def _slots(known: PlanCache, ranks: Ints, plans: Ints) -> Ints:
    """Return the slots of the plans of ranks.  Raises `CommitError` for a plan that the root lacks."""
    slots = known.find(ranks, plans)
    if (slots < 0).any():
        rank = int(ranks[slots < 0][0])
        raise CommitError(
            f"rank {rank} refers to a plan that the root does not have",
            rank=rank,
            remedy="save again: each rank then makes a new plan",
        )
    return slots


def _refuse_stale(before: RankColumns, owners: Blocks, changed: Ints) -> None:
    """Raise `CommitError` if a rank with an earlier plan would now have to write other shards."""
    if not len(before.ranks):
        return
    kept = before.lists["owners"]
    differs = np.repeat(np.arange(len(kept.number)), kept.counts)[kept.flat() != owners.flat()]
    if not len(differs):
        return
    stale = int(before.ranks[differs[0]])
    cause = int(changed[0]) if len(changed) else next(r for r in before.ranks.tolist() if r != stale)
    raise CommitError(
        f"rank {cause} now holds other tensors than at the last save, and the plan that rank {stale} made "
        "then does not fit any more; nothing was committed",
        rank=cause,
        remedy="save again: each rank then makes a new plan",
    )


def _paths(files: ChunkFiles, write_id: str) -> tuple[str, ...]:
    """Return the paths of data files."""
    tails = [paths.data_tail(write_id, part) for part in range(int(files.part.max(initial=0)) + 1)]
    own = [tails[part] for part in files.part.tolist()]
    return tuple(paths.rank_paths(files.items, files.item, files.rank, own))
