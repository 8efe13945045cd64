"""Strict JSON that every reader understands alike: bounded, valid UTF-8, shallow, no duplicate key."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from reknit.errors import CorruptError, FormatError, StateError, shown
from reknit.format.paths import encodable
from reknit.types.small import decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

_NO_MARKS = bytes(set(range(256)) - set(b'[]{}",'))
_SCAN_NBYTES = 1 << 20


def decode_strict(
    data: bytes, kind: type[T], *, what: str, max_nbytes: int, max_depth: int, max_values: int
) -> T:
    """Return the document as a `kind`.  Raises `CorruptError`, `FormatError` above a limit, naming `what`.

    `max_values` limits the number that `count_values` returns, and so the memory that parsed values take.
    """
    count_values(data, what, max_nbytes=max_nbytes, max_depth=max_depth, max_values=max_values)
    decoded = decode_member(decoder(kind, json=True), data, what)
    refuse_duplicates(data, what)
    return decoded


def count_values(data: bytes, what: str, *, max_nbytes: int, max_depth: int, max_values: int) -> int:
    """Return an upper bound of the number of values: the commas, and the objects and lists that begin.

    Done before any parser, so that none of them can be driven into the ground, and piece by piece, so that
    hardly more memory is taken than by the document.  Raises as `decode_strict`.
    """
    if len(data) > max_nbytes:
        raise FormatError(f"{what} has {len(data)} bytes; {max_nbytes} is the limit")
    marks = _Marks()
    for start in range(0, len(data), _SCAN_NBYTES):
        marks.count(data[start : start + _SCAN_NBYTES])
        if marks.deepest > max_depth:
            raise FormatError(f"{what} is nested deeper than {max_depth} levels")
        if marks.num_values > max_values:
            raise FormatError(f"{what} holds more than {max_values} values, which is the limit")
    return marks.num_values


def decode_member(decode: Callable[[bytes | msgspec.Raw], T], raw: bytes | msgspec.Raw, what: str) -> T:
    """Return a document that `count_values` has accepted, or one member of it."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise CorruptError(f"{what} is damaged: {error}") from error


class _Marks:
    """How deep brackets outside strings nest, and how many open there, or are commas."""

    def __init__(self) -> None:
        self.deepest = self.num_values = 0
        self._depth = 0
        self._in_string = self._escaped = False
        """Whether the next byte is in a string, and whether a backslash is before it."""

    def count(self, piece: bytes) -> None:
        """Go on with the next bytes of the document."""
        if self._escaped:
            piece = piece[1:]
            self._escaped = False
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"").replace(rb"\"", b"")
            self._escaped = piece.endswith(b"\\")
        marks = np.frombuffer(piece.translate(None, _NO_MARKS), dtype=np.uint8)
        if not len(marks):
            return
        inside = np.logical_xor.accumulate(marks == ord('"'))
        outside = inside if self._in_string else ~inside
        opens = outside & ((marks == ord("[")) | (marks == ord("{")))
        closes = outside & ((marks == ord("]")) | (marks == ord("}")))
        levels = np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        self.num_values += int(np.count_nonzero(opens) + np.count_nonzero(outside & (marks == ord(","))))
        self.deepest = max(self.deepest, self._depth + int(levels.max()))
        self._depth += int(levels[-1])
        self._in_string ^= bool(inside[-1])


def refuse_duplicates(data: bytes, what: str) -> None:
    """Raise when an object has a key twice: two readers could take different ones."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        if len({key for key, _ in pairs}) != len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise CorruptError(f"{what} has the key {twice[:200]!r} twice in one object")

    try:
        # numbers are not needed, and turning a huge one into an int would take for ever
        json.loads(data.decode(), object_pairs_hook=check, parse_int=len, parse_float=len)
    except ValueError as error:
        raise CorruptError(f"{what} is damaged: {error}") from error


def check_object(value: Mapping[Any, Any], where: str, *, depth: int, max_depth: int) -> None:
    """Raise `StateError` for values that would not come back from JSON as they are."""
    for key, member in value.items():
        if type(key) is not str:
            raise StateError(f"{where} has the key {shown(key)}", remedy="JSON keys are str")
        _check_text(key, where)
        _check_value(member, f"{where}[{key!r}]", depth + 1, max_depth)


def _check_value(value: Any, where: str, depth: int, max_depth: int) -> None:
    kind = type(value)
    if kind in (list, dict) and depth > max_depth:
        raise StateError(f"{where} is nested deeper than {max_depth} levels, or contains itself")
    if value is None or kind is bool:
        return
    if kind is int and -(1 << 63) <= value < 1 << 64:
        return
    if kind is float and math.isfinite(value):
        return
    if kind is str:
        _check_text(value, where)
    elif kind is list:
        for number, member in enumerate(value):
            _check_value(member, f"{where}[{number}]", depth + 1, max_depth)
    elif kind is dict:
        check_object(value, where, depth=depth, max_depth=max_depth)
    else:
        raise StateError(
            f"{where} is {shown(value)} ({kind.__name__}), which JSON cannot hold exactly",
            remedy="use None, bool, int, finite float, str, list and dict with str keys, "
            "or save the value as an entry of the state",
        )


def _check_text(text: str, where: str) -> None:
    if not encodable(text):
        raise StateError(f"{where} has a text that is not valid Unicode: {text[:100]!r}")
