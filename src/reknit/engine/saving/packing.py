"""The claims and receipts of any number of ranks as columns, merged, and packed into one message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np

from reknit.errors import ProtocolError
from reknit.format.checksum import digest
from reknit.planner.columns import NOTHING, Blocks, RankColumns, columns_of, merged, unpacked
from reknit.types.small import decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.engine import messages

    Ints = NDArray[np.int64]

MAX_NUMBERS = 1 << 31
"""The limit on the numbers of one column: a message of a few bytes can claim any number of equal ones."""


class _Ints(msgspec.Struct, array_like=True):
    """`count` numbers as differences from `base`, in `width` bytes each; equal numbers need no bytes."""

    base: int
    width: int
    count: int
    data: bytes


class _PackedBlocks(msgspec.Struct, array_like=True):
    """`planner.columns.Blocks`."""

    table: str
    values: _Ints
    sizes: _Ints
    number: _Ints


class _Section(msgspec.Struct, array_like=True):
    """`planner.columns.RankColumns`; each table is a message, so that equal tables are equal bytes."""

    ranks: _Ints
    tables: dict[str, bytes]
    lists: dict[str, _PackedBlocks]


_encode = msgspec.msgpack.encode
_decode = decoder(tuple[_Section, _Section])
_decode_names: Callable[[bytes], list[Any]] = decoder(list[str])
_decode_table: dict[str, Callable[[bytes], list[Any]]] = {
    "tensors": decoder(list[tuple[str, str, str, tuple[int, ...]]]),
    "aliases": decoder(list[tuple[str, str, str]]),
    "places": decoder(list[tuple[str, ...]]),
    "kept": decoder(list[tuple[str, str, str]]),
    "unequal": decoder(list[tuple[str, str, str]]),
    "reads": decoder(list[bytes]),
}


class Sections(NamedTuple):
    """The claims, or receipts, of any ranks: columns about each rank, and about its shards or its chunks."""

    of_ranks: RankColumns
    of_rows: RankColumns

    def pack(self) -> bytes:
        """Return them as one message."""
        return _encode([_packed(section) for section in self])

    @classmethod
    def unpack(cls, parts: Sequence[bytes]) -> list[Sections]:
        """Return the content of each of several messages."""
        return _unpacked(parts)


def claims(rank: int, claimed: messages.RankClaims) -> Sections:
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
    keys, nbytes = (unpacked(claimed.shards.keys, "u8"), unpacked(claimed.shards.nbytes, "i8"))
    return Sections(own, columns_of(rank, {}, {"keys": (keys, ""), "nbytes": (nbytes, "")}))


def merge_claims(parts: Sequence[Sections]) -> Sections:
    """Return the claims of several ranks, or of several parts of the tree, as one.

    The order in which parts are merged, and in how many steps, makes no difference.
    """
    from reknit.planner.assemble import thinned  # a rank without ranks below it merges nothing

    claims, shards = zip(*parts, strict=True)
    return Sections(thinned(merged(claims)), merged(shards))


def merge_receipts(parts: Sequence[Sections]) -> Sections:
    """Return the receipts of several ranks, or of several parts of the tree, as one.

    The order in which parts are merged, and in how many steps, makes no difference.
    """
    receipts, chunks = zip(*parts, strict=True)
    return Sections(merged(receipts), merged_chunks(chunks))


def merged_chunks(parts: Sequence[RankColumns]) -> RankColumns:
    """Return the chunks of all parts, with the dimensions of the widest."""
    from reknit.planner.assemble import num_dims, widened  # as above

    ndim = max((num_dims(part) for part in parts), default=0)
    return merged([widened(part, ndim) for part in parts if len(part.ranks)])


def _packed(section: RankColumns) -> _Section:
    return _Section(
        _narrow(section.ranks),
        {name: _encode(entries) for name, entries in sorted(section.tables.items())},
        {
            name: _PackedBlocks(c.table, _narrow(c.values), _narrow(c.sizes), _narrow(c.number))
            for name, c in sorted(section.lists.items())
        },
    )


def _unpacked(parts: Sequence[bytes]) -> list[Sections]:
    """Return the sections of several messages; tables with equal bytes are decoded once, to one object."""
    tables: dict[tuple[str, bytes], list[Any]] = {}

    def table(name: str, data: bytes) -> list[Any]:
        if (name, data) not in tables:
            tables[name, data] = _decode_table.get(name, _decode_names)(data)
        return tables[name, data]

    def columns(section: _Section) -> RankColumns:
        return RankColumns(
            _wide(section.ranks),
            {name: table(name, data) for name, data in section.tables.items()},
            {
                name: Blocks(_wide(c.values), _wide(c.sizes), _wide(c.number), c.table)
                for name, c in section.lists.items()
            },
        )

    return [Sections(*map(columns, _decode(part))) for part in parts]


def _narrow(column: Ints) -> _Ints:
    """Return a column in as few bytes as its numbers need."""
    if not len(column):
        return _Ints(0, 0, 0, b"")
    if len(column) == 1:  # the usual column of a single rank
        return _Ints(int(column[0]), 0, 1, b"")
    low, high = int(column.min()), int(column.max())
    width = next(w for w in (0, 1, 2, 4, 8) if high - low < 1 << 8 * w)
    if width == 0:
        return _Ints(low, 0, len(column), b"")
    base = low if width < 8 else 0
    above = np.ascontiguousarray(column if base == 0 else column - base)
    few = above.astype(f"<i{width}", copy=False)  # too large a number wraps to the bits of `u`
    return _Ints(base, width, len(column), cast("bytes", few.data.cast("B")))


def _wide(column: _Ints) -> Ints:
    """Return the column that `_narrow` made."""
    if not 0 <= column.count <= MAX_NUMBERS or column.width * column.count != len(column.data):
        raise ProtocolError(f"a rank sent a column of {column.count} numbers in {len(column.data)} bytes")
    if column.width == 0:
        equal = np.empty(column.count, np.int64)
        equal.fill(column.base)  # faster than `np.full`, and a merge makes thousands
        return equal
    if column.width == 8:
        return np.frombuffer(column.data, "<i8")
    wide = np.frombuffer(column.data, f"<u{column.width}").astype(np.int64)
    wide += column.base
    return wide
