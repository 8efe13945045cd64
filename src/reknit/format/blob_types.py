"""The closed table of extension types for values that are not tensors.

An entry takes a value apart into simpler ones, and builds it again from them.  `blob_codec` walks; nothing
here recurses, and nothing is built that the table does not name.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import pathlib
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from reknit.errors import CorruptError, FormatError, shown
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class RefusedError(Exception):
    """A value that the format does not store.

    `steps` is the way from the value up to the entry of the state, filled in as the refusal passes.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.steps: list[str] = []

    @property
    def path(self) -> str:
        """The place of the value, from the entry of the state down."""
        return "".join(reversed(self.steps))


def fields(payload: Any, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the members of a payload that must be a list of exactly these types; `object` means any."""
    if type(payload) is not list or len(payload) != len(kinds):
        raise CorruptError(f"a stored value is not a list of {len(kinds)} fields")
    for member, kind in zip(payload, kinds, strict=True):
        allowed = kind if isinstance(kind, tuple) else (kind,)
        # exact, because a bool is an int to isinstance
        if object not in allowed and type(member) not in allowed:
            raise CorruptError(f"a stored value has a field of type {type(member).__name__}")
    return payload


TAG = "enum"
"""Tag of a member that the loading program does not have."""


def take_enum(value: enum.Enum) -> list[str]:
    """Return module, qualified name and member name."""
    kind = type(value)
    if find_enum(kind.__module__, kind.__qualname__) is not kind:
        raise RefusedError(
            f"a member of the enum {kind.__qualname__}, which cannot be found again by its name",
            "define the enum at the top of a module, or save value.value",
        )
    name = value.name
    if kind.__members__.get(name) is not value:
        raise RefusedError(f"{shown(value)}, a combination of flags without a name", "save value.value")
    return [kind.__module__, kind.__qualname__, name]


def build_enum(payload: Any) -> Any:
    """Return the member, or `Tagged(TAG, [module, qualified name, member])` where nothing has that name."""
    module, qualname, name = fields(payload, str, str, str)
    kind = find_enum(module, qualname)
    member = None if kind is None else kind.__members__.get(name)
    return Tagged(TAG, payload) if member is None else member


def find_enum(module: str, qualname: str) -> type[enum.Enum] | None:
    """Return an enumeration of a module that is already imported; nothing is imported or run for it."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        # through the namespace itself: an attribute access could run a lazy module's or a descriptor's code
        found = vars(found).get(name) if isinstance(found, (type(sys), type)) else None
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


ARRAY: type = np.ndarray
MAX_NDIM = 64

_UNIT = r"(?:\[[0-9]{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_TYPESTR = rf"[<>](?:[iuf][248]|c8|c16|[mM]8{_UNIT}|U[1-9][0-9]{{0,7}})|\|(?:[iub]1|S[1-9][0-9]{{0,7}})"
_ML_NAMES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e4m3b11fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int4",
    "uint4",
)
_OF_ANOTHER_LIBRARY = 2
"""`numpy.dtype.isbuiltin` of a dtype that a library has registered."""


@cache
def _ml_dtypes() -> dict[str, np.dtype[Any]]:
    import ml_dtypes  # older releases do not have all of them

    return {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_NAMES if hasattr(ml_dtypes, name)}


def take_dtype(dtype: np.dtype[Any]) -> str:
    """Return the stored name of a dtype: NumPy's array-interface string, or its name in ml_dtypes."""
    if dtype.isbuiltin == _OF_ANOTHER_LIBRARY:
        for name, known in _ml_dtypes().items():
            if dtype == known:
                return name
    name = str(dtype.str)
    if dtype.metadata is None and re.fullmatch(_TYPESTR, name) and np.dtype(name) == dtype:
        return name
    raise RefusedError(f"NumPy data of type {dtype!s:.100}", "convert it to numbers, or to a list")


def build_dtype(name: Any) -> np.dtype[Any]:
    """Return the dtype of a stored name."""
    if type(name) is str and name in _ML_NAMES:
        if name not in _ml_dtypes():
            raise FormatError(f"the installed ml_dtypes has no {name}", remedy="upgrade ml_dtypes")
        return _ml_dtypes()[name]
    if type(name) is not str or not re.fullmatch(_TYPESTR, name):
        raise CorruptError(f"{str(name)[:40]!r} is not a dtype")
    return np.dtype(name)


def take_array(array: Any) -> list[Any]:
    """Return dtype name, shape, and bytes."""
    return [take_dtype(array.dtype), list(array.shape), array.tobytes()]


def build_array(payload: Any) -> Any:
    """Return a new writable array."""
    name, shape, data = fields(payload, str, list, (bytes, np.ndarray))
    return _array(build_dtype(name), shape, data)


def take_scalar(value: Any) -> list[Any]:
    """Return dtype name and bytes; text and bytes as they are, since NumPy drops their trailing zeros."""
    if type(value) is np.str_:
        return ["U", str.__str__(value)]  # str() itself would drop trailing zeros
    if type(value) is np.bytes_:
        return ["S", bytes(value)]
    name = take_dtype(value.dtype)
    if type(value) is not value.dtype.type:
        raise RefusedError(
            f"a {type(value).__name__}, which derives from a NumPy type", "save it as that type"
        )
    return [name, value.tobytes()]


def build_scalar(payload: Any) -> Any:
    """Return the NumPy scalar."""
    name, data = fields(payload, str, (str, bytes))
    if name == "U" and type(data) is str:
        return np.str_(data)
    if type(data) is not bytes or name[1:2] in ("U", "S"):
        raise CorruptError("a NumPy scalar has the wrong kind of payload")
    return np.bytes_(data) if name == "S" else _array(build_dtype(name), [], data)[()]


def _array(dtype: np.dtype[Any], shape: list[Any], data: bytes | np.ndarray[Any, Any]) -> Any:
    if len(shape) > MAX_NDIM or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise CorruptError("an array has an impossible shape")
    # a zero must not hide a shape that NumPy refuses
    if prod(n or 1 for n in shape) * dtype.itemsize >= 1 << 63:
        raise CorruptError("an array has a shape that is too large")
    if prod(shape) * dtype.itemsize != len(data):
        raise CorruptError(f"an array has {len(data)} bytes, which {dtype}{shape} does not fill")
    if isinstance(data, np.ndarray):
        array = data.view(dtype).reshape(shape)
    else:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    _check_elements(array)
    return array


def _check_elements(array: Any) -> None:
    """Refuse bit patterns that the type does not have, and that would go wrong later and elsewhere."""
    flat = array.reshape(-1)
    if array.dtype.kind == "b" and flat.size and flat.view(np.uint8).max() > 1:
        raise CorruptError("an array of bool has bytes other than 0 and 1")
    if array.dtype.kind == "U" and flat.size and flat.view(array.dtype.byteorder + "u4").max() > 0x10FFFF:
        raise CorruptError("an array of text has a number that is not a character")


MAX_BIG_INT_NBYTES = 1 << 20
MAX_EQUAL_HASHES = 64

PICKLE = 127

_FACTORIES: dict[str, type] = {"list": list, "dict": dict, "int": int, "float": float, "str": str, "set": set}


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
SCALAR = Kind(8, take_scalar, build_scalar)
DTYPE = Kind(9, take_dtype, build_dtype)

KINDS: dict[type, Kind] = {
    tuple: Kind(1, list, lambda payload: tuple(_members(payload))),
    set: Kind(2, list, lambda payload: set(checked_keys(_members(payload))), unordered=True),
    frozenset: Kind(3, list, lambda payload: frozenset(checked_keys(_members(payload))), unordered=True),
    complex: _record(6, complex, real=float, imag=float),
    ARRAY: Kind(7, take_array, build_array),
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
