"""The request of a rank for parts of a checkpoint, and how it delivers them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from msgspec import Struct, field

from reknit.errors import did_you_mean, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from reknit.types.shard import Shard

    Matcher = Callable[[str], Callable[[str], object]]
    """Turns a pattern into a function that returns whether a name matches it."""


_SEPARATORS = r"([./])"
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
    parts = dict.fromkeys(part for name in names for part in re.split(_SEPARATORS, name))
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
    for part in re.split(_SEPARATORS, pattern):
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


RESIZE = " (LoadOptions(allow_shape_mismatch=...) takes the common part)"


def reshaping(here: Sequence[int]) -> str:
    """Return the advice about a tensor of a shape that is not the saved one, which has as many dimensions."""
    return RESIZE if prod(here) else ": give it the saved shape first, as it has no place for a value"


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name (`full_name`) matches any of the patterns."""
    return bool(patterns) and any(fnmatchcase(name, pattern) for pattern in patterns)


def selects(name: str, patterns: Sequence[str]) -> bool:
    """Return whether the last pattern that matches a name selects it, and so does not begin with ``!``."""
    last = next((p for p in reversed(patterns) if fnmatchcase(name, p.removeprefix("!"))), "!")
    return not last.startswith("!")


class Terms(Struct, frozen=True):
    """The options of a load that decide which entries are wanted.

    `only` are patterns of the names to load; empty for all.  `resizable` are patterns of tensors that may
    have another shape in the checkpoint.  `cast` is whether another dtype will be converted.  `watched` are
    other patterns that are checked for matches.
    """

    only: tuple[str, ...] = ()
    resizable: tuple[str, ...] = ()
    cast: bool = False
    watched: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Return whether the entry with this name is loaded."""
        return not self.only or matches(name, self.only)


class Wanted(Struct, frozen=True):
    """The parts of a checkpoint that a rank requests, and the functions that deliver them.

    `shards`: as in `Holdings`, but `data` is the writable memory to fill, and `replicas` is not used.
    `aliases`: (item, fqn, item, fqn) of a saved tensor, and of the wanted tensor in its place in the target;
    the two saved tensors must be equal.
    `blobs`: (item, fqn) of saved shared values that this rank takes.
    `own`: (item, fqn) of values that this rank saved for itself and takes back.
    `missing`: (item, fqn, why) of entries that the target needs and the catalog does not have.
    `mismatched`: (item, fqn, why) of entries that the catalog has in a form that the target cannot take.
    `notes`: (item, fqn, note) of entries that are not restored by design, such as a random state after a
    change of the number of ranks.
    `resizable`: (item, fqn) of wanted tensors that take the common part of a saved tensor of another shape.
    `resized`: (name, note) of wanted tensors of another shape whose shards were already adapted to the saved
    shape.
    `unlike`: (item, fqn, dtype) of wanted tensors that the catalog lacks, or has in another dtype than the
    target, which is given.
    `superseded`: (item, fqn) of saved entries that are not needed: another tensor replaces them, or they are
    dropped.
    `labels`: the name of each shard in messages to users, if that differs from its own.
    `idle`: patterns of `Terms`, of any kind, that do not match any name of this rank's target.
    `num_tensors`: number of tensors of the target to load; `num_kept` of them come from values, of `own` or
    `blobs`.
    `coordinate`: as in `Holdings`.
    `early`: names (`full_name`) of wanted tensors in new memory, for objects with a `state_dict`.
    `deliver_early`: called without arguments once these have arrived, before any other memory is filled;
    gives objects their states, and may raise an error.  `has_early` is whether it does anything.
    `deliver`: called without arguments once every byte has arrived; puts values into the live objects.
    Before that, only the memory of `shards` has changed.
    """

    items: tuple[str, ...]
    shards: tuple[Shard, ...] = ()
    aliases: tuple[tuple[str, str, str, str], ...] = ()
    blobs: tuple[tuple[str, str], ...] = ()
    missing: tuple[tuple[str, str, str], ...] = ()
    mismatched: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[tuple[str, str, str], ...] = ()
    own: tuple[tuple[str, str], ...] = ()
    resizable: tuple[tuple[str, str], ...] = ()
    resized: tuple[tuple[str, str], ...] = ()
    unlike: tuple[tuple[str, str, str], ...] = ()
    superseded: tuple[tuple[str, str], ...] = ()
    labels: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    num_tensors: int = 0
    num_kept: int = 0
    coordinate: Mapping[str, int] = field(default_factory=dict)
    early: frozenset[str] = frozenset()
    has_early: bool = False
    deliver_early: Callable[[], None] = field(default=lambda: None)
    deliver: Callable[[], None] = field(default=lambda: None)
