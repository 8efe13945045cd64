"""Names for the places in nested containers, and functions that walk, rebuild and refill these."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from reknit.errors import StateError
from reknit.types.shard import MAX_DEPTH, escaped
from reknit.types.small import NAMESPACES, REBUILT, rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

Path = tuple["str | int", ...]

SKELETON: Final = "~s"
"""Path element of the record of a stateful object; it differs from all escaped keys."""

POSITION: Final = "~position"
"""Path element of the position that all readers of a data loader have; it differs from all escaped keys."""

_PLAIN: Final = frozenset({int, float, complex, str, bytes, bool, type(None)})
"""Types of most leaves, which need no further checks, since lists can have millions of numbers."""

COUNTED: Final = 1 << 16
"""Number of containers after which one check looks for a few containers at many places."""

_LARGEST_FACTOR: Final = 1000
_LARGEST_NUMBER: Final = 1 << 20
"""Limits of the number of written values: this number, or this multiple of the number in memory."""


class _Descend:
    """The answer of a leaf function that leaves a value to the walk."""


DESCEND: Final = _Descend()


def escape(key: object, where: object) -> str:
    """Return the path element for a key of a container, different for different keys.

    `~` and `/` in strings become `~0` and `~1`; a string that looks like an integer is prefixed with `~2`,
    the empty string is `~3`; an integer is its digits.  Raises `StateError` for any other type of key.
    """
    if isinstance(key, str):
        try:
            return escaped(key if type(key) is str else str.__str__(key))
        except UnicodeEncodeError as error:
            raise StateError(
                f"{where} has the key {key!r}, which is not valid text", remedy="rename the key"
            ) from error
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    raise StateError(
        f"{where} has the key {key!r} of type {type(key).__name__}",
        remedy="keys of a state are strings and integers",
    )


def unescape(element: str) -> str | int:
    """Return the key that `escape` turned into `element`."""
    if element == "~3":
        return ""
    if element.removeprefix("-").isdigit() and element.isascii():
        return int(element)
    return element.removeprefix("~2").replace("~1", "/").replace("~0", "~")


def counts(value: Mapping[Any, Any]) -> bool:
    """Return whether the keys are the numbers from 0 on, as those of a list are."""
    return 0 in value and value.keys() == set(range(len(value)))


def is_numbered(value: Mapping[Any, Any]) -> bool:
    """Return whether the first key is a number.  Other ranks may have the rest of a count from 0."""
    return isinstance(next(iter(value), None), int)


def join(*parts: str) -> str:
    """Join path elements, or paths, into one; empty ones are left out."""
    return "/".join(part for part in parts if part)


def map_leaves(value: Any, leaf: Callable[[Path, Any], Any], where: object = "a value") -> Any:
    """Rebuild nested containers with `leaf(path, value)` in the place of every value.

    Numbers, texts and None are kept.  `leaf` is called for binary values too, and for containers before
    their contents.  It returns `DESCEND` to leave a value to the walk: a container of Python's own is then
    rebuilt in its own type, and any other value is kept.  Raises `StateError`, with `where`, for containers
    that are too deep or too large.
    """
    number = count(1)

    def mapped(value: Any, path: Path) -> Any:
        if type(value) in _PLAIN and type(value) is not bytes:
            return value
        answer = leaf(path, value)
        if answer is not DESCEND:
            return answer
        if type(value) not in REBUILT:
            return value
        if len(path) >= MAX_DEPTH:
            raise too_deep(f"{where} {dotted(path)}")
        if next(number) == COUNTED:
            require_bounded(root, where)
        return rebuilt(value, lambda key, child: mapped(child, (*path, key)))

    root = value
    return mapped(root, ())


def dotted(path: Path) -> str:
    """Return a path into a value in the syntax of Python; attributes are written as keys."""
    return "".join(f"[{key!r}]" for key in path)


def too_deep(where: object) -> StateError:
    """Return the error for containers that are nested too deeply."""
    return StateError(
        f"{where!s:.200} ... is nested deeper than {MAX_DEPTH} levels, or contains itself",
        remedy="flatten it, or take it out of itself",
    )


def require_bounded(value: Any, where: object) -> None:
    """Raise `StateError` for containers that hold each other too often to be written out."""
    held: dict[int, int] = {}
    sizes: dict[int, int] = {}

    def size(value: Any, depth: int) -> int:
        if type(value) in _PLAIN or depth > MAX_DEPTH:
            return 1
        if type(value) in NAMESPACES:
            value = vars(value)
        inside = value.values() if isinstance(value, Mapping) else value
        if inside is value and not isinstance(value, (list, tuple, deque)):
            return 1
        if id(value) not in sizes:
            sizes[id(value)], held[id(value)] = 1, len(inside)  # a container in itself is refused as too deep
            sizes[id(value)] += sum(size(inner, depth + 1) for inner in inside)
        return sizes[id(value)]

    written, there = size(value, 0), sum(held.values())
    if written > max(_LARGEST_NUMBER, _LARGEST_FACTOR * there):
        raise StateError(
            f"{where} has the same containers inside each other at so many places that {there:,} values "
            f"would be written out as {written:,}",
            remedy="hold each of them once, and its name or number elsewhere",
        )


def is_named(value: Any) -> bool:
    """Return whether a value is a named tuple."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def children(value: Any) -> list[tuple[Any, Any]]:
    """Return the keys and children of a container: a named tuple's keys are the names of its fields."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_named(value):
        return list(zip(type(value)._fields, value, strict=True))
    return list(enumerate(value))


def retuple(like: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of the same type, plain or named, with other values."""
    make = getattr(type(like), "_make", tuple)
    return make(values)


def any_leaf(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Return whether `wanted` holds for the value or its contents; it never does for numbers and texts.

    The result is also True for containers that are too deep or contain themselves, which the caller has to
    refuse.
    """
    is_open: dict[int, bool] = {}

    def holds(value: Any, depth: int) -> bool:
        if type(value) in _PLAIN or id(value) in is_open:
            return is_open.get(id(value), False)
        if wanted(value) or depth > MAX_DEPTH:
            return True
        if not isinstance(value, (Mapping, list, tuple)):
            return False
        is_open[id(value)] = True
        inside = value.values() if isinstance(value, Mapping) else value
        is_open[id(value)] = any(holds(inner, depth + 1) for inner in inside)
        return is_open[id(value)]

    return holds(value, 0)


def refillable(target: Any) -> bool:
    """Return whether `refill` can change the target itself."""
    return isinstance(target, (list, MutableMapping))


def refill(target: Any, value: Any) -> Any:
    """Return the target with the contents of a value of the same kind; otherwise return the value."""
    if not refits(target, value):
        return value
    if isinstance(target, list):
        target[:] = value
    else:
        target.clear()
        target.update(value)
    return target


def refits(target: Any, value: Any) -> bool:
    """Return whether `refill` would change the target itself: a list for a list, a mapping for a mapping."""
    if isinstance(target, list):
        return isinstance(value, list)
    return isinstance(target, MutableMapping) and isinstance(value, Mapping)
