"""Targets of which two elements share memory: they cannot hold what was saved of both."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from reknit.errors import StateError
from reknit.types.shard import Shard, Strided, full_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def is_distinct(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tell whether an array has a place in memory for each of its elements; strides in any one unit."""
    reach = 0
    steps = sorted((abs(step), length) for step, length in zip(strides, shape, strict=True) if length != 1)
    if not all(length for _, length in steps):
        return True
    for step, length in steps:
        if step <= reach:
            return _is_distinct(steps)
        reach += step * (length - 1)
    return True


def _is_distinct(steps: Sequence[tuple[int, int]]) -> bool:
    """Tell it by marking every element, where strides are smaller than what lies inside them."""
    if not all(step for step, _ in steps):
        return False
    unit = gcd(*(step for step, _ in steps))
    marks = np.zeros(1 + sum(step // unit * (length - 1) for step, length in steps), np.bool_)
    as_strided(marks, [n for _, n in steps], [step // unit for step, _ in steps])[...] = True
    return int(marks.sum()) == np.prod([length for _, length in steps])


class _Where(NamedTuple):
    """The bytes of an array: the address of its first element, its form in them, and the size of one."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def require_apart(shards: Iterable[Shard]) -> None:
    """Raise `StateError` if two shards of different names share memory.

    One sort; what lies apart (nearly all) is not looked at again.
    """
    spaces: dict[Any, tuple[list[Shard], list[int], list[int]]] = {}
    flats: dict[int, tuple[int, int]] = {}
    for shard in shards:
        space, low, high = _ends(shard.memory, flats)
        if low < high:
            held, lows, highs = spaces.setdefault(space, ([], [], []))
            held.append(shard)
            lows.append(low)
            highs.append(high)
    for held, lows, highs in spaces.values():
        low_ends, high_ends = np.array(lows, np.uint64), np.array(highs, np.uint64)
        order = np.argsort(low_ends, kind="stable")
        begins = np.ones(len(held) + 1, np.bool_)
        begins[1:-1] = low_ends[order][1:] >= np.maximum.accumulate(high_ends[order])[:-1]
        firsts = np.flatnonzero(begins)
        for group in np.flatnonzero(np.diff(firsts) > 1).tolist():
            _require_apart([held[n] for n in order[firsts[group] : firsts[group + 1]].tolist()])


def _ends(memory: Any, flats: dict[int, tuple[int, int]]) -> tuple[Any, int, int]:
    """Return where an array is, its first byte there, and the one behind its last; equal where it is empty.

    `flats` has address and itemsize of flat memory that was seen, by its id.
    """
    if isinstance(memory, Strided):
        flat = memory.memory
        if (known := flats.get(id(flat))) is None:
            known = flats[id(flat)] = (flat.data_ptr(), flat.element_size())
        low, size = known[0] + memory.first * known[1], known[1]
        return _space(flat), *_reach(low, memory.lengths, memory.strides, size, size)
    if isinstance(memory, np.ndarray):
        return "cpu", *_reach(*_where(memory), 1)
    if not hasattr(memory, "data_ptr"):
        return None, 0, 0  # of a library whose arrays are not filled where they are
    if memory.is_contiguous():
        low = memory.data_ptr()
        return _space(memory), low, low + memory.numel() * memory.element_size()
    return _space(memory), *_reach(*_where(memory), 1)


def _space(tensor: Any) -> Any:
    return "cpu" if tensor.is_cpu else tensor.device


def _reach(
    address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, unit: int
) -> tuple[int, int]:
    """Return the first byte and the one behind the last; `strides` are counted in units of so many bytes."""
    low, high = address, address + itemsize
    for length, step in zip(shape, strides, strict=True):
        if not length:
            return low, low
        if step > 0:
            high += (length - 1) * step * unit
        else:
            low += (length - 1) * step * unit
    return low, high


def _where(memory: Any) -> _Where:
    """Return where an array lies, in whatever memory that is."""
    if isinstance(memory, np.ndarray):
        return _Where(memory.__array_interface__["data"][0], memory.shape, memory.strides, memory.itemsize)
    size = memory.element_size()
    steps = tuple(step * size for step in memory.stride())
    return _Where(memory.data_ptr(), tuple(memory.shape), steps, size)


def _require_apart(group: Sequence[Shard]) -> None:
    """Raise `StateError` if shards share elements, of which it is known that their ranges in memory meet.

    Parts of one tensor do not share any.
    """
    if len({(shard.item, shard.fqn) for shard in group}) == 1:
        return
    found = [_where(shard.data) for shard in group]
    ends = [_reach(*where, 1) for where in found]
    start = min(low for low, _ in ends)
    unit = gcd(*(n for at in found for n in (at.itemsize, at.address - start, *at.strides)))
    marks = np.zeros((max(high for _, high in ends) - start) // unit, np.bool_)
    views = [
        as_strided(
            marks[(at.address - start) // unit :],
            (*at.shape, at.itemsize // unit),
            (*(step // unit for step in at.strides), 1),
        )
        for at in found
    ]
    for number, (shard, mine) in enumerate(zip(group, views, strict=True)):
        if mine.any():
            mine[...] = False
            for other, theirs in zip(group[:number], views, strict=False):
                if (other.item, other.fqn) != (shard.item, shard.fqn) and not theirs.all():
                    raise _refusal(other, shard)
        mine[...] = True


def _refusal(one: Shard, other: Shard) -> StateError:
    first, second = (full_name(shard.item, shard.fqn) for shard in (one, other))
    return StateError(
        f"{first} and {second} share memory and are not one tensor: what is loaded into one changes the "
        "other",
        remedy="load only one of them, or put a copy of the other into the state",
    )
