"""Checks whether memory can be written: a store to a read-only mapping would end the process."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import StateError
from reknit.frameworks.walk import overlap
from reknit.types.shard import Strided

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAPS = Path("/proc/self/maps")


def may_fill(array: Any) -> bool:
    """Return whether an array of NumPy or torch can be filled: in writable memory, its elements apart."""
    if isinstance(array, np.ndarray):
        apart = array.flags.writeable and overlap.is_distinct(array.shape, array.strides)
    else:
        apart = overlap.is_distinct(array.shape, array.stride())
    if not apart:
        return False
    return not _is_foreign(array) or not _is_within(array, *_read_only())


def require_writable(held: Iterable[tuple[object, Any]]) -> None:
    """Raise `StateError` for memory, given with its place, that the process may not write.

    The kernel's list is read once, and only for memory that neither torch nor NumPy allocated itself.  torch
    does not record the protection of such memory, and presents it to NumPy as writable.
    """
    foreign = [
        (place, memory)
        for place, memory in held
        if _is_foreign(memory.memory if type(memory) is Strided else memory)
    ]
    if not foreign:
        return
    starts, stops = _read_only()
    for place, memory in foreign:
        if _is_within(memory, starts, stops):
            what = "an array" if isinstance(memory, np.ndarray) else "a tensor"
            raise StateError(
                f"{place} is {what} over a read-only mapping of a file",
                remedy="load into a copy of it, or map the file so that it may be written",
            )


def _is_within(memory: Any, starts: list[int], stops: list[int]) -> bool:
    """Return whether an array has bytes in one of some ranges, which are in order."""
    low, high = overlap.ends(memory)
    near = bisect_right(starts, high - 1) - 1
    return near >= 0 and low < high and stops[near] > low


def _is_foreign(memory: Any) -> bool:
    """Return whether an array is in host memory of another library; torch cannot resize that."""
    while isinstance(memory, np.ndarray):
        if memory.base is None:
            return not memory.flags.owndata
        memory = memory.base
    if not hasattr(memory, "untyped_storage"):
        return not hasattr(memory, "is_cpu")
    return bool(getattr(memory, "is_cpu", False)) and not memory.untyped_storage().resizable()


def _read_only() -> tuple[list[int], list[int]]:
    """Return the starts of the mappings that this process may not write, and the bytes behind them.

    Both are empty without the kernel's list, which only Linux has.
    """
    starts, stops = [], []
    try:
        lines = _MAPS.read_text().splitlines()
    except FileNotFoundError:
        return [], []
    for line in lines:
        reach, permissions = line.split(maxsplit=2)[:2]
        if "w" not in permissions:
            start, _, stop = reach.partition("-")
            starts.append(int(start, 16))
            stops.append(int(stop, 16))
    return starts, stops
