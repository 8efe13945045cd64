"""The pass over a state to save: the shards, values and aliases that this rank holds."""

from __future__ import annotations

from collections import defaultdict
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import field, structs

from reknit.errors import ReknitError, StateError
from reknit.frameworks.walk.own_code import failed_save
from reknit.frameworks.walk.walk import Matcher, Place, Walk, first_match
from reknit.types.box import Box
from reknit.types.shard import MAX_NDIM, Alias, Blob, Holdings, Shard, Witness

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from reknit.frameworks.walk.walk import Composite, Replicas, View
    from reknit.types.devices import Barrier
    from reknit.types.shard import HostRuns, TensorSpec


class SaveAdapter(Matcher, Protocol):
    """The part of an `Adapter` that a save needs."""

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """See `Adapter.collect`."""


class Saving(Walk, eq=False):
    """The results of a walk over a state to save."""

    adapters: tuple[SaveAdapter, ...]
    shards: list[Shard] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    witnesses: list[Witness] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    _first: dict[str, dict[Hashable, str]] = field(default_factory=lambda: defaultdict(dict))

    def visit(self, value: Any, place: Place) -> None:
        """Collect a value of any kind."""
        try:
            first_match(self.adapters, value).collect(value, place, self)
        except ReknitError:
            raise
        except Exception as error:  # of a `state_dict`, a hook, an iterator: of any code of the value
            raise failed_save(error, value, place) from error

    def tensor(
        self, tensor: Any, place: Place, replicas: Replicas | EllipsisType = ..., *, frozen: bool = False
    ) -> None:
        """Collect a tensor; `replicas` and `frozen`, as in a `Shard`, are facts that the tensor lacks."""
        if (made := self.opened(tensor, place)) is not None:
            self.composite(made, place, tensor, replicas, frozen=frozen)
            return
        view = self.look(tensor, place, fill=False)
        if not isinstance(replicas, EllipsisType):
            view = structs.replace(view, replicas=replicas, holders=None)
        self.view(view, place, tensor, frozen=frozen)

    def view(self, view: View, place: Place, tensor: Any, *, frozen: bool = False) -> None:
        """Collect a tensor by its view."""
        if not self.claim(view.memory, place, tensor):
            return
        item, fqn = place.item, place.fqn
        if len(view.spec.shape) > MAX_NDIM:
            raise StateError(
                f"{place} has {len(view.spec.shape)} dimensions; {MAX_NDIM} is the limit",
                remedy="save it in a shape with fewer, for example .flatten()",
            )
        holders = view.holders or (view.replicas,) * len(view.parts)
        for (box, memory), replicas in zip(view.parts, holders, strict=True):
            self.shards.append(Shard(item, fqn, view.spec, box, replicas, memory=memory, frozen=frozen))

    def composite(
        self,
        made: Composite,
        place: Place,
        tensor: Any,
        replicas: Replicas | EllipsisType = ...,
        *,
        frozen: bool = False,
    ) -> None:
        """Collect a composite tensor: its record, and each of its inner tensors below its name."""
        if not self.claim_name(place, made.memory if made.inner else id(tensor), tensor):
            return
        self.blobs.append(Blob(place.item, place.fqn, made.value))
        for name, inner, view in made.inner:
            if not isinstance(replicas, EllipsisType):
                view = structs.replace(view, replicas=replicas, holders=None)
            self.view(view, place.below(name), inner, frozen=frozen)

    def witness(self, spec: TensorSpec, place: Place, empty: Any) -> None:
        """Record that other ranks hold the saved parts of a tensor; the save fails if none does.

        `empty` is memory without elements, of the tensor's dtype and with as many dimensions.
        """
        nothing = Box((0,) * len(spec.shape), tuple(empty.shape))
        self.shards.append(Shard(place.item, place.fqn, spec, nothing, (), memory=empty))

    def claim(self, memory: Hashable, place: Place, tensor: Any) -> bool:
        """Take a name for memory; return whether it is the first name, and record another one as an alias."""
        if not self.claim_name(place, memory, tensor):
            return False
        first = self._first[place.item].setdefault(memory, place.fqn)
        if first == place.fqn:
            return True
        self.aliases.append(Alias(place.item, place.fqn, first))
        return False

    def blob(self, value: Any, place: Place, coordinate: Mapping[str, int] | None = None) -> None:
        """Collect a neutral value."""
        self.claim_name(place, object(), value)
        self.blobs.append(Blob(place.item, place.fqn, value, coordinate))

    def blob_elsewhere(self, place: Place, coordinate: Mapping[str, int] | None = None) -> None:
        """Record that another rank has the saved copy of a value; the save fails if none does."""
        self.witnesses.append(Witness(place.item, place.fqn, coordinate))

    def walk(self) -> Holdings:
        """Walk through the state, and return all its contents on this rank."""
        for item, value in self.state.items():
            self.visit(value, Place(item))
        return self.holdings()

    def holdings(self, known: dict[Hashable, Any] | None = None, runs: HostRuns | None = None) -> Holdings:
        """Return all collected contents; `known` are results for the last holdings, if they were alike."""
        return Holdings(
            tuple(self.state),
            tuple(self.shards),
            tuple(self.blobs),
            tuple(self.aliases),
            tuple(self.witnesses),
            barriers=tuple(dict.fromkeys(self.barriers)),
            coordinate=self.world.coordinate,
            runs=runs,
            known={} if known is None else known,
        )
