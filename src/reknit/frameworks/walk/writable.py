"""Can memory be written?  A store to a mapping that is read-only would end the process."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import StateError
from reknit.frameworks.walk import overlap

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAPS = Path("/proc/self/maps")


def may_fill(array: Any) -> bool:
    """Tell whether an array of NumPy or torch can be filled: its memory may be written, and is apart."""
    if isinstance(array, np.ndarray):
        apart = array.flags.writeable and overlap.is_distinct(array.shape, array.strides)
    else:
        apart = overlap.is_distinct(array.shape, array.stride())
    if not apart:
        return False
    return not _is_foreign(array) or not _is_within(array, *_read_only())


def require_writable(held: Iterable[tuple[object, Any]]) -> None:
    """Raise `StateError` for memory, given with its place, that the process may not write.

    The kernel is asked once, and only about memory that neither torch nor NumPy allocated itself: torch keeps
    no account of what others gave it, and calls it writable where NumPy asks.
    """
    foreign = [(place, memory) for place, memory in held if _is_foreign(getattr(memory, "memory", memory))]
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
    """Tell whether an array has bytes in one of some ranges, which are in order."""
    low, high = overlap.ends(memory)
    near = bisect_right(starts, high - 1) - 1
    return near >= 0 and low < high and stops[near] > low


def _is_foreign(memory: Any) -> bool:
    """Tell whether an array is in host memory that its library did not allocate; torch cannot resize that."""
    while isinstance(memory, np.ndarray):
        if memory.base is None:
            return not memory.flags.owndata
        memory = memory.base
    if not hasattr(memory, "untyped_storage"):
        return not hasattr(memory, "is_cpu")
    return bool(getattr(memory, "is_cpu", False)) and not memory.untyped_storage().resizable()


def _read_only() -> tuple[list[int], list[int]]:
    """Return where the mappings that this process may not write begin, and the bytes behind them.

    None are known where the kernel has no such list, as only Linux has.
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
