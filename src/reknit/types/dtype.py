"""The element types that a tensor may have, by the name that torch and NumPy share."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np


def is_function(value: object) -> bool:
    """Return whether a value is a function: of Python or C, a method, a ufunc, or a wrapper of a function."""
    return inspect.isroutine(value) or isinstance(value, (partial, np.ufunc)) or hasattr(value, "__wrapped__")


ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of every dtype that reknit stores (``float4_e2m1fn_x2`` counts packed pairs, as torch
does).
"""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a dtype name, or one of bytes if NumPy lacks it."""
    if name == "complex32":
        return np.dtype("V4")
    if name == "float4_e2m1fn_x2":
        return np.dtype("uint8")
    if name in _NUMPY_NAMES:
        return np.dtype(name)
    import ml_dtypes  # most states need none of its types

    return np.dtype(getattr(ml_dtypes, name, name))


_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_NUMPY_NAMES = frozenset(("bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"))
INTEGERS = frozenset([name for name in ITEMSIZE if "int" in name])
_COMPLEX = frozenset({"complex64", "complex128"})
FLOATS = frozenset([name for name in ITEMSIZE if "float" in name]) - {"float8_e8m0fnu", "float4_e2m1fn_x2"}


def converts(saved: str, wanted: str) -> bool:
    """Return whether a load may convert from one dtype to another: only rounding may lose information.

    Floats become any float, and complex numbers any complex number: a wider type has the value exactly, a
    narrower one gets the nearest (ties to even).  Integers become integers that have all their values, and
    any float.  Booleans become 0 and 1 of any number.  No other type becomes a boolean, no float an integer,
    no complex number a float.  Packed and exponent-only types and complex32 are never converted.
    """
    if saved == wanted:
        return True
    number = wanted in INTEGERS or wanted in FLOATS or wanted in _COMPLEX
    if saved == "bool":
        return number
    if saved in INTEGERS and wanted in INTEGERS:
        return np.can_cast(saved, wanted)
    if saved in INTEGERS:
        return wanted in FLOATS
    if saved in FLOATS:
        return wanted in FLOATS
    return saved in _COMPLEX and wanted in _COMPLEX
