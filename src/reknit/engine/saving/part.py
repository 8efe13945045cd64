"""The part of one rank in a save: its encoded holdings, and its claims on data that others also hold."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
from msgspec import Struct, structs

from reknit.engine import messages
from reknit.engine.memory.devices import GATHER_NBYTES, gathered
from reknit.engine.memory.elements import contiguous_bytes, itemsize, stage
from reknit.engine.memory.images import Sources
from reknit.engine.saving.layout import FileCut, LiveFiles, layout_digest, outline
from reknit.errors import StateError
from reknit.format import paths
from reknit.format.blob_codec import encode_blobs, join_blobs, name_of_value
from reknit.format.checksum import digest
from reknit.planner.columns import packed, unpacked
from reknit.planner.save import OWN, shard_key
from reknit.types import devices
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import Encoded, full_name, key_of
from reknit.types.small import decoder, lazy_property

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from reknit.engine.saving.layout import Outline, Owners
    from reknit.engine.saving.task import SaveTask
    from reknit.options import SaveOptions
    from reknit.types.shard import Blob, Holdings, Shard, Witness


class EncodedHoldings(Struct, frozen=True, dict=True):
    """The holdings of a rank; `guessed` are the shards whose other holders no framework records."""

    holdings: Holdings
    guessed: tuple[int, ...]
    blobs: list[messages.EncodedBlob]
    witnesses: messages.Witnesses = messages.NO_WITNESSES

    @lazy_property
    def keys(self) -> list[int]:
        """The `shard_key` of each guessed shard."""
        keys: list[int] | None = self.holdings.known.get("keys")
        if keys is None:
            shards = map(self.holdings.shards.__getitem__, self.guessed)
            keys = self.holdings.known["keys"] = list(map(shard_key, shards))
        return keys

    def shard_claims(self) -> messages.ShardClaims:
        """Return the keys and sizes of the guessed shards, for the root."""
        nbytes = [self.holdings.shards[n].nbytes for n in self.guessed]
        return messages.ShardClaims(packed(self.keys, "u8"), packed(nbytes, "i8"))

    def resolved(self, owners: NDArray[np.int64]) -> Holdings:
        """Return the holdings with one owner for each guessed shard."""
        if not self.guessed:
            return self.holdings
        shards = list(self.holdings.shards)
        for number, owner in zip(self.guessed, owners.tolist(), strict=True):
            shards[number] = structs.replace(shards[number], replicas=(owner,))
        return structs.replace(self.holdings, shards=tuple(shards), known={})


class EncodedFile(Struct, frozen=True):
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
        messages.EncodedBlob(
            blob.item,
            blob_key(blob),
            None if blob.coordinate is None else dict(blob.coordinate),
            _encoded(blob, options)
            if times[id(blob.value)] == 1
            else _encoded_repeated(blob, options, repeated),
        )
        for blob in holdings.blobs
    ]
    witnesses = messages.NO_WITNESSES
    if holdings.witnesses:
        by_key = {blob_key(witness): _label(witness) for witness in holdings.witnesses}
        witnesses = messages.Witnesses([*by_key.values()], packed([*by_key], "u8"))
    return EncodedHoldings(holdings, guessed, blobs, witnesses)


def _guessed(holdings: Holdings) -> tuple[int, ...]:
    """Check the names of tensors, and return the shards whose other holders no framework records."""
    for item in holdings.items:
        paths.escape_item(item)
    for entries in (holdings.shards, holdings.aliases):
        for fqn in dict.fromkeys([entry.fqn for entry in entries]):
            paths.checked_name(fqn, "name")
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
    memory, start = blob.value.memory, blob.value.start
    name = name_of_value(blob.fqn)
    if len(name) > start:
        return b"".join((name, memory[start:]))
    memory[start - len(name) : start] = name
    return cast("bytes", memory[start - len(name) :])  # its readers treat a view as bytes


def _encoded_repeated(blob: Blob, options: SaveOptions, known: dict[int, bytes]) -> bytes:
    """Return the file of `_encoded` for a value with several names, such as options of an optimizer.

    `known` has these values, encoded without a name.
    """
    name = name_of_value(blob.fqn)
    if (body := known.get(id(blob.value))) is None:
        body = known[id(blob.value)] = bytes(_encoded(blob, options)[len(name) :])
    return name + body


def blob_files(blobs: Sequence[messages.EncodedBlob], owners: bytes, rank: int) -> list[EncodedFile]:
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


SAMPLE_NBYTES = 8 << 10
"""The number of bytes, from the first, that are compared of copies for which a framework vouches."""
SHORT_NBYTES = 4 << 20
"""Shards up to this size are gathered, so that one copy from a device has many of them."""
KEPT_NBYTES = 4 << 20
"""Limit of the bytes that a rank sends of copies that it may have to keep, the smallest first."""


_encode_names = msgspec.msgpack.Encoder().encode
_decode_names = decoder(list[tuple[str, str, str, tuple[int, ...]]])

CopyNote = tuple[str, str, str]
"""Item and FQN of a tensor with different values on some ranks, and these ranks."""


class CopySplit(Struct, frozen=True):
    """The decision of a rank about differing copies: values that it keeps, and tensors that it cannot."""

    blobs: list[messages.EncodedBlob]
    kept: list[CopyNote]
    unequal: list[CopyNote]


EQUAL = CopySplit([], [], [])


class Chosen(Struct, frozen=True):
    """The shards that a rank compares, the same at every save of a layout.

    `numbers` begins with the `num_kept` shards whose values it keeps if they differ.
    """

    numbers: list[int]
    nbytes: list[int]
    num_kept: int
    keys: bytes
    names: bytes

    def copies(self, sources: Sequence[Any]) -> messages.Copies:
        """Return the digests of the copies in one save, from the `bits` of all shards."""
        digests, data = [0] * len(self.numbers), [b""] * self.num_kept
        for place, part in first_bytes([sources[n] for n in self.numbers], self.nbytes):
            digests[place] = digest(part.data)
            if place < self.num_kept:
                data[place] = part.tobytes()
        return messages.Copies(self.keys, packed(digests, "u8"), self.names, b"".join(data))


def choose(encoded: EncodedHoldings, check: str, rank: int, size: int) -> Chosen:
    """Return the shards that `rank` compares with the copies of other ranks; `check` is `check_replicas`.

    If no framework vouches for a copy, every byte is compared, otherwise a sample.  Small copies that are
    compared as a whole may be kept for each rank: first copies for which no framework vouches, then by size.
    """
    shards = encoded.holdings.shards
    if check == "off" or size == 1:
        shards = ()
    guessed = dict(zip(encoded.guessed, encoded.keys, strict=True)) if shards else {}
    tied = {(alias.item, alias.of) for alias in encoded.holdings.aliases}
    seen: set[int] = set()
    rows: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(shards):
        vouched, whole = number not in guessed, shard.nbytes
        holders = shard.replicas or ()
        if not whole or (vouched and (len(holders) < 2 or rank not in holders)):
            continue
        key = shard_key(shard) if vouched else guessed[number]
        if key in seen:
            continue  # a rank that holds a box twice compares the first
        seen.add(key)
        nbytes = min(whole, SAMPLE_NBYTES) if vouched and check != "all" else whole
        rows.append((vouched if nbytes == whole and _is_value(shard, tied) else 2, nbytes, key, number))
    rows.sort()
    room = np.cumsum([nbytes for kind, nbytes, _, _ in rows if kind < 2])
    chosen = [shards[number] for _, _, _, number in rows]
    return Chosen(
        [number for _, _, _, number in rows],
        [nbytes for _, nbytes, _, _ in rows],
        int(np.searchsorted(room, KEPT_NBYTES, side="right")),
        packed([key for _, _, key, _ in rows], "u8"),
        _encode_names([(s.item, s.fqn, s.spec.dtype, s.spec.shape) for s in chosen]),
    )


def _is_value(shard: Shard, tied: set[tuple[str, str]]) -> bool:
    """Return whether a shard can be a value: a whole tensor under one name, of a dtype that NumPy has."""
    spec = shard.spec
    whole = shard.box.lengths == spec.shape and _has_numpy(spec.dtype)
    return whole and not (tied and (shard.item, shard.fqn) in tied)


def split(
    copies: messages.Copies, differing: Sequence[tuple[int, list[int]]], rank: int, check: str
) -> CopySplit:
    """Return the decision of `rank` about differing copies; `differing` has keys, each with its ranks.

    Raises `StateError` for a copy that it cannot keep, unless `check` is ``"warn"``.
    """
    if not differing:
        return EQUAL
    place = {key: number for number, key in enumerate(unpacked(copies.keys, "i8").tolist())}
    names = _decode_names(copies.names)
    sizes = [numpy_dtype(dtype).itemsize * prod(shape) for _, _, dtype, shape in names]
    ends = np.cumsum(sizes).tolist()
    done = CopySplit([], [], [])
    for key, holders in differing:
        if (number := place.get(key)) is None:
            continue  # a shard of other ranks
        item, fqn, dtype, shape = names[number]
        note = item, fqn, ", ".join(map(str, holders))
        if ends[number] > len(copies.data):
            done.unequal.append(note)
            continue
        data = copies.data[ends[number] - sizes[number] : ends[number]]
        value = np.frombuffer(data, numpy_dtype(dtype)).reshape(shape)
        blob = encode_blobs({fqn: value}, item=item)
        done.blobs.append(messages.EncodedBlob(item, 0, {"rank": rank}, blob))
        done.kept.append(note)
    if done.unequal and check != "warn":
        item, fqn, ranks = done.unequal[0]
        more = f", and of {len(done.unequal) - 1} more" if len(done.unequal) > 1 else ""
        raise StateError(
            f"ranks hold different values of {full_name(item, fqn)} (ranks {ranks}){more}, "
            "and only one value can be stored; nothing was committed",
            remedy="make them equal (broadcast them), or wrap values that differ by design in "
            "reknit.PerRank; SaveOptions(check_replicas='warn') stores the copy of one rank",
        )
    return done


def first_bytes(sources: Sequence[Any], nbytes: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield places of `bits` arrays, in any order, and the first bytes (row-major) of each.

    Short sources are gathered on their device, up to `GATHER_NBYTES`, and copied together, which is much
    faster than many copies.
    """
    lots: dict[Any, list[tuple[int, Any]]] = {}
    room: dict[Any, int] = {}
    for place, (source, count) in enumerate(zip(sources, nbytes, strict=True)):
        if (flat := contiguous_bytes(source)) is not None:
            yield place, flat[:count]
        elif isinstance(source, np.ndarray):
            yield place, _copied(source, count)
        elif count > SHORT_NBYTES:
            with _typed(source.device):
                yield place, _copied(source, count)
        else:
            device = source.device
            if device in lots and count > room[device]:
                yield from _gathered(lots.pop(device), nbytes)
            room[device] = (room[device] if device in lots else GATHER_NBYTES) - count
            lots.setdefault(device, []).append((place, source))
    for lot in lots.values():
        yield from _gathered(lot, nbytes)


@cache
def _has_numpy(dtype: str) -> bool:
    return dtype in ITEMSIZE and numpy_dtype(dtype).name == dtype


def _copied(source: Any, count: int) -> NDArray[np.uint8]:
    out = np.empty(count, np.uint8)
    stage(source, 0, count // itemsize(source), out)
    return out


def _gathered(
    lot: Sequence[tuple[int, Any]], nbytes: Sequence[int]
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    with _typed(lot[0][1].device):
        yield from gathered(lot, nbytes)


@contextmanager
def _typed(device: Any) -> Iterator[None]:
    """Raise a typed error in the place of torch's, if a device cannot copy."""
    try:
        yield
    except RuntimeError as error:
        failure = devices.failed(error, device)
        failure.message += f"; copies of several ranks were to be compared, from {device}"
        raise failure from error


_MOST_PARTS = 64
"""Files of an item on one rank: if one tensor changes, a hundredth of the bytes is written again."""
_MOST_FILES = 1024
"""Files of an item on all ranks that store parts: each file costs a request, and an entry in the index."""


class Part:
    """The holdings of a rank with their encoded values, and the data that it derives from them alone."""

    def __init__(self, task: SaveTask, encoded: EncodedHoldings, cut: FileCut) -> None:
        """Use `encode`."""
        self.task, self.encoded = task, encoded
        holdings = encoded.holdings
        self.sources = Sources([shard.memory for shard in holdings.shards], holdings.runs)
        self._cut = cut
        self._copies = messages.NO_COPIES

    @property
    def needs_assignment(self) -> bool:
        """Whether there are shards whose other holders no framework records."""
        return bool(self.encoded.guessed)

    @lazy_property
    def layout(self) -> bytes:
        """The `layout_digest` of the holdings."""
        return layout_digest(self.encoded.holdings, self._cut)

    def compare(self, chosen: Chosen | None = None) -> Chosen:
        """Digest the copies that other ranks may also hold, and return the chosen shards.

        `chosen` is the result of an earlier save of the same layout.
        """
        task = self.task
        with task.recorder.phase("digest"):
            chosen = chosen or choose(
                self.encoded, task.options.check_replicas, task.group.rank, task.group.size
            )
            self._copies = chosen.copies(self.sources)
        return chosen

    def claims(self, write_id: str = "", plan: bytes = b"", *, shards: bool = True) -> messages.RankClaims:
        """Return the claims of this rank, without shards if the root has the shards of this `plan`."""
        encoded = self.encoded
        return messages.RankClaims(
            write_id=write_id,
            step=self.task.step,
            plan=plan,
            shards=encoded.shard_claims() if shards else None,
            blobs=encoded.blobs,
            copies=self._copies,
            witnesses=encoded.witnesses,
            places=len(self.task.promote_to),
        )

    def outline(self, owners: bytes = b"") -> Outline:
        """Return the files that this rank writes; `owners` has the owners of the shards that it claimed."""
        holdings = self.encoded.resolved(unpacked(owners, "i8"))
        return outline(holdings, self.task.group.rank, self._cut)


def encode(holdings: Holdings, task: SaveTask, *, takes_over: bool) -> Part:
    """Check the names in the holdings of a rank, and encode their values; record the place of the rank.

    If the store `takes_over` files that did not change, each item has several files.  Raises `StateError` for
    a part of the state that no file can hold.
    """
    task.recorder.coordinate = dict(holdings.coordinate)
    parts = max(1, min(_MOST_PARTS, _MOST_FILES // task.group.size)) if takes_over else 1
    return Part(task, encode_holdings(holdings, task.options), FileCut(task.options.max_file_nbytes, parts))


def lay_out(part: Part, owners: Owners) -> LiveFiles:
    """Return the files of a rank; their chunks follow from the layout of its holdings, and the owners."""
    with part.task.recorder.phase("plan"):
        known = owners.outlines.get(owners.plan)
        return LiveFiles(
            plan=owners.plan,
            items=part.encoded.holdings.items,
            outline=known or part.outline(owners.of_claims),
            sources=part.sources,
            budget_nbytes=part.task.options.inflight_nbytes,
            is_known=known is not None,
        )
