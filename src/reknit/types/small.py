"""Small values that all packages share: containers, ranges of ranks in words, lazy properties.

Decoders for types, which one thread at a time makes.

msgspec resolves the annotations of a type at its first use.  If two threads do that at once for types that
share a part, the process ends by a signal (seen with msgspec 0.22.0).
"""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, overload

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


if TYPE_CHECKING:
    lazy_property = cached_property
else:

    class lazy_property(cached_property):
        """Compute the value of a property at its first use, and keep it.

        `cached_property` of Python 3.11 and before has one lock for a property of all instances.  A process
        that is forked while a thread computes the value would wait for that lock forever.  Here two threads
        may both compute the value, and the last one is kept.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            """Return the value; the next use finds it in the instance itself."""
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value


_PER_HOLE = 8
"""Gaps are named if the number of ranks is at least so many times the number of gaps."""


class _NumberRange(Struct, frozen=True):
    """The numbers from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low + 1

    def __str__(self) -> str:
        return f"{self.low:,}" if self.size == 1 else f"{self.low:,}-{self.high:,}"


def spelled(ranks: Iterable[int], limit: int = 16) -> str:
    """Return the ranks as text, with neighbours joined: ``rank 3``, ``ranks 0-4, 7``.

    If few ranks between the first and the last are missing, these are named: ``ranks 0-8,999 except 17``.  At
    most `limit` ranges are named.
    """
    return named(ranks, "rank", limit)


def named(numbers: Iterable[int], noun: str, limit: int = 16) -> str:
    """Return numbers as text with a `noun`, as `spelled` does with ranks."""
    ranges = _ranges_of(numbers)
    if not ranges:
        return f"no {noun}"
    if len(ranges) == 1 and ranges[0].size == 1:
        return f"{noun} {ranges[0]}"
    holes = [_NumberRange(before.high + 1, after.low - 1) for before, after in pairwise(ranges)]
    if 0 < len(holes) <= limit and _PER_HOLE * _num(holes) <= _num(ranges):
        return f"{noun}s {_NumberRange(ranges[0].low, ranges[-1].high)} except {', '.join(map(str, holes))}"
    rest = _num(ranges[limit:])
    return f"{noun}s {', '.join(map(str, ranges[:limit]))}" + (f" and {rest:,} more" if rest else "")


def _ranges_of(numbers: Iterable[int]) -> list[_NumberRange]:
    """Return the ranges of consecutive numbers, in order."""
    ranges: list[_NumberRange] = []
    for number in sorted(set(numbers)):
        low = ranges.pop().low if ranges and number == ranges[-1].high + 1 else number
        ranges.append(_NumberRange(low, number))
    return ranges


def _num(ranges: Iterable[_NumberRange]) -> int:
    return sum(each.size for each in ranges)


class Unread(NamedTuple):
    """An entry of another program's checkpoint that reknit cannot read, and the reason.

    Names below `fqn` belong to it as well; without an `fqn` it is the whole item.  With `is_damage`, the
    other program cannot read it either.
    """

    item: str
    fqn: str
    why: str
    is_damage: bool = False

    @property
    def name(self) -> str:
        """Its name in messages to users."""
        return f"{self.item}/{self.fqn}" if self.fqn else self.item

    def covers(self, name: str) -> bool:
        """Return whether a name in messages to users belongs to this entry."""
        return f"{name}/".startswith(f"{self.name}/")


class OtherFormat(NamedTuple):
    """The format of a checkpoint of another program, which is read in place.

    `is_file` is whether the checkpoint is one file, which lies in the folder above.  `unchecked` says which
    checks of its bytes are not possible, and names the entries that are `unread`.  `notes` has a sentence for
    each file that does not belong to the opened checkpoint though it lies there, such as an older model in
    the same folder.
    """

    kind: str
    is_file: bool
    unchecked: str
    unread: tuple[Unread, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


class Foreign(NamedTuple):
    """Files that another program saved: their kind, and a way to read them.

    `kind` is a short name of the format, empty for unknown files.  `is_file` is whether the path is that of
    a file, and not of a folder.
    """

    what: str
    remedy: str
    kind: str = ""
    is_file: bool = False


T = TypeVar("T")

_made: dict[tuple[Any, bool], Callable[[Any], Any]] = {}


_making = threading.Lock()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


@overload
def decoder(kind: type[T], *, json: bool = ...) -> Callable[[Any], T]: ...
@overload
def decoder(kind: Any, *, json: bool = ...) -> Callable[[Any], Any]: ...
def decoder(kind: Any, *, json: bool = False) -> Callable[[Any], Any]:
    """Return the function that decodes MessagePack, or JSON, as a type, with the errors of msgspec."""
    found = _made.get((kind, json))
    if found is None:
        with _making:
            made: Any = msgspec.json.Decoder(kind) if json else msgspec.msgpack.Decoder(kind)
        found = _made[kind, json] = made.decode
    return found


def converted(value: Any, kind: type[T]) -> T:
    """Return plain values as a type.  Raises `msgspec.ValidationError`."""
    with _making:
        return msgspec.convert(value, kind)


NAMESPACES: Final = frozenset({Namespace, SimpleNamespace})
REBUILT: Final = NAMESPACES | {dict, list, tuple, deque, OrderedDict, defaultdict, Counter}
"""Types that can be built again from their values; a subclass may have further state."""


def rebuilt(value: Any, child: Callable[[Any, Any], Any]) -> Any:
    """Return a container of the same type, one of `REBUILT`, with `child(key, value)` for each value in it.

    Attributes of a mapping are copied.
    """
    kind = type(value)
    if kind in NAMESPACES:
        made = kind()
        vars(made).update({name: child(name, inner) for name, inner in vars(value).items()})
        return made
    if issubclass(kind, dict):
        pairs = {key: child(key, inner) for key, inner in value.items()}
        if kind is dict:
            return pairs
        if kind is defaultdict:
            return defaultdict(value.default_factory, pairs)
        made = kind(pairs)
        vars(made).update(vars(value))  # such as the versions that torch's modules store beside their state
        return made
    inner = [child(index, inner) for index, inner in enumerate(value)]
    return deque(inner, value.maxlen) if kind is deque else kind(inner)
