"""Pickles of other programs, read without running them: by a closed table of names and of opcodes.

The machine of the standard library builds numbers, texts and containers.  A name in the pickle is looked up
in the table of the reader, and never imported.  Calls go to the functions of that table alone, which build
values of this package.  An opcode or a name that the table lacks is refused with its name.

All calls of a pickle together copy no more than the pickle has: a few bytes can repeat a call with one large
argument.

A table takes quadratic time for keys of equal hashes, and a hash of a deep tuple overflows the stack.

Nothing is called here or elsewhere.  A call of a class whose objects are plain data leaves one value unread,
and the rest of the file opens.  A call of any other function of Python (`os.system`, `eval`) is the mark of
an attack, and closes the file.
"""

from __future__ import annotations

import builtins
import datetime
import io
import pathlib
import pickle
import pickletools
import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from reknit.errors import FormatError, ReknitError, shown
from reknit.plugins.format import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


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


MAX_NAME = 1_000
"""Characters of a name: a few bytes of a pickle can repeat a name with one large text."""

MAKES_OBJECT = frozenset({"copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"})
"""Functions that make an object of the class that is their first argument, as the opcode NEWOBJ does."""
_APPLIES = frozenset(
    {"builtins.filter", "builtins.map", "functools.reduce", "itertools.starmap", "operator.call"}
)
"""Functions that call their first argument."""

_DATA_MODULES = frozenset(
    {
        "array",
        "ast",
        "calendar",
        "collections",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "ipaddress",
        "itertools",
        "pathlib",
        "random",
        "typing",
        "uuid",
        "zoneinfo",
    }
)
"""Modules of the standard library whose names make values, and act on nothing else."""
_VALUES = {
    "io": "BytesIO StringIO",
    "struct": "Struct",
    "builtins": (
        "bool bytearray bytes complex dict enumerate float frozenset getattr int iter list memoryview object "
        "range reversed set slice str tuple type zip"
    ),
    "functools": "partial",
    "http": "HTTPMethod HTTPStatus",
    "inspect": "Parameter Signature _ParameterKind",
    "logging": "Formatter Logger PercentStyle StrFormatStyle StringTemplateStyle getLogger",
    "operator": "attrgetter getitem itemgetter methodcaller or_",
    "os": "stat_result terminal_size",
    "platform": "uname_result",
    "re": "RegexFlag _compile",
    "signal": "Handlers Sigmasks Signals",
    "socket": "AddressFamily AddressInfo MsgFlag SocketKind",
    "ssl": "AlertDescription Options TLSVersion VerifyFlags VerifyMode",
    "time": "struct_time",
    "types": "GenericAlias MappingProxyType SimpleNamespace UnionType",
}
"""Names of other modules that objects without code need: enumerations, records, types, nested classes."""
_CALLABLE = frozenset(f"{module}.{name}" for module, names in _VALUES.items() for name in names.split()) | {
    f"builtins.{name}"
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}


def full_name(module: str, name: str, protocol: int) -> str:
    """Return the name that a pickle means.  Protocols below 3 write the names that Python 2 had."""
    if protocol < 3:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


def is_standard(name: str) -> bool:
    """Return whether a name is one of Python's own modules."""
    return name.partition(".")[0] in sys.stdlib_module_names


def applies(name: str) -> bool:
    """Return whether a name of Python's own modules stands for a function that calls its first argument."""
    return _public(name) in _APPLIES


def makes_data(name: str) -> bool:
    """Return whether a name of Python's own modules stands for a class of plain data, or a maker of such."""
    return _public(name) in _CALLABLE or _public(name).partition(".")[0] in _DATA_MODULES


def _public(name: str) -> str:
    """Return a name without the mark of a module in C, such as `_functools` for `functools`."""
    return name.removeprefix("_")


MAX_PICKLE_NBYTES = 256 << 20
_COPIED_AT_ONCE = 4_096
"""Members that the calls of a pickle may copy beyond its size in bytes."""
_CHARACTERS = 16
"""Characters or bytes that are as much to copy as one member of a container."""
_SETS = {"builtins.frozenset": frozenset, "builtins.set": set}
"""Calls for sets, as protocols below 4 have them in place of opcodes."""
_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINGET LONG_BINGET BINPUT LONG_BINPUT",
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT",
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8",
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS",
    "EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET",
    "GLOBAL STACK_GLOBAL REDUCE NEWOBJ NEWOBJ_EX BUILD BINPERSID",
)
_KNOWN: dict[str, Any] = vars(pickletools)["code2op"]
_DAMAGE = (
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)


class Global(NamedTuple):
    """A name in a pickle, which stands for itself."""

    name: str


class PickledObject:
    """An object of a class of another program, as its name, its arguments and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.name, self.args, self.state = name, args, state

    def field(self, name: str) -> Any:
        """Return a member of the state of a dataclass.  Raises `FormatError` without it."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise FormatError(f"an object {self.name[:200]} of the pickle has no {name}")
        return self.state[name]


class UnreadError(FormatError):
    """A value of a pickle is not one that reknit stores, while the others may be."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A value that needs the code of another package; all that is made of it is one, too.

    `standard` is the name in Python's own modules that it stands for.
    """

    why: str
    standard: str = ""


class Vocabulary(NamedTuple):
    """The names that a pickle may have: functions by name, and classes whose objects become `PickledObject`.

    `names` may occur, but cannot be called.  A class counts too if its name begins with one of `families`.
    """

    builders: Mapping[str, Callable[..., Any]]
    classes: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    families: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Return whether a pickle may have this name."""
        return name in self.builders or name in self.names or self.makes(name)

    def makes(self, name: str) -> bool:
        """Return whether this is a class whose objects become `PickledObject`."""
        return name in self.classes or name.startswith(self.families or "\0")


def read_pickle(
    data: bytes | memoryview | io.BytesIO,
    vocabulary: Vocabulary,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value of a pickle.  `persistent` gives the objects that are stored beside the pickle.

    A value in it that needs code of another package becomes `Unreadable`.  Raises `UnreadError` if that is
    the whole value, and `FormatError` for functions of Python itself, and for a damaged pickle.
    """
    file = data if isinstance(data, io.BytesIO) else io.BytesIO(data)
    if file.getbuffer().nbytes > MAX_PICKLE_NBYTES:
        raise FormatError(f"a pickle has more than {MAX_PICKLE_NBYTES} bytes")
    machine = _Machine(file, vocabulary, persistent)
    try:
        value = machine.load()
    except ReknitError:
        raise
    except _DAMAGE as error:
        raise FormatError(f"a pickle is damaged: {type(error).__name__} {shown(str(error))}") from None
    if type(value) is Unreadable:
        raise UnreadError(value.why)
    return value


class _Refused(dict[int, Any]):
    """The table of opcodes; an opcode without an entry is refused."""

    def __missing__(self, code: int) -> NoReturn:
        name = getattr(_KNOWN.get(chr(code)), "name", code)
        raise FormatError(f"a pickle has the opcode {name}, which reknit does not carry out")


class _Machine(pickle._Unpickler):
    """The machine of the standard library with fewer opcodes, and with calls to a vocabulary only."""

    dispatch: ClassVar[dict[int, Any]] = _Refused()
    stack: list[Any]
    append: Any
    pop_mark: Any
    proto: int

    def __init__(
        self, file: io.BytesIO, vocabulary: Vocabulary, persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(file, fix_imports=False)
        self._vocabulary, self._persistent = vocabulary, persistent
        self._keys = SafeKeys(frozenset({Global, PickledObject, Tagged, Unreadable}))
        self._left = file.getbuffer().nbytes + _COPIED_AT_ONCE

    def find_class(self, module: str, name: str) -> Global | Unreadable:
        """Return a name of the vocabulary, or a mark for the values that need another package."""
        if len(module) + len(name) > MAX_NAME:
            raise FormatError(f"a pickle has a name of more than {MAX_NAME} characters")
        full = full_name(module, name, self.proto)
        if self._vocabulary.has(full):
            return Global(full)
        why = f"a pickle needs {full[:200]}, which reknit neither imports nor runs"
        return Unreadable(why, full if is_standard(full) else "")

    def persistent_load(self, pid: Any) -> Any:
        """Return the object for an identifier."""
        if self._persistent is None:
            raise FormatError("a pickle refers to data outside of it")
        return self._persistent(pid)

    def _reduce(self) -> None:
        args, name = self.stack.pop(), self.stack[-1]
        self.stack[-1] = self._called(name, args)

    def _newobj(self) -> None:
        args, kind = self.stack.pop(), self.stack[-1]
        self.stack[-1] = self._made(kind, args)

    def _newobj_ex(self) -> None:
        by_name, args, kind = self.stack.pop(), self.stack.pop(), self.stack[-1]
        self.stack[-1] = self._made_by_name(kind, args, by_name)

    def _called(self, name: Any, args: Any) -> Any:
        """Return the result of a call.  Raises `FormatError` for functions of Python itself."""
        if type(name) is not Unreadable or not name.standard:
            return self._made(name, args)
        if name.standard in MAKES_OBJECT and 0 < len(args) <= MOST_MEMBERS:
            return self._object(name.standard, *args)
        called = args[0] if args and applies(name.standard) else name
        if type(called) is Unreadable and called.standard and not makes_data(called.standard):
            raise FormatError(called.why)
        return lost_in(args[:MOST_MEMBERS]) or Unreadable(name.why)

    def _object(self, maker: str, kind: Any, *args: Any) -> Any:
        """Return a new object of a class, which a function of `copyreg` makes in place of an opcode."""
        if maker.endswith("__newobj__"):
            return self._made(kind, args)
        first, second = args
        if maker.endswith("__newobj_ex__"):
            return self._made_by_name(kind, first, second)
        is_plain = type(first) is Unreadable and first.standard == "builtins.object"
        return self._made(kind, () if is_plain else (second,))

    def _made_by_name(self, kind: Any, args: Any, by_name: Any) -> Any:
        if type(kind) is Global and by_name:
            return Unreadable(f"a pickle makes {kind.name[:200]} of arguments with names")
        return self._made(kind, args)

    def _made(self, kind: Any, args: Any) -> Any:
        """Return an object of a class of the vocabulary, or the result of one of its functions."""
        if type(kind) is Unreadable:
            return kind
        if type(kind) is not Global or type(args) is not tuple:
            raise FormatError("a pickle calls something that is not a name")
        is_long = len(args) > MOST_MEMBERS
        if not is_long and (lost := lost_in(args)) is not None:
            return lost
        if kind.name in self._vocabulary.builders:
            if is_long:
                return Unreadable(f"a pickle calls {kind.name} with {len(args)} arguments")
            return self._built(kind.name, args)
        if self._vocabulary.makes(kind.name):
            return PickledObject(kind.name, args)
        return Unreadable(f"a pickle calls {kind.name[:200]}, which reknit does not do")

    def _built(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the result of a function of the vocabulary.  Raises `FormatError` after too many copies."""
        self._left -= sum(map(_weight, args))
        if self._left < 0:
            raise FormatError(
                f"a pickle repeats calls such as {name} with large arguments: they copy more than it has"
            )
        try:
            if name in _SETS:
                members = args[0] if args else ()
                if len(args) > 1 or type(members) not in (list, tuple):
                    raise UnreadError("a pickle makes a set of something else than a list")
                return _SETS[name](map(self._key, members))
            return self._vocabulary.builders[name](*args)
        except UnreadError as error:
            return Unreadable(error.message)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is Unreadable:
            return
        if type(made) is PickledObject:
            made.state = state
        elif type(made) is not dict:  # attributes of a mapping, such as the versions of modules, are left out
            raise FormatError(f"a pickle gives a state to a {type(made).__name__}")

    def _setitems(self) -> None:
        items = self.pop_mark()
        self._put(items[::2], items[1::2])

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key], [value])

    def _put(self, keys: list[Any], values: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) is Unreadable:
            return
        if type(into) is not dict or len(keys) != len(values):
            raise FormatError("a pickle puts items into something that is not a table")
        for key, value in zip(keys, values, strict=True):
            into[self._key(key)] = value

    def _appends(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not Unreadable:
            self._list().extend(items)

    def _append(self) -> None:
        value = self.stack.pop()
        if type(self.stack[-1]) is not Unreadable:
            self._list().append(value)

    def _list(self) -> list[Any]:
        into = self.stack[-1]
        if type(into) is not list:
            raise FormatError("a pickle appends to something that is not a list")
        return into

    def _additems(self) -> None:
        items = self.pop_mark()
        into = self.stack[-1]
        if type(into) is Unreadable:
            return
        if type(into) is not set:
            raise FormatError("a pickle adds to something that is not a set")
        into.update(map(self._key, items))

    def _frozenset(self) -> None:
        members = self.pop_mark()
        self.append(frozenset(map(self._key, members)))

    def _key(self, key: Any) -> Any:
        """Return a key that is safe to hash, or a mark in its place.  Raises `FormatError` for an attack."""
        try:
            return self._keys.checked(key)
        except UnknownKeyError as error:
            return Unreadable(str(error))


def lost_in(parts: Iterable[Any]) -> Unreadable | None:
    """Return the first part that needs the code of another program."""
    return next((part for part in parts if type(part) is Unreadable), None)


def _weight(value: Any) -> int:
    """Return the number of members that a copy of an argument copies."""
    if isinstance(value, str | bytes):
        return len(value) // _CHARACTERS
    return len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 0


_OWN = {
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._newobj,
    "NEWOBJ_EX": _Machine._newobj_ex,
    "BUILD": _Machine._build,
    "SETITEM": _Machine._setitem,
    "SETITEMS": _Machine._setitems,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "ADDITEMS": _Machine._additems,
    "FROZENSET": _Machine._frozenset,
    "BYTEARRAY8": _Machine.load_binbytes8,  # type: ignore[attr-defined]
}
for _name in " ".join(_OPCODES).split():
    _code = getattr(pickle, _name)[0]
    _Machine.dispatch[_code] = _OWN.get(_name) or pickle._Unpickler.dispatch[_code]
