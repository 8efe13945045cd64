"""Encode values that are not tensors as msgpack with a closed set of extension types, no code."""

from __future__ import annotations

import dataclasses
import enum
import io
from collections.abc import Iterator
from mmap import mmap
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from reknit.errors import CorruptError, FormatError, StateError, shortage
from reknit.format.blob_types import (
    ATTRIBUTED,
    BIG_INT,
    BUILDERS,
    DICT,
    DTYPE,
    ENUM,
    KINDS,
    PICKLE,
    SCALAR,
    WITH_ATTRIBUTES,
    Kind,
    RefusedError,
)
from reknit.format.checksum import MAX_BLOBS_NBYTES
from reknit.format.msgpack_reader import check_structure, read_msgpack
from reknit.format.paths import checked_name, encodable
from reknit.types.dtype import is_function
from reknit.types.shard import MAX_DEPTH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PLAIN = frozenset({type(None), bool, float, bytes})
_REMEDY = (
    "save a plain value (numbers, text, bytes, lists, dicts, arrays, ...) made from it, give its class "
    "state_dict() and load_state_dict(), or pass SaveOptions(allow_pickle=True)"
)
_LOAD_REMEDY = (
    "pass LoadOptions(allow_pickle=True), and only for a checkpoint that you trust: unpickling runs code"
)


def encode_blobs(values: Mapping[str, Any], *, allow_pickle: bool = False, item: str | None = None) -> bytes:
    """Return the bytes of a file of blobs, by FQN.

    Equal values give equal bytes in every process.  Raises `StateError`, naming the path (below `item`)
    of the first value that the format does not store; with `allow_pickle` such a value is pickled instead.
    """
    encoder = _Encoder(allow_pickle=allow_pickle)
    members = {}
    for fqn, value in values.items():
        checked_name(fqn, "name")
        try:
            members[fqn] = encoder.value(value, 1)
        except RefusedError as refusal:
            where = "/".join(part for part in (item, fqn) if part)
            raise StateError(
                f"{where}{refusal.path} cannot be saved: it is {refusal.what}", remedy=refusal.remedy
            ) from None
    try:
        data = msgspec.msgpack.encode(members)
    except (OverflowError, ValueError) as error:
        raise StateError(f"a value of {item or 'the state'} is too large for msgpack: {error}") from error
    return _fitting(data, item or "the state")


def encode_value(value: Any) -> bytes:
    """Return the bytes of one value, which `name_of_value` makes a file of blobs.  Raises `StateError`."""
    return encode_blobs({"": value})[len(name_of_value("")) :]


def name_of_value(fqn: str) -> bytes:
    """Return the bytes of a file of blobs before its only value."""
    return b"\x81" + msgspec.msgpack.encode(checked_name(fqn, "name"))


def join_blobs(parts: Sequence[bytes]) -> bytes:
    """Return the file of blobs with the values of `parts`, each of them a file with a single value."""
    if len(parts) == 1:
        return _readable(parts[0])
    if len(parts) < 16:
        head = bytes([0x80 | len(parts)])
    elif len(parts) < 1 << 16:
        head = b"\xde" + len(parts).to_bytes(2, "big")
    else:
        head = b"\xdf" + len(parts).to_bytes(4, "big")
    # A map of one begins with one byte that says so, and then key and value follow.
    data = b"".join([head, *(part[1:] for part in parts)])
    return _readable(data)


def _fitting(data: bytes, where: str) -> bytes:
    if len(data) > MAX_BLOBS_NBYTES:
        raise StateError(
            f"the values of {where} that are not tensors take {len(data)} bytes; {MAX_BLOBS_NBYTES} is the "
            "limit",
            remedy="save large arrays as tensors: entries of the state by themselves, or arrays or bytes in "
            "the state of a loader's source, and not in lists of numbers",
        )
    return data


def _readable(data: bytes) -> bytes:
    """Return a file of blobs.  Raises `StateError` when a reader would refuse it, for its size or parts."""
    try:
        check_structure(_fitting(data, "the state"))
    except FormatError as error:
        raise StateError(error.message, remedy=error.remedy) from error
    return data


def decode_blobs(
    data: bytes | bytearray | memoryview | mmap, *, allow_pickle: bool = False, writable: bool = False
) -> dict[str, Any]:
    """Return the values of a file of blobs, by FQN.

    Memory of `file_memory` can be decoded once: its pages go back to the system while they are read.  With
    `writable`, the binaries of a `Tagged` are a `bytearray`, which its original can take as its memory.
    Equal values may then be one object, which must stay as it is.  Nothing is imported or run to build them,
    unless `allow_pickle`.  Raises `CorruptError` for damage, and `FormatError` for pickled values without
    `allow_pickle` and for values above a limit.
    """
    if len(data) > MAX_BLOBS_NBYTES:
        raise FormatError(f"the file of blobs has {len(data)} bytes; {MAX_BLOBS_NBYTES} is the limit")

    def unpack(code: int, payload: Any) -> Any:
        if code == PICKLE:
            return _unpickled(payload, allow_pickle=allow_pickle)
        build = BUILDERS.get(code)
        if build is None:
            raise FormatError(f"a value has the unknown extension type {code}")
        try:
            return build(payload)
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptError(f"a value of extension type {code} is impossible: {error}") from error

    data = data if isinstance(data, mmap) else bytes(data)
    values = read_msgpack(data, unpack, trusted=allow_pickle, writable=writable)
    if type(values) is not dict or any(type(fqn) is not str for fqn in values):
        raise CorruptError("a file of blobs is not a map of names")
    return values


class _Encoder:
    """Turns values into plain values and extensions, which msgspec writes."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle

    def value(self, value: Any, depth: int) -> Any:
        """Return the plain value or extension for a value that lies inside `depth` containers."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int and -(1 << 63) <= value < 1 << 64:
            return value
        if kind is str:
            return _checked_text(value)
        if depth >= MAX_DEPTH:
            raise RefusedError(f"nested deeper than {MAX_DEPTH} levels, or contains itself", "flatten it")
        if kind is list:
            return self._members(value, depth + 1)
        if kind is dict:
            if all(type(key) is str for key in value):
                return self._map(value, depth + 1)
            return self._extension(DICT, value, depth)
        if kind in ATTRIBUTED and vars(value):
            return self._extension(WITH_ATTRIBUTES, value, depth)
        found = BIG_INT if kind is int else KINDS.get(kind) or _kind_by_base(value)
        if found is None:
            return self._unknown(value, RefusedError(_described(kind), _remedy(value)))
        return self._extension(found, value, depth)

    def _extension(self, kind: Kind, value: Any, depth: int) -> Any:
        try:
            payload = kind.take(value)
        except RefusedError as refusal:
            return self._unknown(value, refusal)
        if type(payload) is not list:
            return Ext(kind.code, msgspec.msgpack.encode(_checked_text(payload)))
        members = self._members(payload, depth + 1, kind)
        if kind.unordered:
            members = [msgspec.Raw(raw) for raw in sorted(map(msgspec.msgpack.encode, members))]
        return Ext(kind.code, msgspec.msgpack.encode(members))

    def _members(self, values: Sequence[Any], depth: int, kind: Kind | None = None) -> list[Any]:
        members: list[Any] = []
        try:
            for value in values:
                members.append(self.value(value, depth))
        except RefusedError as refusal:
            refusal.steps.append(kind.label(values, len(members)) if kind else f"[{len(members)}]")
            raise
        return members

    def _map(self, values: dict[str, Any], depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in values.items():
            try:
                members[_checked_text(key)] = self.value(value, depth)
            except RefusedError as refusal:
                refusal.steps.append(f"[{key!r:.100}]")
                raise
        return members

    def _unknown(self, value: Any, refusal: RefusedError) -> Ext:
        if self._allow_pickle:
            return Ext(PICKLE, msgspec.msgpack.encode(_pickled(value)))
        raise refusal


def _kind_by_base(value: Any) -> Kind | None:
    """Return the kind of a value whose exact type is not in the table, but which a whole family is."""
    if isinstance(value, enum.Enum):
        return ENUM
    if isinstance(value, np.generic):
        return SCALAR
    return DTYPE if isinstance(value, np.dtype) else None


def _checked_text(value: Any) -> Any:
    if type(value) is str and not encodable(value):
        raise RefusedError(f"text that is not valid Unicode: {value[:40]!r}", "save it as bytes")
    return value


def _described(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    bases = [
        base for base in kind.__mro__[1:-1] if base in KINDS or base in (int, str, list, dict, float, bytes)
    ]
    return f"a {name}, which derives from {bases[0].__name__}" if bases else f"a {name}"


def _remedy(value: Any) -> str:
    """Return the remedy: the thing to save in the place of a value."""
    if isinstance(value, type):
        return "put an object of this class into the state, and not the class"
    if callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None)):
        return "save the result of its get_state(), and pass that to its set_state() after a load"
    if callable(getattr(value, "getstate", None)) and callable(getattr(value, "setstate", None)):
        return "save the result of its getstate(), and pass that to its setstate() after a load"
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        state = "bit_generator.state" if isinstance(value, np.random.Generator) else "state"
        seeds = state.replace("state", "seed_seq.state")
        return (
            f"save its {state}, and set that in a generator of the same kind after a load; for spawn(), save "
            f"its {seeds} as well, and make that generator from numpy.random.SeedSequence(**saved)"
        )
    if "DataLoader" in type(value).__name__:
        return (
            "it has no resumable position: use torchdata's StatefulDataLoader or a loader of "
            "reknit.dataloader instead; or save the number of batches taken, and skip them after a load"
        )
    if isinstance(value, io.BytesIO):
        return "save the bytes that its getvalue() returns, and make a io.BytesIO of them after a load"
    if isinstance(value, Iterator):
        return (
            "it has no resumable position: save its position as a number, and skip to it after a load; "
            "or put it into a class with state_dict() and load_state_dict()"
        )
    if is_function(value):
        return (
            "leave it out of the state, as a function has none: of a module of Equinox, for example, save "
            "and load eqx.filter(module, eqx.is_array)"
        )
    if dataclasses.is_dataclass(value):
        return (
            "save the dict that dataclasses.asdict() makes of it, or give its class state_dict() and "
            "load_state_dict()"
        )
    return _REMEDY


def _pickled(value: Any) -> bytes:
    import pickle

    try:
        return pickle.dumps(value, protocol=4)
    except Exception as error:  # a class may raise anything from its own pickling code
        refused = RefusedError(f"a {type(value).__qualname__} that pickle refuses: {error}", _REMEDY)
        raise shortage(error) or refused from error


def _unpickled(payload: Any, *, allow_pickle: bool) -> Any:
    if not allow_pickle:
        raise FormatError("the checkpoint holds pickled values, which may run code", remedy=_LOAD_REMEDY)
    if type(payload) is not bytes:
        raise CorruptError("a pickled value is not bytes")
    import pickle

    try:
        return pickle.loads(payload)
    except Exception as error:  # a class may raise anything from its own unpickling code
        raise shortage(error) or FormatError(
            f"a pickled value cannot be loaded: {type(error).__name__}: {error}",
            remedy="make the modules that define its class importable",
        ) from error
