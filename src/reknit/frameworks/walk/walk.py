"""A pass over a state, and its nouns: the ranks of the job, places, views of tensors."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

from msgspec import Struct, field

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.neutral import COMPOSITE
from reknit.types.shard import MAX_DEPTH, Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator

    from reknit.plugins import Framework
    from reknit.types.box import Box
    from reknit.types.shard import TensorSpec

T = TypeVar("T")
Replicas: TypeAlias = "tuple[int, ...] | None"
Assign: TypeAlias = "Callable[[Any], None] | None"


class World(Struct, frozen=True, eq=False):
    """The ranks that save or load together: this one, their number, and their numbers in the whole job.

    `memo` keeps results of adapters for as long as one pass over the state lasts, `coordinate` this rank's
    place in the parallel grid.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    memo: dict[Any, Any] = {}
    coordinate: dict[str, int] = {}

    @property
    def global_rank(self) -> int:
        """This rank's number in the whole job."""
        return self.ranks[self.rank]

    @property
    def alone(self) -> Replicas:
        """Replicas of a tensor with unrecorded copies: this rank if it is the only one, else None."""
        return (0,) if self.size == 1 else None

    def once(self, key: Hashable, make: Callable[[], T], *keep: Any) -> T:
        """Return the result of the first call of `make` for this key.

        `keep` stays alive as long, so that no other objects get the ids of these objects in the key.
        """
        known = self.memo.get(key)
        if known is None:
            known = self.memo[key] = (make(), keep)
        found: T = known[0]
        return found

    def inside(self, ranks: Collection[int]) -> bool:
        """Return whether these (job-wide) ranks include every rank of this world."""
        return set(self.ranks) <= set(ranks)

    def only_here(self, ranks: Collection[int]) -> Replicas:
        """Return this rank as the only holder of its part, if these (job-wide) ranks hold all other parts."""
        return self.numbers([self.global_rank]) if self.inside(ranks) else self.alone

    def numbers(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the sorted numbers in this world of those (job-wide) ranks that are in it."""
        place = {rank: number for number, rank in enumerate(self.ranks)}
        return tuple(sorted(place[rank] for rank in ranks if rank in place))


class Place(Struct, frozen=True, gc=False):
    """The place of a value: its item, and its name in the item."""

    item: str
    fqn: str = ""

    def child(self, *keys: str | int) -> Place:
        """Return the place below this one that these keys lead to."""
        place = self
        for key in keys:
            place = place.below(tree.escape(key, self))
        return place

    def below(self, relative: str) -> Place:
        """Return the place of an escaped path below this one."""
        fqn = self.fqn
        return Place(self.item, f"{fqn}/{relative}" if fqn and relative else fqn or relative)

    def __str__(self) -> str:
        return tree.join(self.item, self.fqn)


class View(Struct, frozen=True):
    """A tensor as one rank sees it.

    `parts` are boxes and the local memory of each, as a `Shard` has it.  `memory` is equal for two tensors
    that are the same memory in the same form.  `settle` copies a filled part to the tensor's own memory, if
    that cannot be filled byte by byte.  `fresh` is set if the memory is new and empty.  `holders` are the
    replicas of each part, if they differ between parts.
    """

    spec: TensorSpec
    parts: tuple[tuple[Box, Any], ...]
    replicas: Replicas
    memory: Hashable
    settle: Callable[[], None] | None = None
    fresh: bool = False
    holders: tuple[Replicas, ...] | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements that this rank has."""
        return sum(prod(box.lengths) for box, _ in self.parts)


class Composite(Struct, frozen=True):
    """A tensor that consists of inner tensors: its record, and the path, tensor and view of each.

    The record has its `class`, `shape`, `context` (plain values), and `inner`: the names of the tensors
    inside, each with None, or with the record of a composite tensor.  `renew` makes another such tensor, with
    new memory.
    """

    record: dict[str, Any]
    inner: tuple[tuple[str, Any, View], ...]
    renew: Callable[[], Any]

    @property
    def memory(self) -> Hashable:
        """A key that is equal for two tensors that consist of the same memory."""
        return ("composite", self.record["class"], tuple(view.memory for _, _, view in self.inner))

    @property
    def value(self) -> Tagged:
        """The value that is saved under the tensor's own name."""
        return Tagged(COMPOSITE, self.record)


class Arrays(Protocol):
    """One library's tensors."""

    library: str

    def matches(self, value: Any) -> bool:
        """Return whether this is a tensor of this library that can be saved as one."""

    def view(self, tensor: Any, place: Place, world: World, *, fill: bool) -> View:
        """Return the view of a tensor, to `fill` it or only to read it.  Raises `StateError`."""

    def opened(self, tensor: Any, place: Place, world: World, *, fill: bool) -> Composite | None:
        """Return a composite tensor with views of its inner tensors; None for other tensors."""

    def changed(self, memories: Iterable[Any]) -> None:
        """Record that memory was filled, also memory of other libraries."""

    def form(self, tensor: Any) -> TensorSpec | None:
        """Return shape and dtype of a tensor; None for one without a shape."""

    def fresh(self, spec: TensorSpec, like: Any = None) -> Any:
        """Return new memory for a whole tensor, placed and cut like `like` if the shapes are equal."""


class Matcher(Protocol):
    """The part of an adapter that recognises its kind of object, for saves and loads.

    Several objects of a kind that `unites`, in a list, are the parts of one: their names make one set.
    """

    unites: ClassVar[bool] = False

    def matches(self, value: Any) -> bool:
        """Return whether this adapter is for the value."""


class OnMatch:
    """The adapters of a row, which are imported for the first value that the row is for."""

    unites = False

    def __init__(self, row: Framework) -> None:
        self._row = row
        self._made: tuple[Any, ...] | None = None
        self._kinds: tuple[Any, ...] = ()
        for module, _, name in [place.partition(":") for place in row.classes]:
            self._kinds += (getattr(sys.modules.get(module), name, ()),)

    def matches(self, value: Any) -> bool:
        """Return whether one of the adapters matches."""
        return self.first(value) is not None

    def first(self, value: Any) -> Any:
        """Return the first of the adapters that matches, None without one."""
        row = self._row
        found = isinstance(value, self._kinds)
        if row.keys and isinstance(value, dict):
            found = found or value.keys() == row.keys
        for method in row.methods:
            found = found or callable(getattr(value, method, None))
        if found and self._made is None:
            self._made = import_module(row.module).adapters()
        return next((one for one in self._made or () if one.matches(value)), None) if found else None


M = TypeVar("M", bound=Matcher)


def first_match(adapters: Iterable[M], value: Any) -> M:
    """Return the first adapter that matches a value; the last adapter matches any value."""
    for adapter in cast("Iterable[Any]", adapters):
        found = adapter.first(value) if isinstance(adapter, OnMatch) else adapter
        if found is not None and (found is not adapter or found.matches(value)):
            break
    return cast("M", found)


class Walk(Struct, eq=False):
    """One pass over a state, which calls the adapters.  `fills` is set if the pass fills the objects.

    `extensions` are libraries on top of a framework that change its objects.  `beside` are items that the
    pass leaves alone, but whose modules name the parameters of an optimizer.
    """

    fills: ClassVar[bool] = False
    state: Mapping[str, Any]
    world: World
    adapters: tuple[Matcher, ...]
    libraries: tuple[Arrays, ...]
    extensions: tuple[Any, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    _names: dict[str, dict[str, Hashable]] = field(default_factory=lambda: defaultdict(dict))
    _alive: list[Any] = []
    _num_entered: int = 0

    @property
    def memo(self) -> dict[Any, Any]:
        """Results of adapters during this pass."""
        return self.world.memo

    def arrays(self, value: Any) -> Arrays | None:
        """Return the library of a tensor, or None for an object that is not a tensor."""
        for library in self.libraries:
            if library.matches(value):
                return library
        return None

    def library_of(self, tensor: Any, place: Place) -> Arrays:
        """Return the library of a tensor.  Raises `StateError` for an object that is not a tensor."""
        library = self.arrays(tensor)
        if library is None:
            raise StateError(f"{place} is a {type(tensor).__name__} where a tensor was expected")
        return library

    def look(self, tensor: Any, place: Place, *, fill: bool) -> View:
        """Return the view of a tensor."""
        return self.library_of(tensor, place).view(tensor, place, self.world, fill=fill)

    def opened(self, tensor: Any, place: Place) -> Composite | None:
        """Return a composite tensor with views of its inner tensors; None for other objects."""
        library = self.arrays(tensor)
        return None if library is None else library.opened(tensor, place, self.world, fill=self.fills)

    def tensors_in(self, value: Any, place: Place) -> dict[tree.Path, Any]:
        """Return the tensors in a value by their keys, which may be of any type."""
        found: dict[tree.Path, Any] = {}

        def keep(path: tree.Path, leaf: Any) -> Any:
            if self.arrays(leaf) is None:
                return tree.DESCEND
            found[path] = leaf
            return None

        tree.map_leaves(value, keep, place)
        return found

    def tensors_of(self, value: Any, place: Place) -> dict[str, Any]:
        """Return the tensors in a value by the names that they have below its place.

        A tensor under a key that cannot be a name is left out: no saved tensor can belong to it.
        """
        found: dict[str, Any] = {}
        for path, leaf in self.tensors_in(value, place).items():
            with suppress(StateError):
                found[tree.join(*(tree.escape(key, place) for key in path))] = leaf
        return found

    def find(self, kind: type[Any]) -> Iterator[tuple[Any, Place]]:
        """Yield all objects of a type in the state and beside it, in containers, with their places."""
        for item, value in (*self.state.items(), *self.beside.items()):
            yield from self._find(value, kind, Place(item))

    def _find(self, value: Any, kind: type[Any], place: Place) -> Iterator[tuple[Any, Place]]:
        if isinstance(value, kind):
            yield value, place
            return
        if isinstance(value, (Mapping, list, tuple)):
            self.enter(place)
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from self._find(inner, kind, place.child(key))
        elif isinstance(value, (list, tuple)):
            united = bool(value) and all(isinstance(inner, kind) for inner in value)
            for key, inner in tree.children(value):
                yield from self._find(inner, kind, place if united else place.child(key))

    def enter(self, place: Place) -> None:
        """Count a container whose contents are walked.

        Raises `StateError` for a container that is too deep, and for a few containers that contain each other
        without end.
        """
        if place.fqn.count("/") >= MAX_DEPTH:
            raise tree.too_deep(place)
        self._num_entered += 1
        if self._num_entered == tree.COUNTED:
            for item, value in self.state.items():
                tree.require_bounded(value, item)

    def claim_name(self, place: Place, identity: Hashable, keep: Any) -> bool:
        """Take a name for an object; return whether it was free.

        Raises `StateError` if it names another object.  `keep` stays alive as long as the walk, so that
        `identity` (an address) is not used twice.
        """
        self._alive.append(keep)
        names = self._names[place.item]
        known = names.get(place.fqn)
        if known is None:
            names[place.fqn] = identity
            return True
        if known != identity:
            raise StateError(
                f"{place} is the name of two different things",
                remedy="give them different names, for example by putting each under a key of its own",
            )
        return False
