"""Columns of numbers, and sets of names, as the bytes that messages carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

Name = tuple[str, str]
"""Item and FQN."""


def packed(column: Any, kind: str) -> bytes:
    """Return a column of numbers as little-endian bytes."""
    return np.ascontiguousarray(column, np.dtype(kind).newbyteorder("<")).tobytes()


def unpacked(data: bytes, kind: str) -> NDArray[Any]:
    """Return the column that `packed` made."""
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<"))


def bitmaps(names: Iterable[Name], taken: Container[Name]) -> dict[str, bytes]:
    """Return, by item, a bit per name of the item: whether it is one of the taken.

    Within an item all ranks have the same names in the same order, and may have other items besides.
    """
    flags: dict[str, list[bool]] = {}
    for name in names:
        flags.setdefault(name[0], []).append(name in taken)
    return {item: np.packbits(np.array(bits, np.bool_)).tobytes() for item, bits in flags.items()}


def taken_numbers(first: Mapping[str, int], taken: Mapping[str, bytes]) -> NDArray[np.int64]:
    """Return the numbers of the names that `bitmaps` say are taken; those of an item count from `first`."""
    bits = {item: np.unpackbits(np.frombuffer(data, np.uint8)) for item, data in taken.items()}
    parts = [np.flatnonzero(flags) + first[item] for item, flags in bits.items()]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def left_over(names: Iterable[Name], ranks: Sequence[Mapping[str, bytes]]) -> list[Name]:
    """Return the names that none of the ranks took, given the `bitmaps` of each."""
    by_item: dict[str, list[Name]] = {}
    for name in names:
        by_item.setdefault(name[0], []).append(name)
    left = []
    for item, members in by_item.items():
        union = np.zeros(-(-len(members) // 8), np.uint8)
        for taken in ranks:
            if item in taken:
                union |= np.frombuffer(taken[item], np.uint8)
        bits = np.unpackbits(union, count=len(members)).tolist()
        left += [name for name, bit in zip(members, bits, strict=True) if not bit]
    return left
