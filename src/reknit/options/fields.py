"""The fields of options: the calls and processes that read each one, and the values that it may have."""

from __future__ import annotations

import numbers
import os
from dataclasses import field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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

_KINDS: Mapping[str, tuple[Any, str]] = {
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "int | None": ((numbers.Integral, NoneType), "a whole number, or None"),
    "float": (numbers.Real, "a number"),
    "str | None": ((str, os.PathLike, NoneType), "a text, or None"),
}
"""The types that a value may have for an annotation, which stays a text, and their name in errors."""


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
        value, read_in, usual = getattr(options, each.name), each.metadata[_READERS], each.default
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
    for name, annotation in type(options).__annotations__.items():
        value = getattr(options, name)
        if annotation.startswith("Literal["):
            choices = annotation[len("Literal[") : -1].replace("'", "").split(", ")
            if not (isinstance(value, str) and value in choices):
                *others, last = map(repr, choices)
                raise UsageError(f"{name} is {', '.join(others)} or {last}, not {value!r}")
        elif annotation in _KINDS:
            kinds, called = _KINDS[annotation]
            if not isinstance(value, kinds) or (kinds is not bool and isinstance(value, bool)):
                raise UsageError(f"{name} is {called}, not {shown(value)}")


def check_patterns(name: str, patterns: object) -> None:
    """Raise `UsageError` unless `patterns` are several texts."""
    require(not isinstance(patterns, str), f"{name} is a tuple of patterns, not one string")
    require(
        isinstance(patterns, (tuple, list)) and all(isinstance(p, str) and p for p in patterns),
        f"{name} is a tuple of patterns, which are texts that are not empty, not {patterns!r}",
    )
