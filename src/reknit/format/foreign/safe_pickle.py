"""How is a pickle of another program read without running it?  By a closed table of names and of opcodes.

The machine of the standard library builds numbers, texts and containers.  A name in the pickle is looked up
in the table of the reader, and never imported.  Calls go to the functions of that table alone, which build
values of this package.  An opcode or a name that the table lacks is refused with its name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from reknit.errors import FormatError, ReknitError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_PICKLE_NBYTES = 256 << 20
MAX_TUPLE_KEYS = 1_000
"""Keys that are tuples, in one pickle: tuples can be made to have equal hashes."""

MOST_MEMBERS = 64
"""Arguments of a call, and members of a key: a few bytes can repeat a call with one large tuple."""
LARGEST_KEY = 1 << 60
"""Integers below this are their own hashes."""
_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINGET LONG_BINGET BINPUT LONG_BINPUT",
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT",
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8",
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS",
    "EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET",
    "GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID",
)
_DATA_MODULES = frozenset(
    {"collections", "datetime", "decimal", "enum", "fractions", "pathlib", "uuid", "zoneinfo"}
)
"""Modules of the standard library whose classes are plain data."""
_MAKERS = frozenset(
    {
        *(f"builtins.{name}" for name in ("getattr", "range", "slice", "xrange")),
        *("functools.partial", "operator.getitem", "re._compile", "types.GenericAlias"),
    }
)
"""Names of the standard library that objects without code need: nested classes, types, patterns."""
_KNOWN: dict[str, Any] = vars(pickletools)["code2op"]
_RENAMED = {"__builtin__": "builtins"}
"""Modules that protocol 2 names as Python 2 did."""
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

    `standard` is the name in Python's own modules that it stands for, which may not be called.
    """

    why: str
    standard: str = ""


_MEMBERS = frozenset({str, bytes, int, float, bool, type(None), Global, Unreadable})
"""Members of a key that is a tuple."""


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
        known = _KNOWN.get(chr(code))
        raise FormatError(
            f"a pickle has the opcode {known.name if known else code}, which reknit does not carry out"
        )


class _Machine(pickle._Unpickler):
    """The machine of the standard library with fewer opcodes, and with calls to a vocabulary only."""

    dispatch: ClassVar[dict[int, Any]] = _Refused()
    stack: list[Any]
    append: Any
    pop_mark: Any

    def __init__(
        self, file: io.BytesIO, vocabulary: Vocabulary, persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(file, fix_imports=False)
        self._vocabulary, self._persistent = vocabulary, persistent
        self._num_tuple_keys = 0

    def find_class(self, module: str, name: str) -> Global | Unreadable:
        """Return a name of the vocabulary, or a mark for the values that need another package."""
        full = f"{_RENAMED.get(module, module)}.{name}"
        if self._vocabulary.has(full):
            return Global(full)
        why = f"a pickle needs {full[:200]}, which reknit neither imports nor runs"
        return Unreadable(why, full if _is_standard(full) else "")

    def persistent_load(self, pid: Any) -> Any:
        """Return the object for an identifier."""
        if self._persistent is None:
            raise FormatError("a pickle refers to data outside of it")
        return self._persistent(pid)

    def _reduce(self) -> None:
        args, name = self.stack.pop(), self.stack[-1]
        is_long = type(args) is tuple and len(args) > MOST_MEMBERS
        lost = _lost(args) if type(args) is tuple and not is_long else None
        if type(name) is Unreadable:
            if name.standard:
                self.stack[-1] = _made_by(name, lost)
            return
        if lost is not None:
            self.stack[-1] = lost
            return
        if type(name) is not Global or type(args) is not tuple:
            raise FormatError("a pickle calls something that is not a name")
        build = self._vocabulary.builders.get(name.name)
        if build is not None and is_long:
            self.stack[-1] = Unreadable(f"a pickle calls {name.name} with {len(args)} arguments")
        elif build is not None:
            self.stack[-1] = build(*args)
        elif self._vocabulary.makes(name.name):
            self.stack[-1] = PickledObject(name.name, args)
        else:
            raise FormatError(f"a pickle calls {shown(name.name)}")

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
        self.append(frozenset(map(self._key, self.pop_mark())))

    def _key(self, key: Any) -> Any:
        """Return a key if it is safe to hash.  Raises `FormatError` otherwise."""
        kind = type(key)
        if kind in (str, bytes, bool, type(None), Global, PickledObject, Unreadable):
            return key
        if kind is int and -LARGEST_KEY < key < LARGEST_KEY:
            return key
        self._num_tuple_keys += 1
        short = kind is float or (kind is tuple and _is_short(key))
        if short and self._num_tuple_keys <= MAX_TUPLE_KEYS:
            return key
        raise FormatError(f"a pickle has a key of type {kind.__name__}, or too many keys that are not texts")


def _lost(parts: tuple[Any, ...]) -> Unreadable | None:
    """Return the first part that needs the code of another program."""
    return next((part for part in parts if type(part) is Unreadable), None)


def _made_by(name: Unreadable, lost: Unreadable | None) -> Unreadable:
    """Return the result of a call of a name in Python's own modules.  Raises `FormatError` for most names."""
    if name.standard in _MAKERS or name.standard.startswith("typing."):
        return lost or Unreadable(name.why)
    raise FormatError(name.why)


def _is_standard(name: str) -> bool:
    """Return whether a name is one of Python's own modules, except those whose classes are plain data."""
    return name.partition(".")[0] in sys.stdlib_module_names - _DATA_MODULES


def _is_short(key: tuple[Any, ...]) -> bool:
    """Return whether a tuple is quick to hash; a deep one overflows the stack of the interpreter."""
    return len(key) <= MOST_MEMBERS and {*map(type, key)} <= _MEMBERS


def neutral_keys(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a table with texts in place of keys that are names, such as dtypes, or tuples of names.

    Raises `UnreadError` for a key that needs another package, `FormatError` if two keys have one text.
    """
    if not any(isinstance(key, tuple | Unreadable) for key in table):
        return table
    made = {_neutral_key(key): value for key, value in table.items()}
    if len(made) < len(table):
        raise FormatError("a pickle has a table in which a name and its text are keys")
    return made


def _neutral_key(key: Any) -> Any:
    """Return a key with names as texts; a tuple of names is written as torch prints it."""
    if (lost := _lost(key if isinstance(key, tuple) else (key,))) is not None:
        raise UnreadError(lost.why)
    if isinstance(key, Global):
        return key.name
    if isinstance(key, tuple) and any(isinstance(member, Global) for member in key):
        return f"({', '.join(m.name if isinstance(m, Global) else repr(m) for m in key)})"
    return key


_OWN = {
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._reduce,
    "BUILD": _Machine._build,
    "SETITEM": _Machine._setitem,
    "SETITEMS": _Machine._setitems,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "ADDITEMS": _Machine._additems,
    "FROZENSET": _Machine._frozenset,
}
for _name in " ".join(_OPCODES).split():
    _code = getattr(pickle, _name)[0]
    _Machine.dispatch[_code] = _OWN.get(_name) or pickle._Unpickler.dispatch[_code]
