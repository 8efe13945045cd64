"""Can memory be written?  A store to a mapping that is read-only would end the process."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reknit.errors import StateError
from reknit.frameworks import overlap

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAPS = Path("/proc/self/maps")


def require_writable(held: Iterable[tuple[object, Any]]) -> None:
    """Raise `StateError` for memory, given with its place, that the process may not write.

    The kernel is asked once, and only about memory that torch did not allocate itself: torch keeps no account
    of what others gave it.
    """
    foreign = [(place, memory) for place, memory in held if _is_foreign(getattr(memory, "memory", memory))]
    if not foreign:
        return
    starts, stops = _read_only()
    for place, memory in foreign:
        low, high = overlap.ends(memory)
        near = bisect_right(starts, high - 1) - 1
        if near >= 0 and low < high and stops[near] > low:
            raise StateError(
                f"{place} is a tensor over a read-only mapping of a file",
                remedy="load into a copy of it, or map the file so that it may be written",
            )


def _is_foreign(memory: Any) -> bool:
    """Tell whether a tensor of torch is in host memory that torch did not allocate, and cannot resize."""
    return bool(getattr(memory, "is_cpu", False)) and not memory.untyped_storage().resizable()


def _read_only() -> tuple[list[int], list[int]]:
    """Return where the mappings that this process may not write begin, and the bytes behind them."""
    starts, stops = [], []
    for line in _MAPS.read_text().splitlines():
        reach, permissions = line.split(maxsplit=2)[:2]
        if "w" not in permissions:
            start, _, stop = reach.partition("-")
            starts.append(int(start, 16))
            stops.append(int(stop, 16))
    return starts, stops
