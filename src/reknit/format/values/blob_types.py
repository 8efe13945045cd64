"""The closed table of extension types for values that are not tensors.

An entry takes a value apart into simpler ones, and builds it again from them.  `blob_codec` walks; nothing
here recurses, and nothing is built that the table does not name.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import types
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from reknit.errors import CorruptError, shown
from reknit.format.values import numpy_values
from reknit.format.values.enum_values import build_enum, take_enum
from reknit.format.values.refused import RefusedError, fields
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_BIG_INT_NBYTES = 1 << 20
MAX_EQUAL_HASHES = 64

PICKLE = 127

_FACTORIES: dict[str, type] = {
    "list": list,
    "dict": dict,
    "int": int,
    "float": float,
    "str": str,
    "set": set,
}


class Kind(Struct, frozen=True):
    """How values of one type are stored: `take` gives the payload, `build` turns a payload into the value.

    The members of a list payload are stored by the same rules.  Error messages name them from number `first`
    on: by position, or, with `pairs`, by key.  `unordered` members are sorted by their bytes.
    """

    code: int
    take: Callable[[Any], Any]
    build: Callable[[Any], Any]
    first: int = 0
    pairs: bool = False
    unordered: bool = False

    def label(self, payload: Sequence[Any], number: int) -> str:
        """Return the name of member `number` of a payload for an error message."""
        at = number - self.first
        return f"[{shown(payload[number - at % 2])}]" if self.pairs and at >= 0 else f"[{max(at, 0)}]"


def _flat(mapping: Any) -> list[Any]:
    return [member for pair in mapping.items() for member in pair]


def checked_keys(keys: list[Any]) -> list[Any]:
    """Return the keys if a table can be built of them: hashable, distinct, and not made to collide."""
    if len(keys) > MAX_EQUAL_HASHES:
        _, most = Counter(map(hash, keys)).most_common(1)[0]
        if most > MAX_EQUAL_HASHES:
            raise CorruptError(f"{most} keys of one table have the same hash, which only an attack does")
    if len(set(keys)) != len(keys):
        raise CorruptError("a table has a key twice")
    return keys


def _pairs(payload: Any) -> list[tuple[Any, Any]]:
    if type(payload) is not list or len(payload) % 2:
        raise CorruptError("a table is not a list of keys and values")
    return list(zip(checked_keys(payload[::2]), payload[1::2], strict=True))


def _members(payload: Any) -> list[Any]:
    if type(payload) is not list:
        raise CorruptError("a container is not a list")
    return payload


def _take_int(value: int) -> bytes:
    nbytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
    if nbytes > MAX_BIG_INT_NBYTES:
        raise RefusedError(
            f"an int of {nbytes} bytes ({MAX_BIG_INT_NBYTES} is the limit)", "save it as bytes"
        )
    return value.to_bytes(nbytes, "big", signed=True)


def _build_int(payload: Any) -> int:
    if type(payload) is not bytes or not 8 < len(payload) <= MAX_BIG_INT_NBYTES:
        raise CorruptError("a large int is not bytes, or has too few or too many")
    value = int.from_bytes(payload, "big", signed=True)
    if -(1 << 63) <= value < 1 << 64 or _take_int(value) != payload:
        raise CorruptError("a large int is not in its shortest form")
    return value


def _take_zone(zone: datetime.tzinfo | None) -> list[Any] | None:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise RefusedError(
            f"a time in the zone {shown(zone)}",
            "give it a fixed offset: value.astimezone(datetime.timezone.utc)",
        )
    offset, name = zone.utcoffset(None), zone.tzname(None)
    default = name == datetime.timezone(offset).tzname(None)
    return [offset // datetime.timedelta(microseconds=1), None if default else name]


def _build_zone(payload: Any) -> datetime.timezone | None:
    if payload is None:
        return None
    microseconds, name = fields(payload, int, (str, types.NoneType))
    offset = datetime.timedelta(microseconds=microseconds)
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _take_time(value: datetime.datetime | datetime.time) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _take_zone(value.tzinfo)]


def _build_moment(kind: Any, num_parts: int, payload: Any) -> Any:
    *numbers, fold, zone = fields(payload, *[int] * (num_parts + 1), (list, types.NoneType))
    return kind(*numbers, fold=fold, tzinfo=_build_zone(zone))


def _take_path(value: pathlib.PurePath) -> list[Any]:
    flavour = "windows" if isinstance(value, pathlib.PureWindowsPath) else "posix"
    return [flavour, isinstance(value, pathlib.Path), str(value)]


def _build_path(payload: Any) -> pathlib.PurePath:
    flavour, concrete, text = fields(payload, str, bool, str)
    pure = {"posix": pathlib.PurePosixPath, "windows": pathlib.PureWindowsPath}.get(flavour)
    if pure is None:
        raise CorruptError(f"a path is of the unknown kind {flavour[:40]!r}")
    # a path of another system can be shown, but not opened
    return pathlib.Path(text) if concrete and issubclass(type(pathlib.Path()), pure) else pure(text)


def _take_defaultdict(value: defaultdict[Any, Any]) -> list[Any]:
    factory = value.default_factory
    if factory is None:
        return [None, *_flat(value)]
    names = [name for name, known in _FACTORIES.items() if known is factory]
    if not names:
        raise RefusedError(f"a defaultdict with the factory {shown(factory)}", "save dict(value) instead")
    return [names[0], *_flat(value)]


def _build_defaultdict(payload: Any) -> defaultdict[Any, Any]:
    name, *flat = _members(payload) or [False]
    if name is not None and (type(name) is not str or name not in _FACTORIES):
        raise CorruptError("a defaultdict has an unknown factory")
    return defaultdict(None if name is None else _FACTORIES[name], _pairs(flat))


def _build_counter(payload: Any) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, _pairs(payload))
    return counter


def _take_attributes(value: Any) -> list[Any]:
    if any(hasattr(type(value), name) for name in vars(value)):
        raise RefusedError(
            f"a {type(value).__name__} with an attribute that hides one of its own", "save a copy of it"
        )
    return [type(value)(value), dict(vars(value))]


def _build_attributes(payload: Any) -> Any:
    value, attributes = fields(payload, tuple(ATTRIBUTED), dict)
    if not all(type(name) is str and not hasattr(type(value), name) for name in attributes):
        raise CorruptError("an attribute hides one that every value of this type has")
    vars(value).update(attributes)
    return value


def _build_deque(payload: Any) -> deque[Any]:
    maxlen, *members = _members(payload) or [False]
    if maxlen is not None and (type(maxlen) is not int or not len(members) <= maxlen < 1 << 63):
        raise CorruptError("a deque is longer than its maxlen")
    return deque(members, maxlen)


def _namespace(code: int, kind: type) -> Kind:
    """Return the kind for values that are no more than their attributes."""

    def build(payload: Any) -> Any:
        members, value = dict(_pairs(payload)), kind()
        if any(type(name) is not str for name in members):
            raise CorruptError("an attribute has a name that is not a text")
        # not setattr, which could be made to call something
        vars(value).update(members)
        return value

    return Kind(code, lambda value: _flat(vars(value)), build, pairs=True)


def _record(code: int, kind: type, **attributes: type) -> Kind:
    """Return the kind for values that are built from these attributes, each of that type."""

    def build(payload: Any) -> Any:
        return kind(*fields(payload, *attributes.values()))

    return Kind(code, lambda value: [getattr(value, name) for name in attributes], build)


def _build_bytearray(payload: Any) -> bytearray:
    if type(payload) not in (bytes, bytearray):
        raise CorruptError("a bytearray is not bytes")
    return payload if type(payload) is bytearray else bytearray(payload)


ENUM = Kind(15, take_enum, build_enum)
"""A member of an enumeration, whichever that is."""
_PATHS = Kind(14, _take_path, _build_path)
DICT = Kind(4, _flat, lambda payload: dict(_pairs(payload)), pairs=True)
"""A dict whose keys are not all text."""
BIG_INT = Kind(5, _take_int, _build_int)
"""An int outside of the range of msgpack."""
ATTRIBUTED = frozenset({OrderedDict, Counter})
"""Types of which a value may have attributes of its own, beside its content."""
WITH_ATTRIBUTES = Kind(26, _take_attributes, _build_attributes)
SCALAR = Kind(8, numpy_values.take_scalar, numpy_values.build_scalar)
DTYPE = Kind(9, numpy_values.take_dtype, numpy_values.build_dtype)

KINDS: dict[type, Kind] = {
    tuple: Kind(1, list, lambda payload: tuple(_members(payload))),
    set: Kind(2, list, lambda payload: set(checked_keys(_members(payload))), unordered=True),
    frozenset: Kind(3, list, lambda payload: frozenset(checked_keys(_members(payload))), unordered=True),
    complex: _record(6, complex, real=float, imag=float),
    numpy_values.ARRAY: Kind(7, numpy_values.take_array, numpy_values.build_array),
    datetime.datetime: Kind(
        10, lambda v: [v.year, v.month, v.day, *_take_time(v)], partial(_build_moment, datetime.datetime, 7)
    ),
    datetime.date: _record(11, datetime.date, year=int, month=int, day=int),
    datetime.time: Kind(12, _take_time, partial(_build_moment, datetime.time, 4)),
    datetime.timedelta: _record(13, datetime.timedelta, days=int, seconds=int, microseconds=int),
    pathlib.PurePosixPath: _PATHS,
    pathlib.PosixPath: _PATHS,
    pathlib.PureWindowsPath: _PATHS,
    pathlib.WindowsPath: _PATHS,
    OrderedDict: Kind(16, _flat, lambda payload: OrderedDict(_pairs(payload)), pairs=True),
    defaultdict: Kind(17, _take_defaultdict, _build_defaultdict, first=1, pairs=True),
    Counter: Kind(18, _flat, _build_counter, pairs=True),
    deque: Kind(19, lambda value: [value.maxlen, *value], _build_deque, first=1),
    argparse.Namespace: _namespace(20, argparse.Namespace),
    types.SimpleNamespace: _namespace(21, types.SimpleNamespace),
    range: _record(22, range, start=int, stop=int, step=int),
    slice: _record(23, slice, start=object, stop=object, step=object),
    bytearray: Kind(24, bytes, _build_bytearray),
    Tagged: replace(_record(25, Tagged, tag=str, value=object), first=1),
}
"""The kinds that are stored, by exact type."""

BUILDERS: dict[int, Callable[[Any], Any]] = {
    kind.code: kind.build for kind in (DICT, BIG_INT, ENUM, WITH_ATTRIBUTES, SCALAR, DTYPE, *KINDS.values())
}
"""The functions that build a value, by extension code."""
