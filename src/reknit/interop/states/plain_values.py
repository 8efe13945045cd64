"""Which values does a checkpoint hold, whatever the form in which its format and its layout keep them?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.engine.foreign.optimizer_states import EMPTY
from reknit.frameworks import tree
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

_OPTIONS = ("param_groups", EMPTY)
_READERS = "readers"
"""Entry of a loader's position: the number of readers, which depends on the layout."""


def plain_values(saved: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of the saved values of an item by their paths, without its tensors.

    A stateful object counts as the dict that its record holds.  A loader with a position, here
    and in the checkpoint that this is compared with, has no other values, since those are of one layout.
    """
    paths = {fqn: tuple(part for part in fqn.split("/") if part) for fqn in saved}
    positions = {fqn for fqn, path in paths.items() if path[-1:] == (tree.POSITION,)}
    loaders = [paths[fqn][:-1] for fqn in positions if fqn in beside]
    found: dict[str, Any] = {}
    for fqn, value in saved.items():
        path = paths[fqn]
        if fqn in positions:
            if fqn not in beside:
                continue
            value = {key: one for key, one in value.items() if key != _READERS}
        elif any(path[: len(loader)] == loader for loader in loaders):
            continue
        path = tuple(part for part in path if part != tree.SKELETON)
        found.update(("/".join(at), leaf) for at, leaf in _leaves(value, path))
    return found


def is_note(name: str) -> bool:
    """Return whether this names a note of reknit among an optimizer's options; other formats have none."""
    *_, where, _, last = ("", "", *name.split("/"))
    return where in _OPTIONS and last.startswith("~") and not last[1:2].isdigit()


class Beside(NamedTuple):
    """The names of two checkpoints: `pairs` maps a name in A to that in B, and the others are in one only."""

    pairs: dict[str, str]
    only_a: list[str]
    only_b: list[str]

    @classmethod
    def of(cls, a: Collection[str], b: Collection[str]) -> Beside:
        """Pair the equal names, and then the names that are equal but for the types of their keys."""
        pairs = {name: name for name in a if name in b}
        left = [[name for name in names if name not in pairs] for names in (a, b)]
        one, two = (Counter(map(_untyped, names)) for names in left)
        alike = {_untyped(name): name for name in left[1]}
        for name in left[0]:
            if one[plain := _untyped(name)] == two[plain] == 1:
                pairs[name] = alike[plain]
        there = set(pairs.values())
        return cls(pairs, [n for n in a if n not in pairs], [n for n in b if n not in there])


def topmost(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the shortest beginnings of `names` that none of the `others` has, each once."""
    known = {_untyped(one) for name in others for one in _beginnings(name)}
    return list(
        dict.fromkeys(
            next((one for one in _beginnings(name) if _untyped(one) not in known), name) for name in names
        )
    )


def said_once(found: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the names with the differences; an option that differs alike for several parameters, once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, what in found:
        groups.setdefault((_option(name), what), []).append(name)
    for (_, what), names in groups.items():
        more = len(names) - 1
        yield names[0], f"{what} (and for {more} more parameter{'s'[: more > 1]})" if more else what


def _option(name: str) -> str:
    """Return the name of an option without that of its parameter."""
    parts = name.split("/")
    return "/".join("" if n and parts[n - 1] in _OPTIONS else part for n, part in enumerate(parts))


def _untyped(name: str) -> str:
    """Return a name in which a key of digits is a number, since formats that join keys keep no type."""
    return "/".join(part.removeprefix("~2") for part in name.split("/"))


def _beginnings(name: str) -> Iterator[str]:
    parts = name.split("/")
    yield from ("/".join(parts[:n]) for n in range(1, len(parts) + 1))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if type(value) is dict and value:
        has_notes = len(path) >= 2 and path[-2] in _OPTIONS
        for key, one in value.items():
            yield from _leaves(one, (*path, _element(key, has_notes=has_notes)))
    elif type(value) is list and any(_is_tensor(one) for one in value):
        for number, one in enumerate(value):
            yield from _leaves(one, (*path, str(number)))
    elif not _is_tensor(value):
        yield path, value


def _element(key: Any, *, has_notes: bool) -> str:
    if has_notes and isinstance(key, str) and key.startswith("~"):
        return key
    return tree.escape(key, "a value") if type(key) in (str, int) else repr(key)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tagged) and value.tag == "tensor"
