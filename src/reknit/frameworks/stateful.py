"""Objects with a `state_dict`: saved as one value with placeholders, and a tensor for each of these."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from reknit.errors import FormatError, StateError
from reknit.frameworks import tree
from reknit.frameworks.neutral import conflict, is_renewable, record_of, to_neutral, trained
from reknit.frameworks.walk import Adapter
from reknit.frameworks.walk.own_code import (
    SETTLED,
    collect_position,
    comes_last,
    has_effects,
    may_disturb,
    taker_of,
)
from reknit.types.entry import own_code
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Arrays, Assign, Place
    from reknit.types.shard import TensorSpec


def is_stateful(value: Any) -> bool:
    """Return whether a value can return and take its state."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


_PARTIAL = (
    "only a part of it is to be loaded, and its present state is not read.  Name all of it or nothing in "
    "`only`, or set `state_dict_has_effects = False` in its class if state_dict() changes nothing"
)
_CALLED = (
    "its state_dict() was called, to load tensors as they are placed now.  It holds a data loader that "
    "this call may start: set `state_dict_has_effects` in its class to True to prevent that, or to False to "
    "accept it"
)


class Accessors(Struct, frozen=True):
    """An object with two functions that return and take its state."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], None]


class Kept(Struct):
    """Values in the form that the load gives them; `continues` is whether data loaders continue from them."""

    values: Any = field(default_factory=dict)
    continues: bool = True

    def state_dict(self) -> Any:
        """Return the values."""
        return self.values

    def load_state_dict(self, state: Any) -> None:
        """Keep the values."""
        self.values = state


class Unfilled:
    """Memory to fill in the place of an immutable tensor."""

    record: Mapping[str, Any] = MappingProxyType({})
    """The record of the saved tensor, as `record_of` makes it, if the new tensor has to have the same."""

    def filled(self) -> Any:
        """Return a tensor with the contents of the memory."""
        raise TypeError(f"{type(self).__name__} becomes no tensor")


def completed(state: Any) -> Any:
    """Return a state with its tensors in place of `Unfilled` memory, after that is filled."""
    return tree.map_leaves(
        state, lambda _, leaf: leaf.filled() if isinstance(leaf, Unfilled) else tree.DESCEND
    )


class StatefulAdapter(Adapter):
    """Schedulers, gradient scalers, samplers, data loaders, a user's own trainer object."""

    def matches(self, value: Any) -> bool:
        """Return whether this object can return and take its state."""
        return is_stateful(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the object's state."""
        with own_code():
            state = value.state_dict()
        saving.blob(skeleton(state, place, saving), place.below(tree.SKELETON))
        collect_position(value, state, place, saving)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the object's state, which it receives as a whole, in new memory."""
        record = place.below(tree.SKELETON)
        if not loading.takes(record):
            _want_tensors(value, place, loading)
            return
        value = taker_of(value, place, loading, loading.saved.look_up(record).value)
        if value is SETTLED:
            return
        if loading.saved.is_by_keys(place):
            from reknit.frameworks.walk.requests import found_by_keys  # a save needs none of it

            present = None if has_effects(value) else present_state(value, place, loading)
            if (found := found_by_keys(place, present, loading)).why is not None:
                loading.report_mismatched(place, _PARTIAL)
        else:
            found = loading.value(record)
        if found.why is not None or not fits(value, found.value, place, loading):
            return
        named = _records(found.value, place)
        current: dict[str, Any] = {}
        if named and not has_effects(value):
            current = loading.tensors_of(present_state(value, place, loading), place)
            _note_other_forms(current, named, place, loading)
        elif not all(loading.takes(at) for at in named):
            loading.report_mismatched(place, _PARTIAL)
            return
        whole, state = rebuild(found.value, place, loading, current, early=not comes_last(value))
        if whole:
            hand_over(value, lambda: value.load_state_dict(completed(state)), loading)


def _note_other_forms(
    current: Mapping[str, Any], saved: Container[Place], place: Place, loading: Loading
) -> None:
    """Note the present tensors of an object that are not in its saved state, or have another form there.

    They are not mismatches: an object may keep tensors that grow, and only its own code can refuse one.
    """
    for relative, tensor in current.items():
        at, library = place.below(relative), loading.arrays(tensor)
        if library is None or not is_renewable(tensor) or not loading.takes(at):
            continue
        if at not in saved:
            loading.note(at, "the object has it, and receives the saved state, which is without it")
            continue
        spec, here = loading.saved.spec(at), library.form(tensor)
        if None not in (spec, here) and spec != here:
            loading.note(at, f"the object receives it as saved, {spec}, and has {here} there")


def present_state(value: Any, place: Place, loading: Loading) -> Any:
    """Return the object's present state; the load report notes possible effects of that call."""
    if may_disturb(value):
        loading.note(place, _CALLED)
    with own_code():
        return value.state_dict()


def unlike_now(present: Any, state: Any, place: Place, loading: Loading) -> str | None:
    """Return the reason why arrays in a saved value cannot become the present arrays, or None."""
    records = {path: record_of(array) for path, array in loading.tensors_in(state, place).items()}
    records = {path: record for path, record in records.items() if "keys" in record}
    if not records or (is_stateful(present) and has_effects(present)):
        return None
    now = present_state(present, place, loading) if is_stateful(present) else present
    held = loading.tensors_in(now, place)
    whys = (conflict(record, record_of(held.get(path))) for path, record in records.items())
    return next((why for why in whys if why is not None), None)


def hand_over(value: Any, action: Callable[[], None], loading: Loading) -> None:
    """Run `action`, which gives the object its state, before all tensors, or after them if it reads some."""
    (loading.later if comes_last(value) else loading.early)(action)


def fits(value: Any, saved: Any, place: Place, loading: Loading) -> bool:
    """Return whether a library's object can take a saved value, as far as its class can decide beforehand."""
    if sys.modules.get("torch") is not None:
        from reknit.frameworks.torch import numbers

        if why := numbers.misfit(value, saved):
            loading.report_mismatched(place, why)
            return False
        if what := numbers.ignored(value, saved):
            loading.note(place, what)
    return True


def _records(value: Any, place: Place) -> dict[Place, Mapping[str, Any]]:
    """Return the records of the tensors in a saved value, by their places."""
    found: dict[Place, Mapping[str, Any]] = {}

    def find(path: tree.Path, leaf: Any) -> Any:
        if isinstance(leaf, Tagged) and leaf.tag == "tensor":
            found[place.below(_placeholder(leaf, place)[1])] = leaf.value
            return None
        return tree.DESCEND

    tree.map_leaves(value, find)
    return found


def _want_tensors(value: Any, place: Place, loading: Loading) -> None:
    """Request the selected tensors of the object's present state, and keep everything else."""
    if not loading.may_take_below(place):
        return
    if has_effects(value):
        if any(loading.takes(at) for at in loading.saved.tensors_below(place)):
            loading.report_mismatched(place, _PARTIAL)
        return
    asked: list[Place] = []
    early = not comes_last(value)
    records = _records(loading.saved.look_up(place.below(tree.SKELETON)).value, place)

    def fill(path: tree.Path, leaf: Any) -> Any:
        library = loading.arrays(leaf)
        if library is None or not is_renewable(leaf):
            return tree.DESCEND
        at = place.child(*path)
        spec = loading.saved.spec(at)
        if not loading.takes(at):
            return leaf
        asked.append(at)
        if spec is None and (made := loading.opened(leaf, at)) is not None:
            loading.tensor(tensor := made.renew(), at, early=early)
            return tensor
        if spec is None:
            loading.report_missing(at, "the checkpoint does not have it")
            return leaf
        record = records.get(at, {})
        if why := conflict(record, record_of(leaf)):
            loading.report_mismatched(at, why)
            return leaf
        tensor = library.fresh(spec, leaf)
        loading.tensor(tensor, at, early=early)
        if isinstance(tensor, Unfilled) and record:
            tensor.record = record
        return tensor

    state = tree.map_leaves(present_state(value, place, loading), fill, place)
    if any(loading.saved.has_tensor(at) for at in asked):
        hand_over(value, lambda: value.load_state_dict(completed(state)), loading)


def skeleton(
    value: Any, place: Place, saving: Saving, add: Callable[[Any, Place], None] | None = None
) -> Any:
    """Collect the tensors in a value, each by `add`, and return the value with a placeholder for each."""
    add = add or saving.tensor

    def hole(path: tree.Path, leaf: Any) -> Any:
        library = saving.arrays(leaf)
        if library is None or not is_renewable(leaf):
            return tree.DESCEND
        add(leaf, place.child(*path))
        hole = {"library": library.library, "path": _relative(path, place)}
        return Tagged("tensor", {**hole, **record_of(leaf)})

    return to_neutral(tree.map_leaves(value, hole, place), str(place))


def rebuild(
    value: Any,
    place: Place,
    loading: Loading,
    current: dict[str, Any],
    ask: Callable[[TensorSpec, Any, Place], Any] | None = None,
    *,
    early: bool = False,
) -> tuple[bool, Any]:
    """Request the tensors of a saved value; return whether all exist, and the value with them.

    A tensor is loaded into fresh memory, shaped and placed like that in `current` at the same path, if there
    is one. A `state_dict` may return memory that the object shares with others, and that must not change
    before delivery.  A tensor that is not selected stays the present one.  `ask` requests a tensor of torch
    in another way.  With `early` the tensors are filled before any live one.
    """
    absent: list[Place] = []

    def fill(path: tree.Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tagged) or leaf.tag != "tensor":
            return tree.DESCEND
        library, relative = _placeholder(leaf, place)
        at = place.below(relative)
        if not loading.takes(at):
            if relative not in current:
                absent.append(at)
            return current.get(relative)
        spec = loading.saved.spec(at)
        if spec is None and (made := loading.opened(current.get(relative), at)) is not None:
            loading.tensor(tensor := made.renew(), at, early=early)
            return trained(tensor, leaf.value)
        if spec is None:
            loading.report_missing(at, "the checkpoint does not have it")
            absent.append(at)
            return None
        arrays = _library(library, at, loading)
        like = current.get(relative)
        if ask is not None and library == "torch":
            return ask(spec, like, at)
        if why := conflict(leaf.value, record_of(like)):
            loading.report_mismatched(at, why)
            absent.append(at)
            return None
        tensor = arrays.fresh(spec, like if arrays.matches(like) else None)
        loading.tensor(tensor, at, early=early)
        if isinstance(tensor, Unfilled):
            tensor.record = leaf.value
            return tensor
        return trained(tensor, leaf.value)

    filled = tree.map_leaves(value, fill)
    return not absent, filled


def _library(name: str, place: Place, loading: Loading) -> Arrays:
    for known in loading.libraries:
        if known.library == name:
            return known
    raise StateError(f"{place} is a tensor of {name}", remedy=f"import {name} before loading")


def _placeholder(leaf: Tagged, place: Place) -> tuple[str, str]:
    if not isinstance(leaf.value, dict) or not all(
        isinstance(leaf.value.get(key), str) for key in ("library", "path")
    ):
        raise FormatError(f"{place} has a placeholder that names no tensor")
    return leaf.value["library"], leaf.value["path"]


def _relative(path: tree.Path, place: Place) -> str:
    return tree.join(*(tree.escape(key, str(place)) for key in path))
