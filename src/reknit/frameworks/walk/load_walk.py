"""The pass over the target of a load: tensors and values to request, and actions after their arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import field

from reknit.errors import ReknitError
from reknit.frameworks.numbers import element
from reknit.frameworks.walk import overlap
from reknit.frameworks.walk.composites import REMEDY, CompositeRequests, record_at
from reknit.frameworks.walk.overlap import require_writable
from reknit.frameworks.walk.own_code import failed_search
from reknit.frameworks.walk.requests import Delivery, DeliveryPart, FillRequest, FoundValue, Selecting
from reknit.frameworks.walk.walk import Matcher, Place, first_match
from reknit.types.shard import Shard, Strided, full_name
from reknit.types.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from reknit.frameworks.walk.walk import Assign, Composite, View
    from reknit.frameworks.walk.walk_cache import TensorSigner
    from reknit.types.shard import TensorSpec

Entry = tuple[str, str]
Remark = tuple[str, str, str]


class LoadAdapter(Matcher, Protocol):
    """The part of an `Adapter` that a load needs."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """See `Adapter.wanted`."""


class Loading(Selecting, eq=False):
    """A walk over the target that collects the requests of a load."""

    adapters: tuple[LoadAdapter, ...]
    signer: TensorSigner | None = None
    kinds: frozenset[type] = frozenset()
    fills = True
    blobs: list[Entry] = field(default_factory=list)
    taken_back: list[Entry] = field(default_factory=list)
    missing: list[Remark] = field(default_factory=list)
    mismatched: list[Remark] = field(default_factory=list)
    notes: list[Remark] = field(default_factory=list)
    _early: DeliveryPart = field(default_factory=DeliveryPart)
    _late: DeliveryPart = field(default_factory=DeliveryPart)
    _at: tuple[Place, str] = field(default=(Place(""), ""))
    _seen: list[tuple[Any, Place, bool]] = field(default_factory=list)
    _requests: dict[Hashable, FillRequest] = field(default_factory=dict)
    _written: list[tuple[Place, Any]] = field(default_factory=list)
    _composites: CompositeRequests = field(default_factory=CompositeRequests)
    _shards: list[Shard] = field(default_factory=list)
    _aliases: list[tuple[str, str, str, str]] = field(default_factory=list)
    _resizable: list[Entry] = field(default_factory=list)
    _better: dict[Place, Place] = field(default_factory=dict)
    _superseded: list[Entry] = field(default_factory=list)
    _needless: dict[Entry, str] = field(default_factory=dict)
    _num_kept: int = 0
    _unlike: list[tuple[str, str, str]] = field(default_factory=list)

    def visit(self, value: Any, place: Place, assign: Assign) -> None:
        """Request the tensors and values of an object of any kind."""
        outer, self._at = self._at, (place, type(value).__name__)
        try:
            first_match(self.adapters, value).wanted(value, place, self, assign)
        except ReknitError:
            raise
        except Exception as error:  # of a `state_dict`, a hook, an iterator: of any code of the value
            raise failed_search(error, value, place) from error
        self._at = outer

    def leave_nones(self, place: Place, keys: Iterable[str | int]) -> None:
        """Leave out each saved None in a container, here with these keys, that has no place in it."""
        if nones := self.saved.nones_in(place):
            self._superseded += nones - {(at.item, at.fqn) for at in self.saved.children(place, [*keys])}

    def early(self, action: Callable[[], None]) -> None:
        """Run `action`, which gives an object its state, before any live tensor changes.

        Only memory that was requested as `early` is filled by then.  Actions run in the order of these calls.
        """
        self._early.actions.append(Delivery(*self._at, action))

    def later(self, action: Callable[[], None]) -> None:
        """Run `action` after all bytes have been read, in the order of these calls."""
        self._late.actions.append(Delivery(*self._at, action))

    def check(self, action: Callable[[], None], *, early: bool = False) -> None:
        """Run `action`, which may raise an error about the values read, before all actions of `later`.

        With `early` it is about early memory alone, and runs before all actions of `early`.
        """
        (self._early if early else self._late).checks.append(action)

    def tensor(self, tensor: Any, place: Place, *, early: bool = False) -> None:
        """Request a tensor, to fill it in place; `early` for memory that no live object uses."""
        if (self.idle or self.catalog.terms.only) and not self.takes(place):
            return
        if type(tensor) in self.kinds:
            self._seen.append((tensor, place, early))
        else:
            self._open(tensor, place, early=early)

    def _open(self, tensor: Any, place: Place, *, early: bool) -> None:
        """Request a tensor of any kind."""
        library = self.library_of(tensor, place)
        if (made := library.opened(tensor, place, self.world, fill=True)) is not None:
            self.composite(made, place, tensor, early=early)
        else:
            self.view(library.view(tensor, place, self.world, fill=True), place, tensor, early=early)

    def _look(self) -> None:
        """Request the tensors that `tensor` has got since the last time, which are looked at together."""
        seen, self._seen = self._seen, []
        if self.signer is None or not seen:
            return
        tensors, places, _ = zip(*seen, strict=True)
        views = self.signer.views(tensors, places, self.world)
        for view, (tensor, place, early) in zip(views, seen, strict=True):
            if view is not None:
                self.view(view, place, tensor, early=early)
                continue
            try:
                self._open(tensor, place, early=early)
            except ReknitError:
                raise
            except Exception as error:
                raise failed_search(error, tensor, place) from error

    def composite(self, made: Composite, place: Place, tensor: Any, *, early: bool = False) -> None:
        """Request a composite tensor, to fill its inner tensors in place."""
        self._composites.add(made, place, tensor, early=early)

    def touch(self, tensor: Any, *, early: bool) -> None:
        """Record that the load changes a tensor by filling its inner tensors."""
        (self._early if early else self._late).filled.append(tensor)

    def pass_over(self, place: Place) -> None:
        """Record that a name and those below it are not needed: it was reported, or comes in another way."""
        below = f"{place.fqn}/" if place.fqn else ""
        item = place.item
        names = (place.fqn, *self.catalog.tensors.get(item, {}), *self.catalog.blobs.get(item, {}))
        self._superseded += [(item, fqn) for fqn in names if fqn.startswith(below) or fqn == place.fqn]

    def leave(self, place: Place) -> None:
        """Record that the target needs nothing of an entry."""
        self._superseded.append((place.item, place.fqn))

    def leave_empty(self, place: Place) -> None:
        """Record that an object needs nothing of an empty container or None saved here, if there is one."""
        value = self.catalog.blobs.get(place.item, {}).get(place.fqn, self)
        if value is None or (isinstance(value, (dict, list, tuple)) and not value):
            self._superseded.append((place.item, place.fqn))

    def view(
        self,
        view: View,
        place: Place,
        tensor: Any,
        *,
        resize: bool = False,
        early: bool = False,
        instead: Sequence[Place] = (),
    ) -> None:
        """Request a tensor by its view; with `resize`, from any saved shape.

        If the checkpoint has no tensor with this name, the first in `instead` that it has is loaded.  `early`
        memory is filled before any live tensor changes.
        """
        if self._seen:
            self._look()
        if self.claim_name(place, ("tensor", view.memory), tensor):
            request = self._requests.setdefault(view.memory, FillRequest(view, tensor, early=early))
            request.places.append(place)
            request.instead += instead
            request.resize |= resize or (bool(self.catalog.terms.resizable) and self.may_resize(place))

    def prefer(self, better: Place, places: Sequence[Place]) -> None:
        """Load these names from `better` if they were saved in another precision."""
        self._better |= dict.fromkeys(places, better)

    def value(self, place: Place) -> FoundValue:
        """Request a saved value.  If it is to be loaded and the checkpoint lacks it, record that."""
        if not self.takes(place):
            return FoundValue(None, "it is not selected for this load")
        self.claim_name(place, ("value", object()), None)  # so no other object takes it
        found = self.saved.look_up(place, give=True)
        if found.why is not None:
            self.report_missing(place, found.why)
        else:
            self._take_value(place)
        return found

    def again(self, place: Place, taken: Place) -> bool:
        """Request a saved value if it is that of another place, which `value` took; return whether it is."""
        if not self.saved.is_same(place, taken) or not self.takes(place):
            return False
        self.claim_name(place, ("value", object()), None)
        self._take_value(place)
        return True

    def _take_value(self, place: Place) -> None:
        shared = self.catalog.blobs.get(place.item, {})
        (self.blobs if place.fqn in shared else self.taken_back).append((place.item, place.fqn))

    def report_missing(self, place: Place, why: str) -> None:
        """Record that the checkpoint lacks an entry that the target needs."""
        if self.saved.spec(place) is not None:
            self.report_mismatched(place, "it is a tensor in the checkpoint and a plain value in the target")
        elif (record := record_at(place, self.saved)) is not None:
            what = f"it is a {record['class']} in the checkpoint, and not in the target: {REMEDY}"
            self.report_mismatched(place, what)
            self.pass_over(place)
        elif self.saved.look_up(place).value is not None:
            self.report_mismatched(place, "it is a plain value in the checkpoint and a tensor in the target")
        else:
            self.missing.append((place.item, place.fqn, self.saved.lack(place) or why))
            self._superseded.append((place.item, place.fqn))  # None, if anything

    def report_mismatched(self, place: Place, why: str) -> None:
        """Record that the checkpoint has an entry in a form that the target cannot take."""
        self.mismatched.append((place.item, place.fqn, why))

    def note(self, place: Place, what: str) -> None:
        """Record a part of the target that the load leaves unchanged by design."""
        self.notes.append((place.item, place.fqn, what))

    def leave_out(self, place: Place, why: str) -> None:
        """Record that the target does not need this saved value, unless another call requests it."""
        self._needless[place.item, place.fqn] = why

    def wanted(self) -> Wanted:
        """Return all requests."""
        self._look()
        for item, fqn in sorted(self._needless.keys() - set(self.blobs)):
            self._superseded.append((item, fqn))
            self.notes.append((item, fqn, self._needless[item, fqn]))
        self._composites.settle(self)
        for request in self._requests.values():
            saved = self.catalog.tensors.get((place := request.places[0]).item, {}).get(place.fqn)
            view = request.view
            if saved == view.spec and len(request.places) == 1 and not (request.early or view.settle):
                self._fill(request, place, self._late)
            else:
                self._settle(request)
        require_writable(self._written)
        self._fill_beside()
        return Wanted(
            tuple(self.state),
            tuple(self._shards),
            tuple(self._aliases),
            tuple(self.blobs),
            tuple(self.missing),
            mismatched=tuple(self.mismatched),
            notes=tuple(self.notes),
            own=tuple(self.taken_back),
            resizable=tuple(self._resizable),
            unlike=tuple(self._unlike),
            superseded=tuple(self._superseded),
            idle=self.idle,
            num_tensors=len(self._requests),
            num_kept=self._num_kept,
            coordinate=self.world.coordinate,
            early=frozenset(self._early.names),
            has_early=bool(self._early.actions or self._early.checks),
            deliver_early=self._deliver_early,
            deliver=self._deliver,
        )

    def _fill_beside(self) -> None:
        """Fill tensors that share memory in copies, early, and put the agreed values into that memory."""
        if not overlap.overlapping(self._shards):
            return
        shared = overlap.fill_beside(list(filter(self._is_filled, self._shards)), self._resizable)
        if shared is not None:
            self._shards = [shared.shards.get(id(shard), shard) for shard in self._shards]
            self._early.names += shared.names
            self.check(shared.require_agreement, early=True)
            self._late.settles.insert(0, shared.put)

    def _is_filled(self, shard: Shard) -> bool:
        """Return whether a shard will be filled: a lenient load skips a shard that does not fit."""
        spec = self.saved.spec(Place(shard.item, shard.fqn))
        return spec is not None and self.converts_to(spec, shard.spec)

    def _settle(self, request: FillRequest) -> None:
        """Load a tied tensor from the first of its names that the checkpoint has."""
        spec_of = self.saved.spec
        saved = [place for place in request.places if spec_of(place) is not None]
        saved = saved or [place for place in request.instead if spec_of(place) is not None][:1]
        if saved and self._better and (better := self._more_exact(saved[0], request)) is not None:
            self._superseded += [(place.item, place.fqn) for place in saved]
            saved = [better]
        first, dtype = (*saved, *request.places)[0], request.view.spec.dtype
        if (has := spec_of(first)) is None or has.dtype != dtype:
            self._unlike.append((first.item, first.fqn, dtype))
        if not saved:
            if request.view.num_elements or record_at(request.places[0], self.saved) is None:
                self._settle_number(request)
            # Otherwise other ranks have all of it, as a composite tensor.
            return
        place, view = saved[0], request.view
        spec = self.saved.spec(place)
        assert spec is not None
        if (why := request.wrong_shape(spec)) is not None:
            self.report_mismatched(place, why)
            return
        if spec.shape != view.spec.shape:
            self._resizable.append((place.item, place.fqn))
            if view.fresh:
                for shard in request.shards(place):
                    shard.data[...] = 0
                self.note(place, "the target was on the meta device: elements not in the checkpoint are zero")
        for alias in saved[1:]:
            if (tied := self.saved.spec(alias)) != spec:
                self.report_mismatched(
                    alias,
                    f"it is {tied} in the checkpoint, and {place}, which is the same tensor here, is {spec}",
                )
            elif self.is_kept(place) or self.is_kept(alias):
                self.report_mismatched(
                    alias, f"each rank has its own in the checkpoint, but {place} is the same tensor here"
                )
            else:
                self._aliases.append((alias.item, alias.fqn, place.item, place.fqn))
        if self.is_kept(place):
            self._take_back(place, spec, request)
            return
        part = self._early if request.early else self._late
        if request.early:
            part.names.append(full_name(place.item, place.fqn))
        self._fill(request, place, part, comes=self.converts_to(spec, view.spec))

    def _fill(self, request: FillRequest, place: Place, part: DeliveryPart, *, comes: bool = True) -> None:
        """Request this rank's parts of a tensor at a place.  Only a tensor that `comes` is written."""
        view, tensor, filled = request.view, request.tensor, part.filled
        filled.append(tensor)
        for box, memory in view.parts:
            self._shards.append(Shard(place.item, place.fqn, view.spec, box, view.replicas, memory=memory))
            flat = memory.memory if type(memory) is Strided else memory
            if flat is not tensor:
                filled.append(flat)
            if comes:
                self._written.append((place, memory))
        if comes and view.settle is not None:
            part.settles.append(view.settle)
        if comes and isinstance(tensor, np.ndarray):  # it may be filled from a copy in another byte order
            self._written.append((place, tensor))

    def _settle_number(self, request: FillRequest) -> None:
        """Load a tensor without dimensions from the number that was saved under its name, if one was."""
        found = request.number(self.saved, cast=self.catalog.terms.cast)
        if found is None:
            self.report_missing(request.places[0], "the checkpoint does not have it")
        elif found.why is not None:
            self.report_mismatched(found.places[0], found.why)
        else:
            for place in found.places:
                self._take_value(place)
            self._num_kept += 1
            self._written += request.memories()
            fills = request.fills(element(found.value, request.view.spec.dtype))
            (self._early if request.early else self._late).settles += fills

    def _take_back(self, place: Place, spec: TensorSpec, request: FillRequest) -> None:
        """Fill a tensor with the value that this rank saved."""
        if spec != (here := request.view.spec):
            self.report_mismatched(place, f"it is {spec} for this rank in the checkpoint, and {here} here")
            return
        kept = self.saved.kept(place)
        assert kept is not None
        self.taken_back.append((place.item, place.fqn))
        self._num_kept += 1
        self._written += request.memories()
        (self._early if request.early else self._late).settles += request.fills(kept)

    def _more_exact(self, saved: Place, request: FillRequest) -> Place | None:
        """Return the place to load instead of a saved tensor of another precision, or None."""
        spec = self.saved.spec(saved)
        if spec is None or spec.dtype == request.view.spec.dtype:
            return None
        better = next((self._better[place] for place in request.places if place in self._better), None)
        if better is not None:
            self.note(saved, f"it has another precision in the checkpoint, so it is loaded from {better}")
        return better

    def _deliver_early(self) -> None:
        self._early.settle(self.libraries)
        self._early.run_each(self.world.size)

    def _deliver(self) -> None:
        self._late.settle(self.libraries)
        self._late.run()
