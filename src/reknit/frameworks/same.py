"""Are two values the same?  One comparison for numbers, arrays of every library, and containers of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LIBRARIES = {"torch": "reknit.frameworks.torch.same", "jax": "reknit.frameworks.jax.same"}
"""Frameworks whose arrays can be compared, once they are imported, and the module that does."""


def same_value(a: Any, b: Any) -> bool:
    """Tell whether two values are the same: of one type, and with the same bits.

    1 is not True or 1.0, zero has its sign, and NaN is NaN.  Arrays and tensors are the same if dtype, shape
    and bytes are; a distributed tensor is compared by what this rank holds of it, without a message.
    Mappings are compared by key, in any order, and a list is the same as a tuple of the same values.
    """
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, Tagged) and isinstance(b, Tagged):
        return a.tag == b.tag and same_value(a.value, b.value)
    for framework, module in _LIBRARIES.items():
        if sys.modules.get(framework) is not None and (library := import_module(module)).is_array(a):
            return bool(library.is_array(b) and library.same(a, b))
    if isinstance(a, (np.ndarray, np.generic)) or isinstance(b, (np.ndarray, np.generic)):
        return _class(a) is _class(b) and _same_arrays(np.asarray(a), np.asarray(b)) and _same_masks(a, b)
    return type(a) is type(b) and _same_plain(a, b)


def _class(array: Any) -> type:
    """Return the class of an array; one that is mapped from a file is like others."""
    return np.ndarray if type(array) is np.memmap else type(array)


def _same_plain(a: Any, b: Any) -> bool:
    if isinstance(a, complex):
        return _same_plain(a.real, b.real) and _same_plain(a.imag, b.imag)
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        return bool(a == b or (a != a and b != b))
    except Exception:  # a class may raise anything from a comparison, which then says nothing of the two
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
    if not isinstance(a, np.ma.MaskedArray):
        return True
    return _same_arrays(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
