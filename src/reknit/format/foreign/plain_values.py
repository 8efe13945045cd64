"""The values of Python's own classes in a pickle, each of which a function of reknit builds."""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from reknit.errors import FormatError
from reknit.format.foreign.safe_pickle import Global, UnreadError

if TYPE_CHECKING:
    from collections.abc import Callable


def _table(*args: Any) -> dict[Any, Any]:
    if args and not (len(args) == 1 and (args[0] is None or isinstance(args[0], Global))):
        raise UnreadError("a pickle makes a table of something else than items")
    return {}


def _counter(*args: Any) -> dict[Any, Any]:
    counted = args[0] if len(args) == 1 else None if args else {}
    if type(counted) is not dict or not all(type(number) in (int, float) for number in counted.values()):
        raise UnreadError("a pickle counts something else than in numbers")
    return Counter(counted)


def _deque(*args: Any) -> list[Any]:
    """Return the members; the length that a deque is limited to is left out."""
    if args and type(args[0]) not in (list, tuple):
        raise UnreadError("a pickle makes a deque of something else than a list")
    return [*args[0]] if args else []


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise UnreadError("a pickle encodes something else than bytes")
    return text.encode("latin1")


def _bytes(*args: Any) -> bytes:
    if not args:
        return b""
    if len(args) == 1 and type(args[0]) is bytes:
        return args[0]
    return _encode(*args)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise FormatError("a pickle has a complex number of something else than two numbers")
    return complex(real, imaginary)


def _path(*parts: Any) -> pathlib.PurePosixPath:
    if not all(type(part) is str for part in parts):
        raise FormatError("a pickle has a path that is not text")
    return pathlib.PurePosixPath(*parts)


def _time_of(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return the builder of times: the bytes of one, and the offset of its zone from UTC."""

    def build(data: Any, *zone: Any) -> Any:
        if type(data) is not bytes or not all(type(one) is datetime.timezone for one in zone):
            raise UnreadError("a pickle has a time in a zone without a fixed offset, or without its bytes")
        return kind(data, *zone)

    return build


def _interval(*parts: Any) -> datetime.timedelta:
    if not all(type(part) is int for part in parts):
        raise FormatError("a pickle has an interval that is not in whole microseconds")
    return datetime.timedelta(*parts)


def _zone(offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not all(type(one) is str for one in name):
        raise FormatError("a pickle has a zone without an offset")
    return datetime.timezone(offset, *name)


PLAIN: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _table,
    "collections.defaultdict": _table,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "pathlib._local.PurePosixPath": _path,
    "datetime.date": _time_of(datetime.date),
    "datetime.datetime": _time_of(datetime.datetime),
    "datetime.time": _time_of(datetime.time),
    "datetime.timedelta": _interval,
    "datetime.timezone": _zone,
}
"""The functions and classes of Python that a pickle may call.

Sets are built of members that the machine has checked to be safe to hash.
"""
