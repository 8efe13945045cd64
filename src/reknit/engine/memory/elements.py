"""Elements between live arrays (torch or NumPy, any device, any strides) and host bytes, bit for bit."""

from __future__ import annotations

import os
import sys
import threading
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from reknit.format.checksum import digest
from reknit.types import devices
from reknit.types.box import Box, flat_range_boxes
from reknit.types.devices import current_stream, on_stream, side_stream
from reknit.types.dtype import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.types.shard import Strided


BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""Name of the type that stands for all dtypes of an element size, when bits are moved."""

_KINDS = {nbytes: np.dtype(name) for nbytes, name in BITS.items()}

ROUNDED = frozenset(
    ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
"""Floating-point types of less than 32 bits."""

SHORT_ROW_NBYTES = 128
"""Up to this size, copying a row of elements takes up to ten times as long as one element of that size."""

LAID_NBYTES = 8 << 20
"""Device memory that laying out or converting elements from the host may take."""

_laying = threading.Lock()


def _after_fork() -> None:
    global _laying
    _laying = threading.Lock()  # a thread that the child does not have may have held it


os.register_at_fork(after_in_child=_after_fork)


def bits(data: Any) -> Any:
    """Return an array of the same shape on the same memory whose elements are plain bit patterns.

    For a CPU tensor or a NumPy array this is a NumPy array, for a tensor on a device it is a tensor.
    """
    if isinstance(data, np.ndarray):
        return data.view(BITS[data.dtype.itemsize])
    tensor = data.detach() if data.requires_grad else data
    on_host = tensor.device.type == "cpu"
    if on_host and _has_numpy(tensor.dtype):
        array = tensor.numpy()
        return array.view(_KINDS[array.itemsize])
    if tensor.element_size() < 16:
        tensor = tensor.view(getattr(sys.modules["torch"], BITS[tensor.element_size()]))
    return tensor.numpy() if on_host else tensor


@lru_cache(maxsize=64)
def _has_numpy(dtype: Any) -> bool:
    """Return whether NumPy has a dtype of torch: then `numpy()` needs no other view, and is faster."""
    try:
        sys.modules["torch"].empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def rectangle(flat: Any, at: Strided) -> Any:
    """Return a rectangle of one-dimensional `bits`."""
    if isinstance(flat, np.ndarray):
        step = flat.itemsize
        return np.ndarray(at.lengths, flat.dtype, flat, at.first * step, [n * step for n in at.strides])
    return flat.as_strided(at.lengths, at.strides, flat.storage_offset() + at.first)


def contiguous_bytes(view: Any) -> NDArray[np.uint8] | None:
    """Return the bytes of a `bits` array, or None if they are not one run in host memory."""
    if isinstance(view, np.ndarray) and view.flags.c_contiguous:
        return view.reshape(-1).view(np.uint8)
    return None


def itemsize(source: Any) -> int:
    """Return the size of an element of a `bits` array."""
    return int(source.itemsize if isinstance(source, np.ndarray) else source.element_size())


def address(source: Any) -> int:
    """Return the address of the first element of a `bits` array."""
    if isinstance(source, np.ndarray):
        return int(source.__array_interface__["data"][0])
    return int(source.data_ptr())


def stage(source: Any, first: int, numel: int, out: NDArray[np.uint8], *, non_blocking: bool = False) -> None:
    """Copy `numel` elements from element `first` (row-major) of a `bits` array to the bytes `out`.

    With `non_blocking` a device may still be copying when this returns.
    """
    if not numel:
        return
    if (flat := contiguous_bytes(source)) is not None:
        itemsize = source.dtype.itemsize
        np.copyto(out, flat[first * itemsize : (first + numel) * itemsize])
        return
    if not isinstance(source, np.ndarray) and source.is_contiguous():
        copy(source.view(-1)[first : first + numel], out, non_blocking=non_blocking)
        return
    for rectangle, part in rectangles(source, first, numel, out):
        copy(rectangle, part, non_blocking=non_blocking)


def rectangles(
    source: Any, first: int, numel: int, out: NDArray[np.uint8]
) -> Iterator[tuple[Any, NDArray[np.uint8]]]:
    """Yield the rectangles that make up a range of elements, each with its part of `out`."""
    itemsize = len(out) // numel
    for box in flat_range_boxes(source.shape, first, numel):
        nbytes = box.numel * itemsize
        yield source[box.slices()], out[:nbytes]
        out = out[nbytes:]


def copy(source: Any, out: NDArray[np.uint8], *, non_blocking: bool = False) -> None:
    """Copy a rectangle of a `bits` array to bytes, in row-major order."""
    if isinstance(source, np.ndarray):
        np.copyto(out.view(source.dtype).reshape(source.shape), source)
    else:
        target = sys.modules["torch"].from_numpy(out).view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=non_blocking)


def deliver(source: NDArray[np.uint8], lengths: Sequence[int], strides: Sequence[int], target: Any) -> None:
    """Copy a strided rectangle of bytes into a `bits` array of shape `lengths`.

    `source` begins at the first byte of the rectangle; `strides` are in bytes.  A device with streams may
    still be copying when this returns, and `source` must not change until it is done.
    """
    if devices.is_queued(target):
        if target.is_contiguous() and _is_run(lengths, strides, target.element_size()):
            with _mode_of(target):
                target.view(-1).view(sys.modules["torch"].uint8).copy_(
                    _on_host(source[: target.numel() * target.element_size()]), non_blocking=True
                )
        else:
            _lay_out(source, target.dtype, lengths, strides, target)
        return
    kind = np.dtype(BITS[target.dtype.itemsize])
    array: NDArray[Any] = np.ndarray(tuple(lengths), kind, source, 0, tuple(strides))
    if isinstance(target, np.ndarray):
        _copy_rows(array, target)
    else:
        torch = sys.modules["torch"]
        with _mode_of(target):
            target.copy_(torch.from_numpy(np.asarray(array, order="C")))


def _copy_rows(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Copy an array to another array of the same shape and type."""
    if target.ndim and source.strides[-1] == target.strides[-1] == target.itemsize:
        nbytes = target.shape[-1] * target.itemsize
        if nbytes <= SHORT_ROW_NBYTES:
            # A row is a run in both arrays: NumPy copies it faster as a single element.
            row = np.dtype((np.void, nbytes))
            source, target = source.view(row), target.view(row)
    np.copyto(target, source)


def convert(
    source: NDArray[np.uint8], dtype: str, lengths: Sequence[int], strides: Sequence[int], target: Any
) -> None:
    """Copy a strided rectangle into a live array of another dtype, rounding to nearest, ties to even.

    torch converts into a tensor, on its device, and NumPy into an array; finite values get the same bits.  A
    device may still be copying when this returns, as after `deliver`.
    """
    if devices.is_queued(target):
        dtype_there = getattr(sys.modules["torch"], dtype)
        _lay_out(source, dtype_there, lengths, strides, target.detach())
        return
    kind = numpy_dtype(dtype)
    # np.ascontiguousarray would add a dimension to a scalar.
    array = np.asarray(np.ndarray(tuple(lengths), kind, source, 0, tuple(strides)), order="C")
    if isinstance(target, np.ndarray):
        np.copyto(target, _converted(array, target.dtype))
        return
    torch = sys.modules["torch"]
    raw = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    target = target.detach()
    with _mode_of(target):
        target.copy_(raw.view(getattr(torch, dtype)).view(tuple(lengths)))


def _converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in another dtype, converted as by torch: to less than 32 bits by way of float32."""
    with np.errstate(over="ignore", invalid="ignore"):  # too large numbers become infinite, or NaN
        if dtype.itemsize < 4 and dtype.name in ROUNDED:
            array = array.astype(np.float32)
            if dtype.name == "float8_e4m3fn":  # without infinity: torch takes the largest number
                array = np.clip(array, -448, 448)
        return array.astype(dtype)


def _lay_out(
    source: NDArray[np.uint8], dtype: Any, lengths: Sequence[int], strides: Sequence[int], target: Any
) -> None:
    """Copy a strided rectangle of elements of a dtype to a tensor, whose device lays it out and converts it.

    The device receives all bytes from the first to the last, at most `LAID_NBYTES` at a time.  Each part is
    allocated and freed in the order of the stream, so the next part reuses its memory.
    """
    torch = sys.modules["torch"]
    if not target.numel():
        return
    steps = [stride // dtype.itemsize for stride in strides]
    for part in _cut(Box.whole(tuple(lengths)), strides, dtype.itemsize):
        first = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
        nbytes = _reach(part, strides, dtype.itemsize)
        place = (*part.slices(), ...)
        with _laying, _mode_of(target):
            there = torch.empty(nbytes, dtype=torch.uint8, device=target.device)
            there.copy_(_on_host(source[first : first + nbytes]), non_blocking=True)
            target[place].copy_(there.view(dtype).as_strided(part.lengths, steps))
            del there


def _cut(box: Box, strides: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Yield the parts of a box; each spans at most `LAID_NBYTES` bytes, or has one element."""
    if _reach(box, strides, itemsize) <= LAID_NBYTES or box.numel <= 1:
        yield box
        return
    axis = max(range(box.ndim), key=lambda d: (box.lengths[d] - 1) * strides[d])
    half = box.lengths[axis] // 2
    for start, length in ((0, half), (half, box.lengths[axis] - half)):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[axis], lengths[axis] = offsets[axis] + start, length
        yield from _cut(Box(tuple(offsets), tuple(lengths)), strides, itemsize)


def _reach(box: Box, strides: Sequence[int], itemsize: int) -> int:
    """Return the number of bytes from the first to the last of a box that is not empty."""
    return itemsize + sum((n - 1) * stride for n, stride in zip(box.lengths, strides, strict=True))


def _is_run(lengths: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether a rectangle is one run of bytes, in row-major order."""
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length != 1 and stride != itemsize:
            return False
        itemsize *= length
    return True


def _on_host(source: NDArray[np.uint8]) -> Any:
    """Return bytes as a tensor on the host."""
    return sys.modules["torch"].from_numpy(source if source.flags.writeable else source.copy())


def _mode_of(target: Any) -> Any:
    """Return a context in which this thread may write to a tensor: inference tensors need inference mode."""
    torch = sys.modules["torch"]
    return torch.inference_mode() if target.is_inference() else torch.no_grad()


STRIDE_NBYTES = 4096
"""The sample has one line of each stride, from the first byte on."""

LINE_NBYTES = 64

LOT_LINES = 1 << 16
"""Lines of a device that are summed at once: they sample 256 MiB of state, and take 12 MiB beside it."""

_FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd numbers without a pattern in their bits."""


class Range(Struct, frozen=True):
    """`numel` elements from element `first` of a contiguous `bits` array, at least a line of bytes."""

    source: Any
    first: int
    numel: int


class Sample:
    """One line of 64 bytes of each 4 KiB of ranges of memory, as they are now.

    Reading a whole cache line takes as long as reading one byte of it.  A change outside of these lines is
    not noticed.  For lines on a device only sums are kept, on the device.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        on_devices: dict[Any, list[int]] = {}
        for number, one in enumerate(ranges):
            if not isinstance(one.source, np.ndarray):
                on_devices.setdefault(one.source.device, []).append(number)
        on_host = [n for n, one in enumerate(ranges) if isinstance(one.source, np.ndarray)]
        self._digests = {number: _digest(ranges[number]) for number in on_host}
        self._lots = {device: list(_lots(ranges, numbers)) for device, numbers in on_devices.items()}
        # On the current stream, which also changes the memory later, so that the sums come first.
        self._sums = {device: self._summed(lots) for device, lots in self._lots.items()}
        for device in self._lots:
            side_stream(device).wait_stream(current_stream(device))

    def changed(self) -> Iterator[int]:
        """Yield the numbers of the ranges that have changed."""
        for number, before in self._digests.items():
            if _digest(self._ranges[number]) != before:
                yield number
        for device, lots in self._lots.items():
            with on_stream(side_stream(device)):
                differ = (self._sums[device] != self._summed(lots)).cpu().nonzero().flatten().tolist()
            numbers = [part.number for lot in lots for part in lot]
            yield from sorted({numbers[place] for place in differ})

    def _summed(self, lots: Sequence[Sequence[_Lines]]) -> Any:
        """Return a sum for each part, which differs after any change of one word of its lines."""
        torch, sums = sys.modules["torch"], []
        for lot in lots:
            words = torch.cat([_rows(self._ranges[part.number], part) for part in lot]).view(torch.int64)
            lines = _mixed(words.view(-1)).view_as(words).sum(1).cumsum(0)
            ends = accumulate(part.num_lines for part in lot)
            upto = torch.cat([lines[end - 1 : end] for end in ends])  # without a copy to the device
            sums.append(torch.cat([upto[:1], upto[1:] - upto[:-1]]))
        return torch.cat(sums)


def _mixed(words: Any) -> Any:
    """Return words that depend on the value and the place of each word, so that sums show any change."""
    torch = sys.modules["torch"]
    mixed = torch.arange(len(words), dtype=torch.int64, device=words.device).mul_(_FACTORS[0]).add_(words)
    mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)
    return mixed.mul_(_FACTORS[1])


class _Lines(Struct, frozen=True):
    """Some lines of the range with a number."""

    number: int
    first: int
    num_lines: int


def _lots(ranges: Sequence[Range], numbers: Sequence[int]) -> Iterator[list[_Lines]]:
    """Yield all lines of some ranges, in lots of at most `LOT_LINES` lines."""
    lot, room = list[_Lines](), LOT_LINES
    for number in numbers:
        first, left = 0, _num_lines(ranges[number])
        while left:
            taken = min(left, room)
            lot.append(_Lines(number, first, taken))
            first, left, room = first + taken, left - taken, room - taken
            if not room:
                yield lot
                lot, room = [], LOT_LINES
    if lot:
        yield lot


def _num_lines(one: Range) -> int:
    return (one.numel * itemsize(one.source) - LINE_NBYTES) // STRIDE_NBYTES + 1


def _digest(one: Range) -> int:
    nbytes = one.source.itemsize
    start, count = one.first * nbytes, (one.numel * nbytes - LINE_NBYTES) // STRIDE_NBYTES + 1
    lines: Any = np.ndarray((count,), f"V{LINE_NBYTES}", one.source, start, (STRIDE_NBYTES,))
    return digest(lines.copy().view(np.uint8))


def _rows(one: Range, part: _Lines) -> Any:
    torch = sys.modules["torch"]
    flat = one.source.view(-1)[one.first : one.first + one.numel].view(torch.uint8)
    start = flat.storage_offset() + part.first * STRIDE_NBYTES
    return flat.as_strided((part.num_lines, LINE_NBYTES), (STRIDE_NBYTES, 1), start)
