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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{}",')
_SCAN_NBYTES = 1 << 20


def decode_strict(
    data: bytes, kind: type[T], *, what: str, max_nbytes: int, max_depth: int, max_values: int
) -> T:
    """Return the document as a `kind`.  Raises `CorruptError`, `FormatError` above a limit, naming `what`.

    `max_values` limits what `count_values` counts, and so the memory that parsed values take.
    """
    num_values = count_values(data, what, max_nbytes=max_nbytes, max_depth=max_depth)
    if num_values > max_values:
        raise FormatError(f"{what} holds {num_values} values; {max_values} is the limit")
    decoded = decode_member(msgspec.json.Decoder(kind).decode, data, what)
    refuse_duplicates(data, what)
    return decoded


def count_values(data: bytes, what: str, *, max_nbytes: int, max_depth: int) -> int:
    """Return how many values a document has at most: its commas, and the objects and lists that it opens.

    Done before any parser, so that none of them can be driven into the ground.  Raises as `decode_strict`.
    """
    if len(data) > max_nbytes:
        raise FormatError(f"{what} has {len(data)} bytes; {max_nbytes} is the limit")
    depth, num_values = _depth(data)
    if depth > max_depth:
        raise FormatError(f"{what} is nested deeper than {max_depth} levels")
    return num_values


def decode_member(decode: Callable[[bytes | msgspec.Raw], T], raw: bytes | msgspec.Raw, what: str) -> T:
    """Return a document that `count_values` has accepted, or one member of it."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise CorruptError(f"{what} is damaged: {error}") from error


def _depth(data: bytes) -> tuple[int, int]:
    """Return how deep brackets outside strings nest, and how many open there, or are commas."""
    if b"\\" in data:
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(data.translate(None, _NO_MARKS), dtype=np.uint8)
    depth = deepest = quotes = num_values = 0
    for start in range(0, len(marks), _SCAN_NBYTES):
        piece = marks[start : start + _SCAN_NBYTES]
        seen = quotes + np.cumsum(piece == ord('"'))
        outside = seen % 2 == 0
        opens = (piece == ord("[")) | (piece == ord("{"))
        closes = (piece == ord("]")) | (piece == ord("}"))
        levels = depth + np.cumsum(np.where(outside, opens.astype(np.int8) - closes, 0))
        num_values += int(np.count_nonzero(outside & (opens | (piece == ord(",")))))
        depth, quotes, deepest = int(levels[-1]), int(seen[-1]), max(deepest, int(levels.max()))
    return deepest, num_values


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
    """Raise `StateError` for what would not come back from JSON as it is."""
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
