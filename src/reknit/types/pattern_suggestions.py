"""Suggest patterns or names in place of a pattern that matches nothing."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING

from reknit.errors import did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Matcher = Callable[[str], Callable[[str], object]]
    """Turns a pattern into a function that returns whether a name matches it."""

_SEPARATORS = re.compile(r"([./])")
_MOST_NAMES = 10_000
_MOST_ITEMS = 16
_SHOWN = 3


def of_shell(pattern: str) -> Callable[[str], object]:
    """Return a function that returns whether a name matches a pattern of ``fnmatch``."""
    return lambda name: fnmatchcase(name, pattern)


def suggest(pattern: str, names: Iterable[str], matcher: Matcher = of_shell) -> str:
    """Return a question with a similar pattern that matches, else some of the names; empty without names.

    A pattern is similar if it differs in misspelled parts only, or in an item in front that is missing or
    surplus.
    """
    known = list(dict.fromkeys(islice(names, _MOST_NAMES)))
    for candidate in dict.fromkeys(_candidates(pattern, known)):
        if any(map(matcher(candidate), known)):
            return f"did you mean {candidate!r}?"
    return did_you_mean(pattern, known) or some_of(known)


def some_of(names: Sequence[str]) -> str:
    """Return a list of the first names; empty without names."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the names are {shown}{more}" if shown else ""


def _candidates(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """Yield patterns that are similar to one, the most similar first."""
    parts = dict.fromkeys(part for name in names for part in _SEPARATORS.split(name))
    yield from _respelled(pattern, parts)
    items = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
    others = [f"{item}/{pattern}" for item in islice(items, _MOST_ITEMS)]
    if "/" in pattern:
        others.append(pattern.partition("/")[2])
    yield from others
    for other in others:
        yield from _respelled(other, parts)


def _respelled(pattern: str, parts: dict[str, None]) -> Iterator[str]:
    """Yield a pattern with the nearest of these parts in place of each other literal part."""
    spelled = []
    for part in _SEPARATORS.split(pattern):
        near = (
            [part]
            if not part or part in parts or any(mark in part for mark in "*?[{")
            else nearest(part, parts)
        )
        if not near:
            return
        spelled.append(near[0])
    if (other := "".join(spelled)) != pattern:
        yield other
