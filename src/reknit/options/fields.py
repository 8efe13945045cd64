"""The fields of options: the calls and processes that read each one, and the values that it may have."""

from __future__ import annotations

import numbers
import os
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from reknit.errors import UsageError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_Value = TypeVar("_Value")

Scope = Literal["save", "background", "agent", "start", "promote", "load", "open", "verify", "connect"]

CALLS: Mapping[Scope, str] = {
    "save": "a save with wait=True",
    "background": "a save with wait=False",
    "promote": "reknit.promote",
    "load": "reknit.load",
    "open": "reknit.open",
    "verify": "reknit.verify",
    "connect": "reknit.connect",
}
"""The calls that read options.

The agent receives the options of "agent" with each save.  The options of "start" are read once, when the
first save in the background starts the agents and allocates their memory.
"""

_READERS = "readers"

_KINDS: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    int | None: ((numbers.Integral, NoneType), "a whole number, or None"),
    float: (numbers.Real, "a number"),
    str | None: ((str, os.PathLike, NoneType), "a text, or None"),
}
"""The types that a value may have for an annotation, and their name in errors."""


def readers(*scopes: Scope) -> Mapping[str, frozenset[Scope]]:
    """Return the metadata of a field that is read in some scopes."""
    return {_READERS: frozenset(scopes)}


def option(default: _Value, *scopes: Scope) -> _Value:
    """Return a field with a default value, which is read in some scopes."""
    return field(default=default, metadata={_READERS: frozenset(scopes)})


def scopes_of(kind: Any) -> dict[str, frozenset[Scope]]:
    """Return the scopes in which each option of a class is read."""
    return {each.name: each.metadata[_READERS] for each in fields(kind)}


def names_in(kind: Any, scope: Scope) -> list[str]:
    """Return the options of a class that are read in a scope."""
    return [name for name, scopes in scopes_of(kind).items() if scope in scopes]


def check_scope(options: Any, scope: Scope) -> None:
    """Raise `UsageError` for an option that was set, and that a call does not read."""
    for each in fields(options):
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        value, read_in = getattr(options, each.name), each.metadata[_READERS]
        if scope not in read_in and value != usual and (value or usual):
            calls = " and ".join(text for name, text in CALLS.items() if name in read_in)
            raise UsageError(
                f"{each.name}={shown(value)} means nothing to {CALLS[scope]}",
                remedy=f"leave {each.name} out of these options: it is for {calls}",
            )


def require(ok: object, message: str) -> None:
    """Raise `UsageError` with a message unless a condition holds."""
    if not ok:
        raise UsageError(message)


def check_values(options: Any) -> None:
    """Raise `UsageError` for a value of another type than its option has, or that is not one of its choices.

    A text "no" would count as true otherwise.
    """
    for name, annotation in _annotations(options.__class__).items():
        value = getattr(options, name)
        if get_origin(annotation) is Literal:
            *others, last = map(repr, get_args(annotation))
            if not (isinstance(value, str) and value in get_args(annotation)):
                raise UsageError(f"{name} is {', '.join(others)} or {last}, not {value!r}")
        elif is_dataclass(annotation):
            if not isinstance(value, annotation):  # type: ignore[arg-type]
                raise UsageError(f"{name} is a reknit.{annotation.__name__}, not {shown(value)}")  # type: ignore[union-attr]
        elif annotation in _KINDS:
            kinds, called = _KINDS[annotation]
            if not isinstance(value, kinds) or (kinds is not bool and isinstance(value, bool)):
                raise UsageError(f"{name} is {called}, not {shown(value)}")


@cache
def _annotations(kind: type) -> dict[str, Any]:
    """Return the annotations of a class, by the names of its fields."""
    return get_type_hints(kind)


def check_patterns(name: str, patterns: object) -> None:
    """Raise `UsageError` unless `patterns` are several texts."""
    require(not isinstance(patterns, str), f"{name} is a tuple of patterns, not one string")
    require(
        isinstance(patterns, (tuple, list)) and all(isinstance(p, str) and p for p in patterns),
        f"{name} is a tuple of patterns, which are texts that are not empty, not {patterns!r}",
    )
