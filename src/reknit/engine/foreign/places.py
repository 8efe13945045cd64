"""How much does a value of a pickle become, if each part is written at each of its places?

A pickle has a part once, and can put it at many places with a few bytes each.  A checkpoint of reknit has
each place in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import FormatError
from reknit.format.foreign.safe_pickle import PickledObject
from reknit.format.foreign.torch_values import TensorView, Whole, attributes_of
from reknit.types.shard import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_NODES = 1 << 22
"""Containers, and values in them, that are walked."""
MAX_REPEATED_NBYTES = 256 << 20
"""Bytes of texts and of binary values at further places than their first."""
_SHORT = 64
"""Members and bytes of a value that is not counted."""


class _Spread(NamedTuple):
    """The size of a value at all its places: number of values, levels of containers, bytes of leaves."""

    num: int
    height: int
    nbytes: int


class Places:
    """The values of a checkpoint that were counted, each at each of its places."""

    def __init__(self) -> None:
        self._num, self._nbytes, self._nbytes_once = 0, 0, 0
        self._leaves: dict[int, Any] = {}

    def count(self, value: Any) -> None:
        """Count a value.  Raises `FormatError` for a deep one, one that contains itself, and for too much."""
        spread = self._spread_of(value, {}, 0)
        self._num += spread.num
        self._nbytes += spread.nbytes
        if self._num > MAX_NODES:
            raise FormatError(f"a pickle holds more than {MAX_NODES} values, counted at each of their places")
        if self._nbytes - self._nbytes_once > MAX_REPEATED_NBYTES:
            raise FormatError(
                f"a pickle repeats values at so many places that they grow by {MAX_REPEATED_NBYTES} bytes"
            )

    def _spread_of(self, value: Any, known: dict[int, _Spread], depth: int) -> _Spread:
        if isinstance(value, Whole):
            value = value.value
        inside = _inside(value)
        if inside is None:
            return _Spread(1, 0, self._leaf(value))
        if id(value) not in known and depth <= MAX_DEPTH:
            keys = value if isinstance(value, dict) else ()
            parts = [self._spread_of(inner, known, depth + 1) for inner in inside]
            known[id(value)] = _Spread(
                1 + sum(part.num for part in parts),
                1 + max((part.height for part in parts), default=0),
                sum(part.nbytes for part in parts) + sum(map(self._leaf, keys)),
            )
        if depth > MAX_DEPTH or depth + known[id(value)].height > MAX_DEPTH:
            raise FormatError(f"a pickle is nested deeper than {MAX_DEPTH} levels")
        return known[id(value)]

    def _leaf(self, value: Any) -> int:
        nbytes = _nbytes_of(value)
        if nbytes <= _SHORT:
            return 0
        if id(value) not in self._leaves:
            self._leaves[id(value)] = value  # which keeps its number from another value
            self._nbytes_once += nbytes
        return nbytes


def _inside(value: Any) -> Iterable[Any] | None:
    """Return the values in a container, None for a value that is not one."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple) and not isinstance(value, TensorView):
        return value
    attributes = attributes_of(value)
    return None if attributes is None else attributes.values()


def _nbytes_of(value: Any) -> int:
    """Return the number of bytes of a text or a binary value, and of members of a set."""
    if isinstance(value, str | bytes | set | frozenset):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, PickledObject) and isinstance(value.state, tuple):  # an array, or a stream
        return sum(len(part) for part in value.state if isinstance(part, bytes))
    return 0
