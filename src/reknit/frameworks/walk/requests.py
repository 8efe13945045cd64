"""The requests of a load: memory to fill, names in the target, and the actions on live objects."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field

from reknit.errors import ReknitError, StateError, known
from reknit.frameworks import tree
from reknit.frameworks.neutral import COMPOSITE, from_neutral, put_array
from reknit.frameworks.numbers import is_number, misfit, same_value
from reknit.frameworks.walk.own_code import cause
from reknit.frameworks.walk.walk import Walk
from reknit.types.dtype import ITEMSIZE, converts
from reknit.types.entry import own_code
from reknit.types.shard import Shard, Tagged, TensorSpec, escaped, full_name
from reknit.types.wanted import matches, reshaping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from reknit.frameworks.walk.walk import Arrays, Place, View, World
    from reknit.types.manifest import Catalog


class Delivery(Struct, frozen=True):
    """An action on the object at a place of the target; `kind` is its type."""

    place: Place
    kind: str
    action: Callable[[], None]

    def run(self, others: str = "") -> None:
        """Run the action.  Raises a `StateError` for an exception of the object's own code.

        `others` states in the error which other objects have been changed.
        """
        try:
            with own_code():
                self.action()
        except ReknitError as error:
            if not error.message.startswith(str(self.place)):  # of a load inside of its own code
                error.message = f"{self.place} ({self.kind}): {error.message}"
            error.message += others
            raise
        except Exception as error:
            raise known(error) or StateError(
                f"{self.place} ({self.kind}) could not be loaded: {cause(error)}{others}",
                remedy="load into an object that takes the saved state, or leave it out of the load with "
                "`items` or LoadOptions(only=...)",
            ) from error


class DeliveryPart(Struct):
    """The memory to fill, its checks and settling actions, and the deliveries; `names` if it is early."""

    names: list[str] = field(default_factory=list)
    filled: list[Any] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    settles: list[Callable[[], None]] = field(default_factory=list)
    actions: list[Delivery] = field(default_factory=list)

    def settle(self, libraries: Iterable[Arrays]) -> None:
        """Pass the filled memory to the libraries, check it, and copy it to its place."""
        for library in libraries:
            library.changed(self.filled)
        for action in (*self.checks, *self.settles):
            action()

    def run(self) -> None:
        """Run all actions."""
        for delivery in self.actions:
            delivery.run()

    def run_each(self, num_ranks: int) -> None:
        """Run all actions; an error names the objects that were loaded, which cannot be undone."""
        others = "" if num_ranks == 1 else "; other ranks may have loaded their objects"
        loaded: list[str] = []
        for delivery in self.actions:
            before = f"; loaded before it: {', '.join(loaded)}" if loaded else ""
            delivery.run(f"; its code may have changed it before that{before}{others}")
            loaded.append(str(delivery.place))


_CONTENT = "value"
"""The key under which other programs save the content of a box, such as a variable of Flax."""


class FoundValue(Struct, frozen=True):
    """A saved value, or the reason `why` this rank has none."""

    value: Any
    why: str | None = None


class _Divided(dict[Any, Any]):
    """A container whose contents are entries of their own."""

    def put(self, keys: Sequence[Any], leaf: Any) -> None:
        """Put a leaf into nested containers, unless another leaf stands for the whole of one."""
        into: Any = self
        for key in keys[:-1]:
            into = into.setdefault(key, _Divided())
            if type(into) is not _Divided:
                return
        into[keys[-1]] = leaf

    def like(self, present: Any) -> Any:
        """Return plain containers; keys that count from 0 are those of a list, unless `present` is a dict."""
        if self.keys() == set(range(len(self))) and not isinstance(present, Mapping):
            held = present if isinstance(present, (list, tuple)) else []
            inner = [_like(self[at], held[at] if at < len(held) else None) for at in range(len(self))]
            return tree.retuple(held, inner) if isinstance(held, tuple) else inner
        inside = present if isinstance(present, Mapping) else {}
        return {key: _like(one, inside.get(key)) for key, one in self.items()}


def _like(one: Any, present: Any) -> Any:
    return one.like(present) if type(one) is _Divided else one


class RankCatalog:
    """The catalog of a checkpoint as one rank sees it."""

    def __init__(self, catalog: Catalog, world: World) -> None:
        self._catalog, self._world = catalog, world
        self._own: dict[tuple[str, frozenset[tuple[str, int]]], Mapping[str, Any]] = {}
        self._num_saved: dict[str, int] = {}
        self._nones: dict[str, dict[str, set[tuple[str, str]]]] = {}
        self._held: dict[str, set[str]] = {}

    def children(self, place: Place, keys: Sequence[str | int]) -> list[Place]:
        """Return the places of the contents of a container under these keys.

        Where keys were saved as texts, an integer has the place of its text, if only that was saved.
        """
        if self._catalog.keys_as_text:
            return [self._saved_as_text(place, key) for key in keys]
        item, below = place.item, f"{place.fqn}/" if place.fqn else ""
        kind = type(place)
        return [
            kind(item, below + (escaped(key) if type(key) is str else tree.escape(key, place)))
            for key in keys
        ]

    def _saved_as_text(self, place: Place, key: str | int) -> Place:
        at, text = place.child(key), place.child(str(key))
        return text if not self._holds(at) and self._holds(text) else at

    def inside(self, place: Place) -> Place:
        """Return the place of the content of a box, which has no name but where keys were saved as texts."""
        inner = place.child(_CONTENT)
        return inner if self._catalog.keys_as_text and self._holds(inner) else place

    def _holds(self, place: Place) -> bool:
        """Return whether ranks shared an entry at this place or below."""
        if place.item not in self._held:
            held = self._held[place.item] = set[str]()
            for names in (self._catalog.tensors, self._catalog.blobs):
                for fqn in names.get(place.item, {}):
                    while fqn and fqn not in held:
                        held.add(fqn)
                        fqn = fqn.rpartition("/")[0]
        return place.fqn in self._held[place.item]

    def spec(self, place: Place) -> TensorSpec | None:
        """Return the spec of the tensor that was saved here for this rank, or None."""
        shared = self._catalog.tensors.get(place.item, {}).get(place.fqn)
        if shared is not None:
            return shared
        kept = self.kept(place)
        return None if kept is None else TensorSpec(kept.shape, kept.dtype.name)

    def has_tensor(self, place: Place) -> bool:
        """Return whether a tensor was saved here for this rank, composite or with memory of its own."""
        value = self.look_up(place).value if self.spec(place) is None else None
        return self.spec(place) is not None or (isinstance(value, Tagged) and value.tag == COMPOSITE)

    def kept(self, place: Place) -> NDArray[Any] | None:
        """Return the tensor that this rank saved as its own, as ranks do if their copies differ."""
        if self.ranks_saved(place.item) != self._world.size:
            return None
        value = self.own(place.item, {"rank": self._world.rank}).get(place.fqn)
        return value if isinstance(value, np.ndarray) and value.dtype.name in ITEMSIZE else None

    def look_up(self, place: Place, *, give: bool = False) -> FoundValue:
        """Return a saved value, without a request for it, or `give` the value itself to the only request."""
        shared = self._catalog.blobs.get(place.item, {})
        if place.fqn in shared:
            return FoundValue(from_neutral(shared[place.fqn], given=give))
        saved = self.ranks_saved(place.item)
        mine = self.own(place.item, {"rank": self._world.rank}) if saved == self._world.size else {}
        if place.fqn in mine:
            return FoundValue(from_neutral(mine[place.fqn], given=give))
        return FoundValue(None, self.differed(place) or "the checkpoint does not have it")

    def is_same(self, place: Place, other: Place) -> bool:
        """Return whether all ranks shared one value for two places, which its reader recognised as one."""
        shared, same = (self._catalog.blobs.get(one.item, {}).get(one.fqn) for one in (place, other))
        return shared is same and type(shared) is dict

    def differed(self, place: Place) -> str | None:
        """Return the error text for a value that differed between ranks and that this rank does not have."""
        saved = self.ranks_saved(place.item)
        ranks = {0, min(self._world.rank, saved - 1)} if saved else ()
        if not any(place.fqn in self.own(place.item, {"rank": rank}) for rank in ranks):
            return None
        if saved == self._world.size:
            return "it differed between the ranks that saved it, and this rank was not one of them"
        return (
            f"it differed between the {saved} ranks that saved it, and this job has {self._world.size}; "
            "wrap it in PerRank to declare that each rank has its own"
        )

    def lack(self, place: Place) -> str | None:
        """Return the error text if ranks differed here, or if this place or one around it is None."""
        if (why := self.differed(place)) is not None:
            return why
        shared, fqn = self._catalog.blobs.get(place.item, {}), place.fqn
        while fqn not in shared and fqn:
            fqn = fqn.rpartition("/")[0]
        if fqn not in shared or shared[fqn] is not None:
            return None
        what = "it" if fqn == place.fqn else f"{type(place)(place.item, fqn)}"
        return f"{what} is None in the checkpoint"

    def nones_in(self, place: Place) -> set[tuple[str, str]]:
        """Return (item, fqn) of each None that all ranks saved directly below a place."""
        if place.item not in self._nones:
            found = self._nones[place.item] = defaultdict(set)
            for fqn, value in self._catalog.blobs.get(place.item, {}).items():
                if value is None and fqn:
                    found[fqn.rpartition("/")[0]].add((place.item, fqn))
        return self._nones[place.item].get(place.fqn, set())

    def lacks(self, place: Place) -> bool:
        """Return whether no rank saved a value here, shared or its own."""
        return self.look_up(place).why is not None and self.differed(place) is None

    def is_divided(self, place: Place) -> bool:
        """Return whether the checkpoint has entries inside this place, and none for the place itself."""
        shared, tensors = (by.get(place.item, {}) for by in (self._catalog.blobs, self._catalog.tensors))
        below = f"{place.fqn}/" if place.fqn else ""
        return place.fqn not in shared and any(fqn.startswith(below) for fqn in (*tensors, *shared))

    def by_keys(self, place: Place, fill: Callable[[Place, str], Any], present: Any) -> Any:
        """Return a value that was saved by its keys, as a plain dict is, in containers like `present` ones.

        `fill` returns the leaf for each saved name.
        """
        leaves = {name: fill(place.below(name), name) for name in self._names_at(place)}
        if "" in leaves:
            return leaves[""]
        made = _Divided()
        for name, leaf in leaves.items():
            made.put([tree.unescape(part) for part in name.split("/")], leaf)
        return made.like(present)

    def is_by_keys(self, place: Place) -> bool:
        """Return whether all ranks have a value here that was saved by its keys, and not as one record."""
        names = self._names_at(place)
        return bool(names) and tree.SKELETON not in names and self.lacks(place.below(tree.SKELETON))

    def _names_at(self, place: Place) -> list[str]:
        """Return the names of the shared entries at and below a place, without its own name."""
        shared, tensors = (by.get(place.item, {}) for by in (self._catalog.blobs, self._catalog.tensors))
        below = f"{place.fqn}/" if place.fqn else ""
        inside = [fqn.removeprefix(below) for fqn in (*shared, *tensors) if fqn.startswith(below)]
        if below:
            inside += [""] * (place.fqn in shared or place.fqn in tensors)
        return list(dict.fromkeys(inside))

    def tensors_below(self, place: Place) -> list[Place]:
        """Return the places of all shared tensors that were saved below a place."""
        below = f"{place.fqn}/" if place.fqn else ""
        saved = self._catalog.tensors.get(place.item, {})
        return [type(place)(place.item, fqn) for fqn in saved if fqn.startswith(below)]

    def ranks_saved(self, item: str) -> int:
        """Return the number of ranks that saved values of their own in an item, by their plain number."""
        if item not in self._num_saved:
            places = self._catalog.coordinates.get(item, ())
            self._num_saved[item] = sum(place.keys() == {"rank"} for place in places)
        return self._num_saved[item]

    def own(self, item: str, coordinate: Mapping[str, int]) -> Mapping[str, Any]:
        """Return the values that the rank at a coordinate saved, by fqn; empty if it saved none."""
        key = (item, frozenset(coordinate.items()))
        if key not in self._own:
            saved = coordinate in [dict(place) for place in self._catalog.coordinates.get(item, ())]
            self._own[key] = self._catalog.own(item, coordinate) if saved else {}
        return self._own[key]

    def value_names(self, item: str) -> list[str]:
        """Return the fqns of all saved values that this rank should request.

        Values that differed between ranks are included if no rank can take them: the request reports that.
        """
        places = [{"rank": self._world.rank}]
        if self.ranks_saved(item) != self._world.size:
            saved = (dict(place) for place in self._catalog.coordinates.get(item, ()))
            places += [place for place in saved if place.keys() == {"rank"}][:1]
        names = dict.fromkeys(self._catalog.blobs.get(item, {}))
        for place in places:
            names.update(dict.fromkeys(self.own(item, place)))
        return list(names)


def found_by_keys(place: Place, present: Any, loading: Any) -> FoundValue:
    """Request a state that was saved by its keys, as other programs do, in the form of a record.

    The `present` state of the object, or None, decides between lists and dicts.
    """
    held = {} if present is None else loading.tensors_of(present, place)
    whys: list[str] = []

    def fill(at: Place, name: str) -> Any:
        if loading.saved.has_tensor(at):
            arrays = loading.arrays(held[name]) if name in held else None
            library = arrays.library if arrays is not None else "torch" if "torch" in sys.modules else "numpy"
            return Tagged("tensor", {"library": library, "path": name})
        found = loading.value(at)
        whys.extend([] if found.why is None else [found.why])
        return found.value

    state = loading.saved.by_keys(place, fill, present)
    return FoundValue(state, whys[0] if whys else None)


class Selecting(Walk, kw_only=True, eq=False):
    """A walk over the target of a load, with the terms of the load and the contents saved for this rank.

    `idle` are the patterns of the terms that no name has matched yet.
    """

    catalog: Catalog
    saved: RankCatalog
    idle: tuple[str, ...]

    def takes(self, place: Place) -> bool:
        """Return whether to load this name; if not, the target stays as it is."""
        terms = self.catalog.terms
        if not (terms.only or self.idle):
            return True
        name = full_name(place.item, place.fqn)
        if self.idle:
            self.idle = tuple(pattern for pattern in self.idle if not fnmatchcase(name, pattern))
        return terms.takes(name)

    def may_take_below(self, place: Place) -> bool:
        """Return whether a pattern of names to load may match some name below a place."""
        below = full_name(place.item, place.fqn).rstrip("/") + "/"
        literal = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in self.catalog.terms.only]
        return any(below.startswith(start) or start.startswith(below) for start in literal)

    def names(self, place: Place) -> bool:
        """Return whether a pattern of `strict` names a place, so that the caller may want it left out."""
        return matches(full_name(place.item, place.fqn), self.catalog.terms.watched)

    def may_resize(self, place: Place) -> bool:
        """Return whether a tensor with this name may have another shape in the checkpoint."""
        patterns = self.catalog.terms.resizable
        return bool(patterns) and matches(full_name(place.item, place.fqn), patterns)

    def comes(self, place: Place, spec: TensorSpec) -> bool:
        """Return whether the load fills a tensor with this name, as a whole or, if resized, in part."""
        saved = self.saved.spec(place)
        if saved is None or self.is_kept(place):
            return saved == spec
        alike = len(saved.shape) == len(spec.shape) and self.may_resize(place)
        return (alike or saved.shape == spec.shape) and self.converts_to(saved, spec)

    def converts_to(self, saved: TensorSpec, wanted: TensorSpec) -> bool:
        """Return whether a tensor saved in one dtype may be loaded into another."""
        return saved.dtype == wanted.dtype or (
            self.catalog.terms.cast and converts(saved.dtype, wanted.dtype)
        )

    def is_kept(self, place: Place) -> bool:
        """Return whether the checkpoint stores a tensor for each rank separately."""
        return place.fqn not in self.catalog.tensors.get(place.item, {})


class FoundNumber(Struct, frozen=True):
    """A number that was saved under names of a tensor, and the reason why it does not fit, or None."""

    places: list[Place]
    value: Any
    why: str | None


class FillRequest(Struct):
    """Memory to fill, with all its names in the target; with `resize`, also from another shape.

    If the checkpoint has none of these names, the load uses the first in `instead` that it has.  `early`
    memory is filled before live memory.
    """

    view: View
    tensor: Any
    resize: bool = False
    early: bool = False
    places: list[Place] = field(default_factory=list)
    instead: list[Place] = field(default_factory=list)

    def shards(self, place: Place) -> list[Shard]:
        """Return the parts of the tensor that this rank requests at a place."""
        view = self.view
        return [
            Shard(place.item, place.fqn, view.spec, box, view.replicas, memory=memory)
            for box, memory in view.parts
        ]

    def memories(self) -> list[tuple[Place, Any]]:
        """Return all memory that is written when this is filled, also from a copy in another byte order."""
        held = [memory for _, memory in self.view.parts]
        held += [self.tensor] if isinstance(self.tensor, np.ndarray) else []
        return [(self.places[0], memory) for memory in held]

    def wrong_shape(self, saved: TensorSpec) -> str | None:
        """Return why the memory cannot take a tensor of the saved shape, or None."""
        here = self.view.spec.shape
        alike = len(saved.shape) == len(here)
        if saved.shape == here or (self.resize and alike):
            return None
        why = f"its shape is {list(saved.shape)} in the checkpoint and {list(here)} here"
        if self.resize:
            return f"{why}; the number of dimensions may not differ"
        return why + reshaping(here) if alike else why

    def number(self, saved: RankCatalog, *, cast: bool) -> FoundNumber | None:
        """Return the number that was saved in the place of this tensor; None if the tensor has dimensions."""
        if self.view.spec.shape:
            return None
        values = {place: saved.look_up(place).value for place in self.places}
        places = [place for place, value in values.items() if is_number(value)]
        if not places:
            return None
        number = values[places[0]]
        why = misfit(number, self.view.spec.dtype, cast=cast)
        for other in places[1:]:
            if not same_value(number, values[other]):
                why = f"{other}, which is the same tensor here, is another number in the checkpoint"
        return FoundNumber(places, number, why)

    def fills(self, array: NDArray[Any]) -> list[Callable[[], None]]:
        """Return actions that fill the memory from an array of the whole tensor, and settle it."""

        def fill() -> None:
            for shard in self.shards(self.places[0]):
                put_array(np.asarray(array[shard.box.slices()]), shard.data)

        return [fill] if self.view.settle is None else [fill, self.view.settle]
