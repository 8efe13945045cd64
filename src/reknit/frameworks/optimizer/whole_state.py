"""The whole state dict of an optimizer whose states are not by parameters: for one layout alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.optimizer import optimizer_protocol
from reknit.frameworks.same_value import same_value
from reknit.frameworks.torch import dtensor, subclasses, torch_private
from reknit.frameworks.torch.modules.members import parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Place, Walk

WHOLE = "whole"
"""Name of the entry about the layout."""

_KIND, _PARAMETERS, _SHARDED = "optimizer", "parameters", "sharded"


class Layout(Struct, frozen=True):
    """An optimizer, with its kind and name, shape and local shape of each of its parameters, in order."""

    optimizer: Any
    record: dict[str, Any]

    def collect(self, more: Mapping[Any, Any], place: Place, saving: Saving) -> None:
        """Collect the record; for each DTensor below `place`, also a parameter that is distributed alike."""
        members = _members(self.optimizer)
        sharded: dict[str, int] = {}

        def find(path: tree.Path, leaf: Any) -> Any:
            if not dtensor.is_dtensor(leaf):
                return tree.DESCEND
            alike = (n for n, one in enumerate(members) if dtensor.is_dtensor(one) and _are_alike(one, leaf))
            if (number := next(alike, None)) is None:
                raise StateError(
                    f"the state_dict() of {place} has a DTensor that is distributed like no parameter of the "
                    f"optimizer: {tree.dotted(path)}",
                    remedy="put the optimizer inside it into the state",
                )
            sharded[tree.join(*(tree.escape(key, place) for key in path))] = number
            return None

        tree.map_leaves(more, find, place)
        saving.blob({**self.record, _SHARDED: sharded}, place.child(WHOLE))

    def want(self, place: Place, loading: Loading) -> tuple[Mapping[str, int], str | None]:
        """Request the saved record; return parameters by DTensors, and why the saved layout is another."""
        found = loading.value(place.child(WHOLE))
        saved, here = found.value, self.record
        if found.why is not None or not isinstance(saved, dict):
            return {}, found.why or "its layout is not recorded"
        if optimizer_protocol.differs(saved.get(_KIND), here[_KIND]):
            return {}, f"{saved[_KIND][0]} saved it, and here {here[_KIND][0]} steps"
        if not same_value(saved.get(_PARAMETERS), here[_PARAMETERS]):
            return {}, (
                f"the state_dict() of {here[_KIND][0]} is not by parameters: it loads for parameters of the "
                "same names, order and shapes on each rank alone, and here they are others"
            )
        return saved.get(_SHARDED) or {}, None

    def empty_like(self, number: int, dtype: torch.dtype) -> Any:
        """Return memory that is distributed like a parameter of the optimizer."""
        return subclasses.empty_like(_members(self.optimizer)[number], dtype)


def layout(optimizer: Any, kind: tuple[str, ...], walk: Walk) -> Layout:
    """Return the layout of an optimizer's parameters on this rank."""
    named = parameters(walk)
    found = []
    for parameter in _members(optimizer):
        known = named.get(id(parameter))
        local = torch_private.local_of(parameter) if dtensor.is_dtensor(parameter) else parameter
        name = known[0].name if known else None
        found.append([name, list(parameter.shape), list(local.shape)])
    return Layout(optimizer, {_KIND: list(kind), _PARAMETERS: found})


def _members(optimizer: Any) -> list[Any]:
    return [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]


def _are_alike(one: Any, other: Any) -> bool:
    return bool(
        one.shape == other.shape
        and one.device_mesh == other.device_mesh
        and tuple(one.placements) == tuple(other.placements)
    )
