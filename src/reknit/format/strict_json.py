"""Is this JSON that every reader understands alike?  Bounded, valid UTF-8, shallow, no key twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from reknit.errors import CorruptError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{}",')
_SCAN_NBYTES = 1 << 20


class Outline(NamedTuple):
    """How much a document unfolds to: `commas` by the level at which they are, and opened objects and lists.

    Together that is as many values as there can be, except that there may be one more.
    """

    commas: tuple[int, ...]
    num_opened: int

    @property
    def num_values(self) -> int:
        """As many as there are at most."""
        return sum(self.commas) + self.num_opened


def decode_strict(
    data: bytes,
    kind: type[T],
    *,
    what: str,
    max_nbytes: int,
    max_depth: int,
    check: Callable[[Outline], None] | None = None,
) -> T:
    """Return the document as a `kind`.  Raises `CorruptError`, `FormatError` above a limit, naming `what`.

    `check` raises for what would unfold to too much.
    """
    shape = outlined(data, what, max_nbytes=max_nbytes, max_depth=max_depth)
    if check is not None:
        check(shape)
    decoded = decode_member(msgspec.json.Decoder(kind).decode, data, what)
    refuse_duplicates(data, what)
    return decoded


def outlined(data: bytes, what: str, *, max_nbytes: int, max_depth: int) -> Outline:
    """Return what a document will unfold to.

    Done before any parser, so that none of them can be driven into the ground.
    """
    if len(data) > max_nbytes:
        raise FormatError(f"{what} has {len(data)} bytes; {max_nbytes} is the limit")
    shape = _outline(data, max_depth)
    if shape is None:
        raise FormatError(f"{what} is nested deeper than {max_depth} levels")
    return shape


def decode_member(decode: Callable[[bytes | msgspec.Raw], T], raw: bytes | msgspec.Raw, what: str) -> T:
    """Return a document that `outlined` has accepted, or one member of it."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        raise CorruptError(f"{what} is damaged: {error}") from error


def _outline(data: bytes, max_depth: int) -> Outline | None:
    """Return what is outside strings, up to where a parser would stop; None where it is too deep."""
    if b"\\" in data:
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")
    marks = np.frombuffer(data.translate(None, _NO_MARKS), dtype=np.uint8)
    depth = quotes = opened = 0
    commas = np.zeros(max_depth + 1, np.int64)
    for start in range(0, len(marks), _SCAN_NBYTES):
        piece = marks[start : start + _SCAN_NBYTES]
        seen = quotes + np.cumsum(piece == ord('"'))
        opens = (piece == ord("[")) | (piece == ord("{"))
        closes = (piece == ord("]")) | (piece == ord("}"))
        outside = seen % 2 == 0
        levels = depth + np.cumsum(np.where(outside, opens.astype(np.int8) - closes, 0))
        if int(levels.max()) > max_depth:
            return None
        between = levels[outside & (piece == ord(","))]
        commas += np.bincount(np.maximum(between, 0), minlength=max_depth + 1)
        opened += int(np.count_nonzero(opens & outside))
        depth, quotes = int(levels[-1]), int(seen[-1])
    return Outline(tuple(commas.tolist()), opened)


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
