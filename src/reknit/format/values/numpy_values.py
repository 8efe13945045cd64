"""Store NumPy arrays, scalars and dtypes: type name, shape, and the bytes in row-major order."""

from __future__ import annotations

import re
from functools import cache
from math import prod
from typing import Any

import numpy as np

from reknit.errors import CorruptError, FormatError
from reknit.format.values.refused import RefusedError, fields

ARRAY: type = np.ndarray
MAX_NDIM = 64

_UNIT = r"(?:\[[0-9]{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_TYPESTR = re.compile(
    rf"[<>](?:[iuf][248]|c8|c16|[mM]8{_UNIT}|U[1-9][0-9]{{0,7}})|\|(?:[iub]1|S[1-9][0-9]{{0,7}})"
)
_ML_NAMES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int4",
    "uint4",
)
_OF_ANOTHER_LIBRARY = 2
"""`numpy.dtype.isbuiltin` of a dtype that a library has registered."""


@cache
def _ml_dtypes() -> dict[str, np.dtype[Any]]:
    import ml_dtypes  # older releases do not have all of them

    return {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)}


def take_dtype(dtype: np.dtype[Any]) -> str:
    """Return the stored name of a dtype: NumPy's array-interface string, or its name in ml_dtypes."""
    if dtype.isbuiltin == _OF_ANOTHER_LIBRARY:
        for name, known in _ml_dtypes().items():
            if dtype == known:
                return name
    name = str(dtype.str)
    if dtype.metadata is None and _TYPESTR.fullmatch(name) and np.dtype(name) == dtype:
        return name
    raise RefusedError(f"NumPy data of type {dtype!s:.100}", "convert it to numbers, or to a list")


def build_dtype(name: Any) -> np.dtype[Any]:
    """Return the dtype of a stored name."""
    if type(name) is str and name in _ML_NAMES:
        if name not in _ml_dtypes():
            raise FormatError(f"the installed ml_dtypes has no {name}", remedy="upgrade ml_dtypes")
        return _ml_dtypes()[name]
    if type(name) is not str or not _TYPESTR.fullmatch(name):
        raise CorruptError(f"{str(name)[:40]!r} is not a dtype")
    return np.dtype(name)


def take_array(array: Any) -> list[Any]:
    """Return dtype name, shape, and bytes."""
    return [take_dtype(array.dtype), list(array.shape), array.tobytes()]


def build_array(payload: Any) -> Any:
    """Return a new writable array."""
    name, shape, data = fields(payload, str, list, (bytes, np.ndarray))
    return _array(build_dtype(name), shape, data)


def take_scalar(value: Any) -> list[Any]:
    """Return dtype name and bytes; text and bytes as they are, since NumPy drops their trailing zeros."""
    if type(value) is np.str_:
        return ["U", str.__str__(value)]  # str() itself would drop trailing zeros
    if type(value) is np.bytes_:
        return ["S", bytes(value)]
    name = take_dtype(value.dtype)
    if type(value) is not value.dtype.type:
        raise RefusedError(
            f"a {type(value).__name__}, which derives from a NumPy type", "save it as that type"
        )
    return [name, value.tobytes()]


def build_scalar(payload: Any) -> Any:
    """Return the NumPy scalar."""
    name, data = fields(payload, str, (str, bytes))
    if name == "U" and type(data) is str:
        return np.str_(data)
    if type(data) is not bytes or name[1:2] in ("U", "S"):
        raise CorruptError("a NumPy scalar has the wrong kind of payload")
    return np.bytes_(data) if name == "S" else _array(build_dtype(name), [], data)[()]


def _array(dtype: np.dtype[Any], shape: list[Any], data: bytes | np.ndarray[Any, Any]) -> Any:
    if len(shape) > MAX_NDIM or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise CorruptError("an array has an impossible shape")
    # a zero must not hide a shape that NumPy refuses
    if prod(n or 1 for n in shape) * dtype.itemsize >= 1 << 63:
        raise CorruptError("an array has a shape that is too large")
    if prod(shape) * dtype.itemsize != len(data):
        raise CorruptError(f"an array has {len(data)} bytes, which {dtype}{shape} does not fill")
    if isinstance(data, np.ndarray):
        array = data.view(dtype).reshape(shape)
    else:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    _check_elements(array)
    return array


def _check_elements(array: Any) -> None:
    """Refuse bit patterns that the type does not have, and that would go wrong later and elsewhere."""
    flat = array.reshape(-1)
    if array.dtype.kind == "b" and flat.size and flat.view(np.uint8).max() > 1:
        raise CorruptError("an array of bool has bytes other than 0 and 1")
    if array.dtype.kind == "U" and flat.size and flat.view(array.dtype.byteorder + "u4").max() > 0x10FFFF:
        raise CorruptError("an array of text has a number that is not a character")
