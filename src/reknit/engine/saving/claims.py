"""The encoded holdings of a rank, and its claims on data that other ranks may also hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from msgspec import Struct, structs

from reknit.engine import round_messages
from reknit.engine.packed_columns import packed, unpacked
from reknit.engine.saving.packing import Sections
from reknit.format import paths
from reknit.format.checksum import digest
from reknit.format.values.blob_codec import encode_blobs, join_blobs, name_of_value
from reknit.planner.columns import NOTHING, columns_of
from reknit.planner.resolve import OWN, shard_key
from reknit.types.lazy_property import lazy_property
from reknit.types.shard import Encoded, full_name, key_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.options import SaveOptions
    from reknit.types.shard import Blob, Holdings, Witness


class EncodedHoldings(Struct, frozen=True, dict=True):
    """The holdings of a rank; `guessed` are the shards whose other holders no framework records."""

    holdings: Holdings
    guessed: tuple[int, ...]
    blobs: list[round_messages.EncodedBlob]
    witnesses: round_messages.Witnesses = round_messages.NO_WITNESSES

    @lazy_property
    def keys(self) -> list[int]:
        """The `shard_key` of each guessed shard."""
        keys: list[int] | None = self.holdings.known.get("keys")
        if keys is None:
            keys = self.holdings.known["keys"] = [shard_key(self.holdings.shards[n]) for n in self.guessed]
        return keys

    def shard_claims(self) -> round_messages.ShardClaims:
        """Return the keys and sizes of the guessed shards, for the root."""
        nbytes = [self.holdings.shards[n].nbytes for n in self.guessed]
        return round_messages.ShardClaims(packed(self.keys, "u8"), packed(nbytes, "i8"))

    def resolved(self, owners: NDArray[np.int64]) -> Holdings:
        """Return the holdings with one owner for each guessed shard."""
        if not self.guessed:
            return self.holdings
        shards = list(self.holdings.shards)
        for number, owner in zip(self.guessed, owners.tolist(), strict=True):
            shards[number] = structs.replace(shards[number], replicas=(owner,))
        return replace(self.holdings, shards=tuple(shards), known={})


class EncodedFile(NamedTuple):
    """A file of blobs that a rank writes."""

    item: str
    coordinate: dict[str, int] | None
    data: bytes


def encode_holdings(holdings: Holdings, options: SaveOptions) -> EncodedHoldings:
    """Check names, and encode values.  Raises `StateError` for names and values that no file can hold."""
    guessed = holdings.known.get("guessed")
    if guessed is None:
        guessed = holdings.known["guessed"] = _guessed(holdings)
    for entries in (holdings.blobs, holdings.witnesses):
        for entry in entries:
            paths.checked_name(entry.fqn, "name")
    times = Counter(id(blob.value) for blob in holdings.blobs)
    repeated: dict[int, bytes] = {}
    blobs = [
        round_messages.EncodedBlob(
            blob.item,
            blob_key(blob),
            None if blob.coordinate is None else dict(blob.coordinate),
            _encoded(blob, options) if times[id(blob.value)] == 1 else _again(blob, options, repeated),
        )
        for blob in holdings.blobs
    ]
    witnesses = round_messages.NO_WITNESSES
    if holdings.witnesses:
        by_key = {blob_key(witness): _label(witness) for witness in holdings.witnesses}
        witnesses = round_messages.Witnesses([*by_key.values()], packed([*by_key], "u8"))
    return EncodedHoldings(holdings, guessed, blobs, witnesses)


def _guessed(holdings: Holdings) -> tuple[int, ...]:
    """Check the names of tensors, and return the shards whose other holders no framework records."""
    for item in holdings.items:
        paths.escape_item(item)
    for entries in (holdings.shards, holdings.aliases):
        for entry in entries:
            paths.checked_name(entry.fqn, "name")
    return tuple(n for n, shard in enumerate(holdings.shards) if shard.replicas is None)


def blob_key(value: Blob | Witness) -> int:
    """Return 64 bits that identify the name and coordinate of a value, on any rank."""
    place = "" if value.coordinate is None else f"\0{sorted(value.coordinate.items())}"
    return key_of(f"{value.item}\0{value.fqn}{place}")


def _label(witness: Witness) -> str:
    """Return the name of a value for users, with its place if it has one."""
    place = ", ".join(f"{axis} {n}" for axis, n in (witness.coordinate or {}).items())
    return full_name(witness.item, witness.fqn) + (f" ({place})" if place else "")


def _encoded(blob: Blob, options: SaveOptions) -> bytes:
    """Return a file of blobs with only this blob; a value that is already encoded is not copied."""
    if not isinstance(blob.value, Encoded):
        return encode_blobs({blob.fqn: blob.value}, allow_pickle=options.allow_pickle, item=blob.item)
    memory, start = blob.value[:2]
    name = name_of_value(blob.fqn)
    if len(name) > start:
        return b"".join((name, memory[start:]))
    memory[start - len(name) : start] = name
    return cast("bytes", memory[start - len(name) :])  # its readers treat a view as bytes


def _again(blob: Blob, options: SaveOptions, known: dict[int, bytes]) -> bytes:
    """Return the file of `_encoded` for a value with several names, such as options of an optimizer.

    `known` has these values, encoded without a name.
    """
    name = name_of_value(blob.fqn)
    if (body := known.get(id(blob.value))) is None:
        body = known[id(blob.value)] = bytes(_encoded(blob, options)[len(name) :])
    return name + body


def claims(rank: int, claimed: round_messages.RankClaims) -> Sections:
    """Return the claims of a rank as columns, which merge with the claims of other ranks."""
    blobs, copies, witnesses = claimed.blobs, claimed.copies, claimed.witnesses
    shared = [blob for blob in blobs if blob.coordinate is None]
    keys = np.array([blob.key for blob in shared], np.uint64)
    digests = np.array([digest(blob.data) for blob in shared], np.uint64)
    # A value of a single rank has no copies elsewhere, so no rank needs its key.
    placed = [blob.key for blob in blobs if (blob.coordinate or {"rank": rank}).keys() != {"rank"}]
    seen = unpacked(copies.digests, "u8")
    own = columns_of(
        rank,
        {"write_ids": [claimed.write_id], "witnesses": witnesses.names},
        {
            "step": ([] if claimed.step is None else [claimed.step], ""),
            "places": ([claimed.places], ""),
            "plan": (unpacked(claimed.plan, "i8"), ""),
            "blob_keys": (keys, ""),
            "blob_digests": (digests, ""),
            "placed_keys": (np.array(placed, np.uint64), ""),
            "witness_keys": (unpacked(witnesses.keys, "u8"), ""),
            "copy": (unpacked(copies.keys, "u8"), ""),
            "low": (seen, ""),
            "high": (seen, ""),
        },
    )
    if claimed.shards is None:
        return Sections(own, NOTHING)
    keys, nbytes = (
        unpacked(claimed.shards.keys, "u8"),
        unpacked(claimed.shards.nbytes, "i8"),
    )
    return Sections(own, columns_of(rank, {}, {"keys": (keys, ""), "nbytes": (nbytes, "")}))


def blob_files(blobs: Sequence[round_messages.EncodedBlob], owners: bytes, rank: int) -> list[EncodedFile]:
    """Return the files of blobs that `rank` writes, one for each item and coordinate.

    `owners` are the owners of the shared blobs, as assigned by the root.  If ranks have different values,
    each rank keeps its own.
    """
    owner = iter(unpacked(owners, "i8").tolist())
    sets: dict[tuple[str, tuple[tuple[str, int], ...] | None], list[bytes]] = {}
    for blob in blobs:
        place = blob.coordinate
        if place is None:
            writer = next(owner)
            if writer == OWN:
                place = {"rank": rank}
            elif writer != rank:
                continue
        key = (blob.item, None if place is None else tuple(sorted(place.items())))
        sets.setdefault(key, []).append(blob.data)
    return [
        EncodedFile(item, None if place is None else dict(place), join_blobs(parts))
        for (item, place), parts in sets.items()
    ]
