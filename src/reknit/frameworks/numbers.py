"""Does a number fit into an element of another type?  It does if all its bits are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import shown
from reknit.types.dtype import INTEGERS, converts, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
