"""Checks of targets: memory that two of them share gets equal values, and read-only memory is refused."""

from __future__ import annotations

import sys
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.lib.stride_tricks import as_strided

from reknit.errors import StateError
from reknit.types.devices import memory_of
from reknit.types.shard import Strided, full_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from reknit.types.shard import Shard


def is_distinct(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of an array have distinct places in memory; strides in any one unit."""
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
    """Return the result of `is_distinct` by marking every element, for strides within inner extents."""
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


def overlapping(shards: Sequence[Shard]) -> list[list[int]]:
    """Return the shards, by their numbers, that share elements with one of another name, in groups.

    One sort; shards that lie apart (nearly all) are not compared.
    """
    spaces: dict[Any, tuple[list[int], list[int], list[int]]] = {}
    flats: dict[int, tuple[Any, int, int]] = {}
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    for number, shard in enumerate(shards):
        memory = shard.memory
        if type(memory) is kind and memory.is_cpu and memory.is_contiguous():  # nearly all memory
            space, low = "cpu", memory.data_ptr()
            high = low + memory.nbytes
        else:
            space, low, high = _ends(memory, flats)
        if low < high:
            held, lows, highs = spaces.setdefault(space, ([], [], []))
            held.append(number)
            lows.append(low)
            highs.append(high)
    groups: list[list[int]] = []
    for held, lows, highs in spaces.values():
        low_ends, high_ends = np.array(lows, np.uint64), np.array(highs, np.uint64)
        order = np.argsort(low_ends, kind="stable")
        begins = np.ones(len(held) + 1, np.bool_)
        begins[1:-1] = low_ends[order][1:] >= np.maximum.accumulate(high_ends[order])[:-1]
        firsts = np.flatnonzero(begins)
        for group in np.flatnonzero(np.diff(firsts) > 1).tolist():
            near = [held[n] for n in order[firsts[group] : firsts[group + 1]].tolist()]
            if _share(near, shards):
                groups.append(sorted(near))
    return groups


def ends(memory: Any) -> tuple[int, int]:
    """Return the address of the first byte of an array, and that behind its last; equal if it is empty."""
    return _ends(memory, {})[1:]


def _ends(memory: Any, flats: dict[int, tuple[Any, int, int]]) -> tuple[Any, int, int]:
    """Return the memory space of an array, its first byte there, and the one behind its last; equal if empty.

    `flats` has the place and itemsize of flat memory that was seen, by its id.
    """
    if isinstance(memory, np.ndarray):
        return "cpu", *_reach(*_where(memory), 1)
    if type(memory) is Strided:
        flat = memory.memory
        if (known := flats.get(id(flat))) is None:
            known = flats[id(flat)] = (*memory_of(flat), flat.element_size())
        space, start, size = known
        return space, *_reach(start + memory.first * size, memory.lengths, memory.strides, size, size)
    if not hasattr(memory, "data_ptr"):
        return None, 0, 0  # of a library whose arrays are not filled in place
    space, low = memory_of(memory)
    if memory.is_contiguous():
        return space, low, low + memory.nbytes
    return space, *_reach(*_where(memory), 1)


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
    """Return the bytes of an array, in any kind of memory."""
    _, start = memory_of(memory)
    if isinstance(memory, np.ndarray):
        return _Where(start, memory.shape, memory.strides, memory.itemsize)
    size = memory.element_size()
    steps = tuple(step * size for step in memory.stride())
    return _Where(start, tuple(memory.shape), steps, size)


def _share(near: Sequence[int], shards: Sequence[Shard]) -> bool:
    """Return whether shards share elements, if their ranges in memory meet.

    Parts of one tensor do not share any.
    """
    names = [(shards[n].item, shards[n].fqn) for n in near]
    if len(set(names)) == 1:
        return False
    found = [_where(shards[n].data) for n in near]
    taken = _JointMemory.of(found)
    for number, name in enumerate(names):
        mine = taken.view(taken.marks, found[number])
        if mine.any():
            mine[...] = False
            for other, theirs in zip(names[:number], found, strict=False):
                if other != name and not taken.view(taken.marks, theirs).all():
                    return True
        mine[...] = True
    return False


class _JointMemory(Struct, frozen=True):
    """The joint memory of arrays: its first address, its content in units, and a mark for each.

    A unit is a number of bytes, at most 8, that divides the address and the size of every element.
    """

    start: int
    content: NDArray[Any]
    marks: NDArray[np.bool_]

    @classmethod
    def of(cls, found: Sequence[_Where]) -> _JointMemory:
        """Return the memory of some arrays, without a mark."""
        ends = [_reach(*where, 1) for where in found]
        start, stop = min(low for low, _ in ends), max(high for _, high in ends)
        unit = gcd(8, *(n for at in found for n in (at.itemsize, at.address - start, *at.strides)))
        num = (stop - start) // unit
        return cls(start, np.zeros(num, f"u{unit}"), np.zeros(num, np.bool_))

    def view(self, rows: NDArray[Any], at: _Where) -> NDArray[Any]:
        """Return the part of `rows`, content or marks, for an array: its elements, each with its units."""
        unit, size = self.content.itemsize, rows.itemsize
        steps = (*(step // unit * size for step in at.strides), size)
        return as_strided(rows[(at.address - self.start) // unit :], (*at.shape, at.itemsize // unit), steps)

    def units(self, dense: Any) -> NDArray[Any]:
        """Return the elements of a dense array, each with its units."""
        shape = tuple(dense.shape)
        if not isinstance(dense, np.ndarray):
            dense = dense.cpu().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        units: NDArray[Any] = dense.reshape(-1).view(self.content.dtype)
        return units.reshape((*shape, -1))


class FilledBeside:
    """Shards that share memory, each filled in a copy; `put` copies the agreed values to that memory.

    `names` are those of the shards, and no other shard has one of these.
    """

    def __init__(self, shards: Sequence[Shard], groups: Sequence[Sequence[int]]) -> None:
        shared = {(shards[number].item, shards[number].fqn) for group in groups for number in group}
        held = [number for number, one in enumerate(shards) if (one.item, one.fqn) in shared]
        place = {number: at for at, number in enumerate(held)}
        self.names = [full_name(*name) for name in shared]
        self._groups = [[place[number] for number in group] for group in groups]
        self._live = [shards[number].data for number in held]
        self._beside = [_copy(live) for live in self._live]
        self.shards = {
            id(shards[number]): structs.replace(shards[number], memory=memory)
            for number, memory in zip(held, self._beside, strict=True)
        }

    def require_agreement(self) -> None:
        """Raise `StateError` if two names have different values for the same memory."""
        for group in self._groups:
            found = [_where(self._live[number]) for number in group]
            image = _JointMemory.of(found)
            for at, number in zip(found, group, strict=True):
                content, marks = image.view(image.content, at), image.view(image.marks, at)
                mine = image.units(self._beside[number])
                differ = marks & (content != mine)
                if differ.any():
                    raise self._refusal(number, image, differ, at)
                content[...] = mine
                marks[...] = True

    def put(self) -> None:
        """Copy the filled values into the live memory."""
        for live, beside in zip(self._live, self._beside, strict=True):
            if isinstance(live, np.ndarray):
                np.copyto(live, beside)
            else:
                torch = sys.modules["torch"]
                with torch.inference_mode(live.is_inference()), torch.no_grad():
                    live.copy_(beside)

    def _refusal(self, number: int, image: _JointMemory, differ: NDArray[np.bool_], at: _Where) -> StateError:
        """Return the error for a shard that contradicts an earlier one, which is searched for."""
        image.marks[...] = False
        image.view(image.marks, at)[...] = differ
        group = next(group for group in self._groups if number in group)
        other = next(one for one in group if image.view(image.marks, _where(self._live[one])).any())
        shards = list(self.shards.values())
        one, two = (full_name(shards[n].item, shards[n].fqn) for n in (other, number))
        return StateError(
            f"{one} and {two} share memory in the target, and differ in the checkpoint where they do",
            remedy="load only one of them, or put a copy of the other into the state",
        )


def fill_beside(shards: list[Shard], resizable: Collection[tuple[str, str]]) -> FilledBeside | None:
    """Return the shards that are to be filled in copies beside their memory, or None.

    Raises `StateError` if one of them has another shape in the checkpoint.
    """
    groups = overlapping(shards)
    for group in groups:
        if any((shards[number].item, shards[number].fqn) in resizable for number in group):
            raise _reshaped(*(shards[number] for number in group[:2]))
    return FilledBeside(shards, groups) if groups else None


def _reshaped(one: Shard, other: Shard) -> StateError:
    """Return the error for shards that share memory and cannot be compared."""
    first, second = (full_name(shard.item, shard.fqn) for shard in (one, other))
    return StateError(
        f"{first} and {second} share memory and are not one tensor, and one has another shape in the "
        "checkpoint: a load into one changes the other",
        remedy="load only one of them, or put a copy of the other into the state",
    )


def _copy(live: Any) -> Any:
    """Return a copy of an array, dense and in row-major order."""
    if isinstance(live, np.ndarray):
        return live.copy(order="C")
    torch = sys.modules["torch"]
    return live.detach().clone(memory_format=torch.contiguous_format)


_MAPS = Path("/proc/self/maps")


def may_fill(array: Any) -> bool:
    """Return whether an array of NumPy or torch can be filled: in writable memory, its elements apart."""
    if isinstance(array, np.ndarray):
        apart = array.flags.writeable and is_distinct(array.shape, array.strides)
    else:
        apart = is_distinct(array.shape, array.stride())
    if not apart:
        return False
    return not _is_foreign(array) or not _within([ends(array)])


def require_writable(held: Iterable[tuple[object, Any]]) -> None:
    """Raise `StateError` for memory, given with its place, that the process may not write.

    The kernel's list is read once, and only for memory that neither torch nor NumPy allocated itself.  torch
    does not record the protection of such memory, and presents it to NumPy as writable.
    """
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    foreign = [
        (place, memory)
        for place, memory in held
        if (
            not memory.untyped_storage().resizable()
            if type(memory) is kind and memory.is_cpu
            else _is_foreign(memory.memory if type(memory) is Strided else memory)
        )
    ]
    if not foreign:
        return
    flats: dict[int, tuple[Any, int, int]] = {}
    for number in _within([_ends(memory, flats)[1:] for _, memory in foreign]):
        place, memory = foreign[number]
        what = "an array" if isinstance(memory, np.ndarray) else "a tensor"
        raise StateError(
            f"{place} is {what} over a read-only mapping of a file",
            remedy="load into a copy of it, or map the file so that it may be written",
        )


def _within(held: Sequence[tuple[int, int]]) -> list[int]:
    """Return the numbers of the ranges of memory with bytes that this process may not write."""
    starts, stops = (np.array([0, *each], np.uint64) for each in _read_only())
    lows, highs = np.array(held, np.uint64).T
    near = np.searchsorted(starts, highs) - 1
    found: list[int] = np.flatnonzero((near >= 0) & (lows < highs) & (stops[near] > lows)).tolist()
    return found


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
