"""The arrays and numbers of NumPy in a pickle, and the shapes that it has."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import FormatError, shown
from reknit.format.foreign.safe_pickle import PickledObject, UnreadError
from reknit.types.shard import MAX_NDIM

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NBYTES = (1 << 63) - 1
_CODE = re.compile(r"[biufc][0-9]{1,2}|[US][1-9][0-9]{0,6}")
"""Codes of the types of NumPy that are read: numbers, and texts and bytes of a fixed size."""


def is_count(number: Any) -> bool:
    """Return whether a value is a number of bytes or elements."""
    return type(number) is int and 0 <= number <= MAX_NBYTES


def shape_of(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple.  Raises `FormatError` for anything else."""
    if not isinstance(shape, tuple | list) or len(shape) > MAX_NDIM or not all(map(is_count, shape)):
        raise FormatError("a pickle has an impossible shape")
    return tuple(shape)


def _numpy_scalar(kind: Any, data: Any) -> Any:
    dtype = dtype_from(kind)
    if type(data) is not bytes or len(data) != dtype.itemsize:
        raise FormatError("a pickle has an impossible value of NumPy")
    return np.frombuffer(data, dtype)[0]


def dtype_from(made: Any) -> np.dtype[Any]:
    """Return the dtype of a pickled one: numbers and texts in either order of bytes."""
    code = (
        made.args[0] if isinstance(made, PickledObject) and made.name == "numpy.dtype" and made.args else ""
    )
    if type(code) is not str or not _CODE.fullmatch(code):
        raise UnreadError(f"a pickle has data of NumPy of the type {shown(code)}, which reknit does not read")
    order = made.state[1] if isinstance(made.state, tuple) and len(made.state) > 1 else "="
    try:
        return np.dtype(f"{order if order in ('<', '>') else '='}{code}")
    except TypeError as error:
        raise FormatError(f"a pickle has data of NumPy of the type {shown(code)}") from error


def numpy_array(made: PickledObject) -> np.ndarray[Any, Any]:
    """Return the array of NumPy that a pickle holds with its bytes.  Raises `FormatError`."""
    state = made.state
    if not isinstance(state, tuple) or len(state) != 5:
        raise FormatError("a pickle has an array of NumPy without its values")
    return _array(state[4], state[2], state[1], is_fortran=bool(state[3]))


def _array(data: Any, kind: Any, shape: Any, *, is_fortran: bool) -> np.ndarray[Any, Any]:
    shape, dtype = shape_of(shape), dtype_from(kind)
    if not isinstance(data, bytes) or prod(shape) * dtype.itemsize != len(data):
        raise FormatError("a pickle has an array of NumPy with another number of bytes than its shape")
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="))


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    return _array(data, kind, shape, is_fortran=order == "F")


_CORES = ("core", "_core")
ARRAYS = frozenset(f"numpy.{core}.multiarray._reconstruct" for core in _CORES)
"""The names of the function that makes the arrays whose state has their values."""
NUMPY: dict[str, Callable[..., Any]] = {
    **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in _CORES},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in _CORES},
}
"""The functions of NumPy that a pickle may call; protocol 5 has arrays as buffers."""
