"""Are two values the same?  One comparison for numbers, arrays of every library, and containers of them."""

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
from reknit.errors import shortage
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
        if short := shortage(error):
            raise short from error
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
