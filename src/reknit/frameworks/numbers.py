"""Exact comparisons: of two values, and of a number with its form in another type."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Mapping
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit import plugins
from reknit.errors import known, shown
from reknit.types.dtype import INTEGERS, converts, numpy_dtype
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from numpy.typing import NDArray


_LIBRARIES = {"torch": "torch-numbers", "jax": "jax-values"}
"""Frameworks with arrays, each with the row of the module that compares these."""


def same_value(a: Any, b: Any) -> bool:
    """Return whether two values are the same: of one type, and with the same bits.

    1 is not True or 1.0, zero has its sign, and NaN is NaN.  Arrays and tensors are the same if dtype, shape
    and bytes are.  Of a distributed tensor, only this rank's part is compared, without a message. Mappings
    are compared by key, in any order, and a list is the same as a tuple of the same values.  Keys and members
    of sets are compared in the same way as values: 1 is not True there, and NaN is NaN.
    """
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _same_mappings(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, Tagged) and isinstance(b, Tagged):
        return a.tag == b.tag and same_value(a.value, b.value)
    for framework, row in _LIBRARIES.items():
        if sys.modules.get(framework) is None:
            continue
        if (library := plugins.find("reknit.frameworks", row)).is_array(a):
            return bool(library.is_array(b) and library.same(a, b))
    if isinstance(a, (np.ndarray, np.generic)) or isinstance(b, (np.ndarray, np.generic)):
        return _class(a) is _class(b) and _same_arrays(np.asarray(a), np.asarray(b)) and _same_masks(a, b)
    return type(a) is type(b) and _same_plain(a, b)


def _class(array: Any) -> type:
    """Return the class of an array; an array that is mapped from a file has that of other arrays."""
    return np.ndarray if type(array) is np.memmap else type(array)


def _same_mappings(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
    if len(a) != len(b):
        return False
    others: dict[Any, list[Any]] = {}  # a mapping may have several keys that are NaN
    for key, value in b.items():
        others.setdefault(_mark(key), []).append(value)
    return all(
        (found := others.get(_mark(key))) and same_value(value, found.pop(0)) for key, value in a.items()
    )


def _mark(key: Any) -> Any:
    """Return a mark that two keys, or members of sets, share if and only if they are the same value."""
    kind = type(key)
    if kind is str:
        return key
    if kind in (float, complex, Decimal):
        return kind, repr(key)
    if isinstance(key, np.generic):
        return kind, key.dtype.str, key.tobytes()
    if isinstance(key, tuple):
        return kind, *map(_mark, key)
    if kind is frozenset:
        return kind, frozenset(Counter(map(_mark, key)).items())
    if kind is range:
        return kind, *map(_mark, (key.start, key.stop, key.step))
    return kind, key


def _same_plain(a: Any, b: Any) -> bool:
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, (Namespace, SimpleNamespace)):
        return same_value(vars(a), vars(b))
    if isinstance(a, (set, frozenset)):
        return Counter(map(_mark, a)) == Counter(map(_mark, b))
    if isinstance(a, (slice, range)):
        return same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, complex):
        return _same_plain(a.real, b.real) and _same_plain(a.imag, b.imag)
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        return bool(a == b or (a != a and b != b))
    except Exception as error:  # a class may raise anything in a comparison: the values count as different
        if made := known(error):
            raise made from error
        return False


def _same_arrays(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.names is not None:  # there may be bytes between the fields
        return all(_same_arrays(a[name], b[name]) for name in a.dtype.names)
    if a.dtype.hasobject:
        return same_value(a.ravel().tolist(), b.ravel().tolist())
    return a.tobytes() == b.tobytes()


def _same_masks(a: Any, b: Any) -> bool:
    if type(a) is np.ndarray or not isinstance(a, np.ma.MaskedArray):
        return True
    return _same_arrays(np.ma.getmaskarray(a), np.ma.getmaskarray(b))


def is_number(value: object) -> bool:
    """Return whether a value is a number of Python or a scalar of NumPy, but not a boolean or a time."""
    is_other = isinstance(value, (bool, np.timedelta64))
    return isinstance(value, (int, float, complex, np.number)) and not is_other


def misfit(number: Any, dtype: str, *, cast: bool = False) -> str | None:
    """Return the reason why a saved number cannot become an element of a dtype, or None.

    With `cast` it may be rounded, as tensors are: a float of Python is a float64, an integer an int64.  A
    float becomes an integer only if it is whole (minus zero is not), and a number never becomes a boolean.
    Zero keeps its sign, and NaN is NaN.
    """
    saved = _dtype_of(number)
    what = f"it is the number {shown(number)} in the checkpoint and {dtype} here"
    if not converts(saved, dtype) and (dtype not in INTEGERS or whole(number) is None):
        return f"{what}, which is another kind of number"
    if _is_exact(number, dtype) or (cast and _is_rounded(number, saved, dtype)):
        return None
    if _is_rounded(number, saved, dtype):
        return f"{what}, which would round it (LoadOptions(cast=True) allows that)"
    return f"{what}, which cannot hold it"


def element(number: Any, dtype: str) -> NDArray[Any]:
    """Return an array without dimensions that holds a number; `misfit` has to accept the number before.

    A number is rounded to the nearest element, ties to even, in the same way as tensors are converted.
    """
    kind = numpy_dtype(dtype)
    if dtype in INTEGERS:
        return np.asarray(int(number), kind)
    array = np.asarray(number if _is_complex(number) else float(number))
    with np.errstate(over="ignore", invalid="ignore"):  # too large numbers become infinite, or NaN
        if kind.itemsize < 4:
            array = array.astype(np.float32)
            if dtype == "float8_e4m3fn":  # without infinity: the largest number replaces larger ones
                array = np.clip(array, -448, 448)
        return array.astype(kind)


def read_as(dtype: str, target: Any, *, cast: bool = False) -> tuple[str, str | None]:
    """Return the dtype in which to read a saved element that becomes a number like `target`.

    Returns as well the reason why it cannot become one, or None.  Each element of its dtype has to fit, or,
    with `cast`, be rounded.  An integer of Python holds integers of any dtype, a float of Python is a
    float64, and a boolean is not a number: it comes from booleans alone.
    """
    if isinstance(target, (bool, np.bool_)):
        fits = dtype == "bool"
        return "bool", None if fits else f"it is a tensor of {dtype} in the checkpoint and a boolean here"
    integer = isinstance(target, int) and dtype in INTEGERS
    wanted = dtype if integer else _dtype_of(target)
    if _holds_all(dtype, wanted):
        return dtype, None
    what = f"it is a tensor of {dtype} in the checkpoint and a number of type {type(target).__name__} here"
    if dtype == "bool" or not converts(dtype, wanted):
        return wanted, f"{what}, which is another kind of number"
    return wanted, None if cast else f"{what}, which may round it (LoadOptions(cast=True) allows that)"


def like(number: Any, target: Any) -> Any:
    """Return a number in the type of another one, if one of the two types is of NumPy and all bits fit.

    If they do not fit, and for a value that is not a number, return the value unchanged.
    """
    if not (is_number(number) and is_number(target)) or type(number) is type(target):
        return number
    if not isinstance(number, np.generic) and not isinstance(target, np.generic):
        return number
    if isinstance(target, int):
        return number if (count := whole(number)) is None else count
    dtype = _dtype_of(target)
    return number if misfit(number, dtype) is not None else _as_type(number, target, dtype)


def from_element(array: NDArray[Any], target: Any) -> Any:
    """Return the element of an array, read in the dtype of `read_as`, as a number of the type of `target`."""
    if isinstance(target, (bool, np.bool_)):
        return type(target)(array)
    number = number_of(array)
    return number if isinstance(target, int) else _as_type(number, target, _dtype_of(target))


def _as_type(number: Any, target: Any, dtype: str) -> Any:
    if isinstance(target, np.generic):
        return element(number, dtype)[()]
    return float(number) if isinstance(target, float) else complex(number)


def _holds_all(dtype: str, wanted: str) -> bool:
    """Return whether each element of one dtype, booleans aside, has all its bits in another."""
    if dtype == wanted:
        return True
    if dtype == "bool" or not converts(dtype, wanted):
        return False
    if dtype in INTEGERS and wanted not in INTEGERS:
        import ml_dtypes

        digits: int = ml_dtypes.finfo(numpy_dtype(wanted)).nmant + 1  # type: ignore[no-untyped-call]
        return bool(np.iinfo(dtype).max <= 2**digits)
    if dtype in INTEGERS or wanted in ("float64", "complex128"):
        return True
    return wanted == "float32" and dtype != "float64"


def number_of(array: Any) -> int | float | complex | None:
    """Return the one element of an array of NumPy as a number of Python with the same value.

    None for a boolean, for a packed element, and for more or fewer elements than one.
    """
    if array.size != 1:
        return None
    name, one = array.dtype.name, array.reshape(())
    if name in INTEGERS:
        return int(one)
    if converts(name, "float64"):
        return float(one) if name != "bool" else None
    return complex(one) if converts(name, "complex128") else None


def whole(number: Any) -> int | None:
    """Return a number as an integer of the same value, or None without one, as for minus zero."""
    if not is_number(number) or _is_complex(number):
        return None
    if isinstance(number, (float, np.floating)) and (
        not np.isfinite(number) or number % 1 or (not number and np.signbit(number))
    ):
        return None
    return int(number)


def _dtype_of(number: Any) -> str:
    if isinstance(number, np.generic):
        return str(number.dtype.name)
    return "int64" if isinstance(number, int) else "float64" if isinstance(number, float) else "complex128"


def _is_complex(number: Any) -> bool:
    return isinstance(number, (complex, np.complexfloating))


def _is_rounded(number: Any, saved: str, dtype: str) -> bool:
    """Return whether a load with `cast` rounds this number to an element of a dtype."""
    if not converts(saved, dtype):
        return False
    return saved not in INTEGERS or -(2**63) <= int(number) < 2**64


def _is_exact(number: Any, dtype: str) -> bool:
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return bool(limits.min <= int(number) <= limits.max)
    if _is_complex(number):
        found, whole = element(number, dtype), np.asarray(number).astype(np.complex128)
        return _is_same(found.real, whole.real) and _is_same(found.imag, whole.imag)
    try:
        wide = float(number)
    except OverflowError:
        return False
    if isinstance(number, (int, np.integer)) and int(wide) != int(number):
        return False
    return _is_same(element(number, dtype), np.asarray(wide))


def _is_same(found: NDArray[Any], number: NDArray[Any]) -> bool:
    """Return whether two real numbers are the same: NaN is NaN, and zero has its sign."""
    one, other = float(found), float(number)
    if one != one or other != other:
        return one != one and other != other
    return one == other and bool(np.signbit(one) == np.signbit(other))
