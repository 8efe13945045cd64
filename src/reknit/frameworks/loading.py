"""What does a walk through the target gather to load?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.frameworks.base import Wanted
from reknit.frameworks.neutral import from_neutral
from reknit.frameworks.walk import Walk
from reknit.types.manifest import Catalog
from reknit.types.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from reknit.frameworks.walk import Assign, Place, View
    from reknit.types.shard import TensorSpec

Entry = tuple[str, str]
Remark = tuple[str, str, str]


class Found(NamedTuple):
    """A saved value, or `why` there is none for this rank."""

    value: Any
    why: str | None = None


@dataclass
class _Request:
    """Memory to fill, under all the names that the target has for it."""

    view: View
    places: list[Place] = field(default_factory=list)


@dataclass
class Loading(Walk):
    """What a walk gathers to load."""

    catalog: Catalog = field(default_factory=lambda: Catalog((), {}, {}, {}, lambda *_: {}))
    blobs: list[Entry] = field(default_factory=list)
    taken_back: list[Entry] = field(default_factory=list)
    missing: list[Remark] = field(default_factory=list)
    mismatched: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    _actions: list[Callable[[], None]] = field(default_factory=list)
    _requests: dict[Hashable, _Request] = field(default_factory=dict)
    _own: dict[tuple[str, frozenset[tuple[str, int]]], Mapping[str, Any]] = field(default_factory=dict)

    def visit(self, value: Any, place: Place, assign: Assign) -> None:
        """Ask for what a value needs, whatever it is."""
        self.adapter(value).wanted(value, place, self, assign)

    def later(self, action: Callable[[], None]) -> None:
        """Run `action` once every byte has arrived, in the order of these calls."""
        self._actions.append(action)

    def spec(self, place: Place) -> TensorSpec | None:
        """Return the spec of the tensor that was saved here, if one was."""
        return self.catalog.tensors.get(place.item, {}).get(place.fqn)

    def tensor(self, tensor: Any, place: Place) -> None:
        """Ask for a tensor, to be filled in place."""
        self.view(self.look(tensor, place, fill=True), place, tensor)

    def view(self, view: View, place: Place, tensor: Any) -> None:
        """Ask for a tensor that was looked at already."""
        if self.claim_name(place, ("tensor", view.memory), tensor):
            request = self._requests.setdefault((place.item, view.memory), _Request(view))
            request.places.append(place)

    def value(self, place: Place) -> Found:
        """Ask for a saved value; its absence is recorded."""
        self.claim_name(place, ("value", object()), None)
        found = self.look_up(place)
        if found.why is not None:
            self.report_missing(place, found.why)
        elif place.fqn in self.catalog.blobs.get(place.item, {}):
            self.blobs.append((place.item, place.fqn))
        else:
            self.taken_back.append((place.item, place.fqn))
        return found

    def look_up(self, place: Place) -> Found:
        """Look a saved value up, without asking for it."""
        shared = self.catalog.blobs.get(place.item, {})
        if place.fqn in shared:
            return Found(from_neutral(shared[place.fqn]))
        saved = self.ranks_saved(place.item)
        mine = self.own(place.item, {"rank": self.world.rank}) if self.world.rank < saved else {}
        if saved == self.world.size and place.fqn in mine:
            return Found(from_neutral(mine[place.fqn]))
        if place.fqn in mine or (saved and place.fqn in self.own(place.item, {"rank": 0})):
            return Found(None, self._differed(saved))
        return Found(None, "the checkpoint does not have it")

    def _differed(self, saved: int) -> str:
        return (
            f"it differed between the {saved} ranks that saved it, and this job has {self.world.size}; "
            "wrap it in PerRank to declare that each rank has its own"
        )

    def ranks_saved(self, item: str) -> int:
        """Return how many ranks saved values of their own in an item, by their plain number."""
        return sum(saved.keys() == {"rank"} for saved in self.catalog.coordinates.get(item, ()))

    def own(self, item: str, coordinate: Mapping[str, int]) -> Mapping[str, Any]:
        """Return the values that the rank at a coordinate saved, by fqn; empty if none did."""
        if coordinate not in [dict(saved) for saved in self.catalog.coordinates.get(item, ())]:
            return {}
        key = (item, frozenset(coordinate.items()))
        if key not in self._own:
            self._own[key] = self.catalog.own(item, coordinate)
        return self._own[key]

    def value_names(self, item: str) -> list[str]:
        """Return the fqns of all saved values that this rank should ask for.

        Those that differed between ranks are among them where no rank can take them: asking tells of that.
        """
        places = [{"rank": self.world.rank}]
        if self.ranks_saved(item) != self.world.size:
            saved = (dict(place) for place in self.catalog.coordinates.get(item, ()))
            places += [place for place in saved if place.keys() == {"rank"}][:1]
        names = dict.fromkeys(self.catalog.blobs.get(item, {}))
        for place in places:
            names.update(dict.fromkeys(self.own(item, place)))
        return list(names)

    def report_missing(self, place: Place, why: str) -> None:
        """Record that the target needs what the checkpoint does not have."""
        kind = None
        if self.spec(place) is not None:
            kind = "a tensor was saved under this name, and the target has a plain value"
        elif place.fqn in self.catalog.blobs.get(place.item, {}):
            kind = "a plain value was saved under this name, and the target has a tensor"
        if kind:
            self.report_mismatched(place, kind)
        else:
            self.missing.append((place.item, place.fqn, why))

    def report_mismatched(self, place: Place, why: str) -> None:
        """Record that the checkpoint has something in a form that the target cannot take."""
        self.mismatched.append((place.item, place.fqn, why))

    def note(self, place: Place, what: str) -> None:
        """Record what is left as it is by design."""
        self.notes.append((place.item, place.fqn, what))

    def wanted(self) -> Wanted:
        """Return all that was asked for."""
        shards: list[Shard] = []
        aliases: list[Remark] = []
        for request in self._requests.values():
            self._settle(request, shards, aliases)
        return Wanted(
            tuple(self.state),
            tuple(shards),
            tuple(aliases),
            tuple(self.blobs),
            tuple(self.missing),
            tuple(self.mismatched),
            tuple(self.notes),
            tuple(self.taken_back),
            self._deliver,
        )

    def _settle(self, request: _Request, shards: list[Shard], aliases: list[Remark]) -> None:
        """Take a tied tensor under the first of its names that the checkpoint has."""
        saved = [place for place in request.places if self.spec(place) is not None]
        if not saved:
            self.report_missing(request.places[0], "the checkpoint does not have it")
            return
        place, view = saved[0], request.view
        spec = self.spec(place)
        if spec is not None and tuple(spec.shape) != view.spec.shape:
            why = f"its shape is {list(spec.shape)} in the checkpoint and {list(view.spec.shape)} here"
            self.report_mismatched(place, why)
            return
        aliases += [(other.item, other.fqn, place.fqn) for other in saved[1:]]
        shards += [
            Shard(place.item, place.fqn, view.spec, box, view.replicas, data) for box, data in view.parts
        ]
        if view.settle is not None:
            self._actions.insert(0, view.settle)

    def _deliver(self) -> None:
        for action in self._actions:
            action()
