"""Is this JSON that every reader understands alike?  Bounded, valid UTF-8, shallow, no key twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from reknit.errors import CorruptError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_SCAN_NBYTES = 1 << 20


def decode_strict(data: bytes, kind: type[T], *, what: str, max_nbytes: int, max_depth: int) -> T:
    """Return the document as a `kind`.  Raises `CorruptError`, `FormatError` above a limit, naming `what`."""
    if len(data) > max_nbytes:
        raise FormatError(f"{what} has {len(data)} bytes; {max_nbytes} is the limit")
    # before any parser, so that none of them can be driven into the ground
    if _depth(data) > max_depth:
        raise FormatError(f"{what} is nested deeper than {max_depth} levels")
    try:
        decoded = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise CorruptError(f"{what} is damaged: {error}") from error
    _refuse_duplicates(data, what)
    return decoded


def decode_member(decode: Callable[[bytes | msgspec.Raw], T], raw: bytes | msgspec.Raw, what: str) -> T:
    """Return one member of a document that `decode_strict` has accepted."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise CorruptError(f"{what} is damaged: {error}") from error


def _depth(data: bytes) -> int:
    """Return how deep the brackets outside strings nest, up to the place where a parser would stop."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(unescaped.translate(None, _NO_MARKS), dtype=np.uint8)
    depth = deepest = quotes = 0
    for start in range(0, len(marks), _SCAN_NBYTES):
        piece = marks[start : start + _SCAN_NBYTES]
        seen = quotes + np.cumsum(piece == ord('"'))
        opens = (piece == ord("[")) | (piece == ord("{"))
        closes = (piece == ord("]")) | (piece == ord("}"))
        levels = depth + np.cumsum(np.where(seen % 2 == 0, opens.astype(np.int8) - closes, 0))
        depth, quotes, deepest = int(levels[-1]), int(seen[-1]), max(deepest, int(levels.max()))
    return deepest


def _refuse_duplicates(data: bytes, what: str) -> None:
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
