"""Which values of a pickle are safe to hash?  Short ones, as long as few of them have one hash.

A table takes quadratic time for keys of equal hashes, and a hash of a deep tuple overflows the stack.
"""

from __future__ import annotations

import datetime
import pathlib
from typing import Any

import numpy as np

from reknit.errors import FormatError

MOST_MEMBERS = 64
"""Members of a key, those of its members included: a few bytes can repeat a large tuple as a key."""
MAX_EQUAL_HASHES = 64
"""Different keys with one hash, in one pickle: no honest table has as many."""
MAX_KEY_DEPTH = 8
_LARGEST_KEY = 1 << 60
"""Integers below this are their own hashes."""
_NUMBERS = frozenset(
    {int, float, complex, datetime.date, datetime.datetime, datetime.time, datetime.timedelta}
)
"""Kinds of keys with hashes that are quick to compute, and can be made to be equal."""


class UnknownKeyError(TypeError):
    """The hash of a key of this type, such as a tensor, may be unsafe."""


class SafeKeys:
    """The keys of all tables of a pickle.  Those of the types `plain` need no check."""

    def __init__(self, plain: frozenset[type]) -> None:
        self._plain = plain | {str, bytes, bool, type(None)}
        self._by_hash: dict[int, list[Any]] = {}

    def checked(self, key: Any) -> Any:
        """Return a key if it is safe to hash.

        Raises `UnknownKeyError` for a key of another type, and `FormatError` for keys of an attack.
        """
        kind = type(key)
        if kind in self._plain or (kind is int and -_LARGEST_KEY < key < _LARGEST_KEY):
            return key
        if self._num_members(key, 0) > MOST_MEMBERS:
            raise FormatError(f"a pickle has a key of more than {MOST_MEMBERS} members, or a deep one")
        equal = self._by_hash.setdefault(hash(key), [])
        if key not in equal:
            equal.append(key)
        if len(equal) > MAX_EQUAL_HASHES:
            raise FormatError(f"a pickle has more than {MAX_EQUAL_HASHES} keys with one hash")
        return key

    def _num_members(self, key: Any, depth: int) -> int:
        """Return the number of values in a key; it is too large for a deep one."""
        if type(key) in (tuple, frozenset):
            if len(key) >= MOST_MEMBERS or depth >= MAX_KEY_DEPTH:
                return MOST_MEMBERS + 1
            total = 1
            for member in key:
                total += self._num_members(member, depth + 1)
                if total > MOST_MEMBERS:
                    break
            return total
        if type(key) not in self._plain | _NUMBERS and not isinstance(key, np.generic | pathlib.PurePath):
            raise UnknownKeyError(f"a pickle has a key of the type {type(key).__name__}")
        return 1
