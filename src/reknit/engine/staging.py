"""Elements between live arrays (torch or NumPy, any device, any strides) and host bytes, bit for bit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.types.box import flat_range_boxes
from reknit.types.dtype import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""Name of the type in which elements of a size are moved without being looked at."""


def bits(data: Any) -> Any:
    """Return an array of the same shape on the same memory whose elements are plain bit patterns.

    Of a CPU tensor or a NumPy array the answer is a NumPy array, of a tensor on a device a tensor.
    """
    if isinstance(data, np.ndarray):
        return data.view(BITS[data.dtype.itemsize])
    torch = sys.modules["torch"]
    tensor = data.detach()
    if tensor.element_size() < 16:
        tensor = tensor.view(getattr(torch, BITS[tensor.element_size()]))
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def contiguous_bytes(view: Any) -> NDArray[np.uint8] | None:
    """Return the bytes of a `bits` array, or None where they are not one run in host memory."""
    if isinstance(view, np.ndarray) and view.flags.c_contiguous:
        return view.reshape(-1).view(np.uint8)
    return None


def stage(source: Any, first: int, numel: int, out: NDArray[np.uint8]) -> None:
    """Copy `numel` elements from element `first` (row-major) of a `bits` array to the bytes `out`."""
    if not numel:
        return
    if (flat := contiguous_bytes(source)) is not None:
        itemsize = source.dtype.itemsize
        np.copyto(out, flat[first * itemsize : (first + numel) * itemsize])
        return
    itemsize = len(out) // numel
    for box in flat_range_boxes(source.shape, first, numel):
        nbytes = box.numel * itemsize
        _copy(source[box.slices()], out[:nbytes])
        out = out[nbytes:]


def _copy(source: Any, out: NDArray[np.uint8]) -> None:
    """Copy a rectangle of a `bits` array to bytes, in row-major order."""
    if isinstance(source, np.ndarray):
        np.copyto(out.view(source.dtype).reshape(source.shape), source)
    else:
        torch = sys.modules["torch"]
        torch.from_numpy(out).view(source.dtype).view(source.shape).copy_(source)


def deliver(source: NDArray[np.uint8], lengths: Sequence[int], strides: Sequence[int], target: Any) -> None:
    """Copy a strided rectangle of bytes into a `bits` array of shape `lengths`.

    `source` begins at the rectangle's first byte, `strides` are in bytes.
    """
    kind = np.dtype(BITS[target.dtype.itemsize])
    array: NDArray[Any] = np.ndarray(tuple(lengths), kind, source, 0, tuple(strides))
    if isinstance(target, np.ndarray):
        np.copyto(target, array)
    else:
        torch = sys.modules["torch"]
        target.copy_(torch.from_numpy(np.asarray(array, order="C")))


def convert(
    source: NDArray[np.uint8], dtype: str, lengths: Sequence[int], strides: Sequence[int], target: Any
) -> None:
    """Copy a strided rectangle into a live array of another dtype, rounding to nearest even.

    Where `target` is a tensor torch converts, otherwise NumPy does.
    """
    kind = numpy_dtype(dtype)
    # np.ascontiguousarray would give one dimension to what has none.
    array = np.asarray(np.ndarray(tuple(lengths), kind, source, 0, tuple(strides)), order="C")
    if isinstance(target, np.ndarray):
        np.copyto(target, array.astype(target.dtype))
        return
    torch = sys.modules["torch"]
    raw = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    with torch.no_grad():
        target.detach().copy_(raw.view(getattr(torch, dtype)).view(tuple(lengths)))
