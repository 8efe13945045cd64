"""Elements between live arrays (torch or NumPy, any device, any strides) and host bytes, bit for bit."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.types.box import flat_range_boxes
from reknit.types.dtype import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.types.shard import Strided

BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""Name of the type in which elements of a size are moved without being looked at."""

_KINDS = {nbytes: np.dtype(name) for nbytes, name in BITS.items()}

ROUNDED = frozenset(
    ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
"""Floating-point types of less than 32 bits."""

SHORT_ROW_NBYTES = 128
"""Up to here a row of elements is slower to copy than a single element of its size, up to ten times."""


def bits(data: Any) -> Any:
    """Return an array of the same shape on the same memory whose elements are plain bit patterns.

    Of a CPU tensor or a NumPy array the answer is a NumPy array, of a tensor on a device a tensor.
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
    """Tell whether NumPy has a dtype of torch, of which it makes an array quicker than of another view."""
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
    """Return the bytes of a `bits` array, or None where they are not one run in host memory."""
    if isinstance(view, np.ndarray) and view.flags.c_contiguous:
        return view.reshape(-1).view(np.uint8)
    return None


def itemsize(source: Any) -> int:
    """Return the size of an element of a `bits` array."""
    return int(source.itemsize if isinstance(source, np.ndarray) else source.element_size())


def address(source: Any) -> int:
    """Return where the first element of a `bits` array lies."""
    if isinstance(source, np.ndarray):
        return int(source.__array_interface__["data"][0])
    return int(source.data_ptr())


def stage(source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
    """Copy `numel` elements from element `first` (row-major) of a `bits` array to the bytes `out`."""
    if not numel:
        return
    if (flat := contiguous_bytes(source)) is not None:
        itemsize = source.dtype.itemsize
        np.copyto(out, flat[first * itemsize : (first + numel) * itemsize])
        return
    for rectangle, part in rectangles(source, first, numel, out):
        copy(rectangle, part)


def rectangles(
    source: Any, first: int, numel: int, out: NDArray[np.uint8]
) -> Iterator[tuple[Any, NDArray[np.uint8]]]:
    """Yield the rectangles that a range of elements is made of, each with the bytes where it goes."""
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

    `source` begins at the rectangle's first byte, `strides` are in bytes.
    """
    kind = np.dtype(BITS[target.dtype.itemsize])
    array: NDArray[Any] = np.ndarray(tuple(lengths), kind, source, 0, tuple(strides))
    if isinstance(target, np.ndarray):
        _copy_rows(array, target)
    else:
        torch = sys.modules["torch"]
        target.copy_(torch.from_numpy(np.asarray(array, order="C")))


def _copy_rows(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Copy an array to one of the same shape and type."""
    if target.ndim and source.strides[-1] == target.strides[-1] == target.itemsize:
        nbytes = target.shape[-1] * target.itemsize
        if nbytes <= SHORT_ROW_NBYTES:
            # A row is a run in both: as one element it is copied at once.
            row = np.dtype((np.void, nbytes))
            source, target = source.view(row), target.view(row)
    np.copyto(target, source)


def convert(
    source: NDArray[np.uint8], dtype: str, lengths: Sequence[int], strides: Sequence[int], target: Any
) -> None:
    """Copy a strided rectangle into a live array of another dtype, rounding to nearest, ties to even.

    Where `target` is a tensor torch converts, otherwise NumPy does, to the same bits for finite values.
    """
    kind = numpy_dtype(dtype)
    # np.ascontiguousarray would give one dimension to what has none.
    array = np.asarray(np.ndarray(tuple(lengths), kind, source, 0, tuple(strides)), order="C")
    if isinstance(target, np.ndarray):
        np.copyto(target, _converted(array, target.dtype))
        return
    torch = sys.modules["torch"]
    raw = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    with torch.no_grad():
        target.detach().copy_(raw.view(getattr(torch, dtype)).view(tuple(lengths)))


def _converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in another dtype, as torch converts: to less than 32 bits by way of float32."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite, or NaN
        if dtype.itemsize < 4 and dtype.name in ROUNDED:
            array = array.astype(np.float32)
            if dtype.name == "float8_e4m3fn":  # it has no infinity: the largest number stands for more
                array = np.clip(array, -448, 448)
        return array.astype(dtype)
