"""Compare the copies of several ranks, and decide which of them to keep if they differ."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from reknit.engine import round_messages
from reknit.engine.memory.elements import contiguous_bytes, itemsize, stage
from reknit.engine.memory.staging import GATHER_NBYTES, gathered
from reknit.engine.packed_columns import packed, unpacked
from reknit.errors import StateError
from reknit.format.checksum import digest
from reknit.format.values.blob_codec import encode_blobs
from reknit.planner.resolve import shard_key
from reknit.types import devices
from reknit.types.decoding import decoder
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from reknit.engine.saving.claims import EncodedHoldings
    from reknit.types.shard import Shard

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


class CopySplit(NamedTuple):
    """The decision of a rank about differing copies: values that it keeps, and tensors that it cannot."""

    blobs: list[round_messages.EncodedBlob]
    kept: list[CopyNote]
    unequal: list[CopyNote]


EQUAL = CopySplit([], [], [])


class Chosen(NamedTuple):
    """The shards that a rank compares, the same at every save of a layout.

    `numbers` begins with the `num_kept` shards whose values it keeps if they differ.
    """

    numbers: list[int]
    nbytes: list[int]
    num_kept: int
    keys: bytes
    names: bytes

    def copies(self, sources: Sequence[Any]) -> round_messages.Copies:
        """Return the digests of the copies in one save, from the `bits` of all shards."""
        digests, data = [0] * len(self.numbers), [b""] * self.num_kept
        for place, part in first_bytes([sources[n] for n in self.numbers], self.nbytes):
            digests[place] = digest(part.data)
            if place < self.num_kept:
                data[place] = part.tobytes()
        return round_messages.Copies(self.keys, packed(digests, "u8"), self.names, b"".join(data))


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
    copies: round_messages.Copies, differing: Sequence[tuple[int, list[int]]], rank: int, check: str
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
        done.blobs.append(round_messages.EncodedBlob(item, 0, {"rank": rank}, blob))
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
