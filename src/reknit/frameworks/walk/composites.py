"""Composite tensors: their records, and the requests for their inner tensors, each of which has a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from reknit.frameworks.neutral import COMPOSITE
from reknit.frameworks.numbers import same_value
from reknit.types.shard import Tagged

if TYPE_CHECKING:
    from collections.abc import Hashable

    from reknit.frameworks.walk.requests import FoundValue, RankCatalog
    from reknit.frameworks.walk.walk import Composite, Place, View

Record = dict[str, Any]
"""The record of a composite tensor, as in `Composite`."""


class CompositeLoad(Protocol):
    """A load, as far as composite tensors need it for their requests."""

    saved: RankCatalog

    def value(self, place: Place) -> FoundValue:
        """Request a saved value."""

    def view(self, view: View, place: Place, tensor: Any, *, early: bool = False) -> None:
        """Request a tensor by its view."""

    def touch(self, tensor: Any, *, early: bool) -> None:
        """Record that the load changes a tensor by filling its inner tensors."""

    def pass_over(self, place: Place) -> None:
        """Record that the tensors below a name are not needed."""

    def report_missing(self, place: Place, why: str) -> None:
        """Record that the checkpoint lacks an entry that the target needs."""

    def report_mismatched(self, place: Place, why: str) -> None:
        """Record that the checkpoint has an entry in a form that the target cannot take."""


def record_at(place: Place, saved: RankCatalog) -> Record | None:
    """Return the record of the composite tensor that was saved under a name, None if none was."""
    return record_of(saved.look_up(place).value)


def record_of(value: Any) -> Record | None:
    """Return the record in a saved value, None for any other value."""
    if not isinstance(value, Tagged) or value.tag != COMPOSITE or not isinstance(value.value, dict):
        return None
    record: Record = value.value
    whole = isinstance(record.get("class"), str) and isinstance(record.get("inner"), dict)
    return record if whole and isinstance(record.get("shape"), list) else None


def difference(saved: Record, here: Record) -> str | None:
    """Return the difference of a saved composite tensor from that of the target, or None."""
    if saved["class"] != here["class"]:
        return f"it is a {saved['class']} in the checkpoint and a {here['class']} here"
    if saved["shape"] != here["shape"]:
        return f"its shape is {saved['shape']} in the checkpoint and {here['shape']} here"
    if not same_value(saved.get("context"), here["context"]):
        return (
            f"the {here['class']} was made with {_shown(saved.get('context'))} in the checkpoint, and with "
            f"{_shown(here['context'])} here"
        )
    if saved["inner"].keys() != here["inner"].keys():
        return (
            f"the {here['class']} is made of {', '.join(saved['inner'])} in the checkpoint, and of "
            f"{', '.join(here['inner'])} here"
        )
    for name, inside in here["inner"].items():
        before = record_of(Tagged(COMPOSITE, saved["inner"][name]))
        if (before is None) != (inside is None):
            return (
                f"its {name} is made of other tensors in one of checkpoint and target, and not in the other"
            )
        if before is not None and inside is not None and (why := difference(before, inside)):
            return f"of its {name}: {why}"
    return None


def _shown(context: Any) -> str:
    text = repr(context)
    return text if len(text) <= 300 else f"{text[:300]}..."


def misfit(made: Composite, record: Record, place: Place, saved: RankCatalog) -> str | None:
    """Return why a saved composite tensor does not fit that of the target, or None."""
    if why := difference(record, made.record):
        return why
    for name, _, view in made.inner:
        spec = saved.spec(place.below(name))
        if spec != view.spec:
            has = "is not in the checkpoint" if spec is None else f"is {spec} in the checkpoint"
            return f"the {name} of this {made.record['class']} {has}, and {view.spec} here"
    return None


REMEDY = (
    "load into a tensor of the class and options that were saved (for a model, quantize it in the same way "
    "before the load), or save it dequantized"
)


class _CompositeRequest(Struct):
    """A composite tensor to fill, with all its names in the target; `early` before live memory."""

    made: Composite
    tensor: Any
    early: bool
    places: dict[Place, None] = field(default_factory=dict)


class CompositeRequests(Struct):
    """The composite tensors of a target, each with all its names."""

    _asked: dict[Hashable, _CompositeRequest] = field(default_factory=dict)

    def add(self, made: Composite, place: Place, tensor: Any, *, early: bool) -> None:
        """Request a composite tensor, to fill its inner tensors in place."""
        key = made.memory if made.inner else ("composite", id(tensor))
        self._asked.setdefault(key, _CompositeRequest(made, tensor, early)).places[place] = None

    def settle(self, loading: CompositeLoad) -> None:
        """Request the inner tensors under the names in the checkpoint; record each misfit."""
        for asked in self._asked.values():
            made = asked.made
            saved = [place for place in asked.places if record_at(place, loading.saved) is not None]
            if not saved:
                _report_missing(made, next(iter(asked.places)), loading)
            for place in saved:
                found = loading.value(place)
                record = record_of(found.value)
                if record is None:
                    continue
                if why := misfit(made, record, place, loading.saved):
                    loading.report_mismatched(place, f"{why}: {REMEDY}")
                    loading.pass_over(place)
                    continue
                loading.touch(asked.tensor, early=asked.early)
                for name, inner, view in made.inner:
                    loading.view(view, place.below(name), inner, early=asked.early)


def _report_missing(made: Composite, place: Place, loading: CompositeLoad) -> None:
    spec = loading.saved.spec(place)
    if spec is None:
        loading.report_missing(place, "the checkpoint does not have it")
        return
    loading.report_mismatched(
        place,
        f"it is a plain tensor, {spec}, in the checkpoint and a {made.record['class']} here: load into a "
        f"plain tensor, and make a {made.record['class'].rpartition('.')[2]} of it after the load",
    )
