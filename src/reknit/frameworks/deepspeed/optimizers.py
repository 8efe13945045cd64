"""Optimizers of DeepSpeed: the flat ranges of parameters that each rank steps, read in place.

ZeRO keeps the states of many parameters in one flat tensor per group, cut evenly over the data-parallel
ranks: through the middle of parameters in ZeRO-1 and ZeRO-2, each parameter for itself in ZeRO-3.  Engines
are read like other data-parallel wrappers, and their parameters in `parameters`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reknit.errors import StateError
from reknit.frameworks.deepspeed import parameters as deepspeed_parameters
from reknit.frameworks.deepspeed import private as deepspeed_private
from reknit.frameworks.deepspeed.parameters import DeepSpeedModules
from reknit.frameworks.optimizer import protocol as optimizer_protocol
from reknit.frameworks.optimizer.slots import MASTER, ParamSlot, Slots
from reknit.frameworks.optimizer.states import OptimizerAdapter
from reknit.frameworks.torch.flat import FlatPart
from reknit.frameworks.torch.modules.members import parameters
from reknit.frameworks.torch.modules.names import without_wrappers
from reknit.frameworks.walk.loading import Loading

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.deepspeed.private import FlatGroup, ZeroMember
    from reknit.frameworks.torch.modules.extension import ModuleExtension
    from reknit.frameworks.walk.adapter import Adapter
    from reknit.frameworks.walk.walk import Place, Walk


def adapters() -> tuple[Adapter, ...]:
    """Return what knows DeepSpeed's optimizers; its engines are known as torch's modules are."""
    return (OptimizerAdapter(ZeroOptimizers()),)


def extensions() -> tuple[ModuleExtension, ...]:
    """Return what DeepSpeed tells of torch's modules."""
    return (DeepSpeedModules(),)


class ZeroOptimizers:
    """The optimizers that DeepSpeed makes around torch's for ZeRO stage 1, 2 and 3."""

    def matches(self, value: Any) -> bool:
        """Tell whether this is an optimizer that DeepSpeed made, of whatever kind."""
        return deepspeed_private.is_optimizer(value)

    def read(self, value: Any, place: Place, walk: Walk) -> Slots:
        """Return the parameters, each with the elements that this rank steps.  Sends nothing.

        Raises `StateError` for an optimizer of another kind, and for one that has other weights than its
        model has.
        """
        groups = deepspeed_parameters.groups(value, place, walk)
        if not walk.fills:
            deepspeed_parameters.require_equal(value, place, walk)
        names = _names(value, walk)
        inner = deepspeed_private.inner(value)
        kind = optimizer_protocol.inner_kind(inner, place)
        each = tuple(_slot(group, member, names, kind, walk) for group in groups for member in group.members)
        if isinstance(walk, Loading):
            _note_masters(each, groups, place, walk)
        state = _States.of(value) if deepspeed_private.steps_are_numbers(value) else inner.state
        return Slots(state, inner.param_groups, each, lambda: _deliver(value, state))


def _slot(
    group: FlatGroup, member: ZeroMember, names: dict[int, str], kind: tuple[str, ...], walk: Walk
) -> ParamSlot:
    key = id(member.parameter)
    known = parameters(walk).get(key, ())
    at = known[0].places if known else ()
    return ParamSlot(
        names[key],
        group.flat,
        group.flat,
        group.options,
        deepspeed_parameters.only_here(group.ranks, walk.world),
        at,
        FlatPart.range_of(member.shape, member.start, member.numel, member.offset, group.flat.numel()),
        walk.world.numbers(group.ranks) if walk.world.inside(group.ranks) else walk.world.alone,
        joint=True,
        master=group.flat.detach() if group.is_master else None,
        kind=kind,
    )


def _names(optimizer: Any, walk: Walk) -> dict[int, str]:
    """Return the names of all parameters: those that modules in the state give, else the engine's own."""
    known = parameters(walk)
    own = deepspeed_private.names(optimizer)
    names = {id(parameter): without_wrappers(name) for parameter, name in own.items()}
    return names | {key: found[0].name for key, found in known.items()}


def _note_masters(
    each: tuple[ParamSlot, ...], groups: tuple[FlatGroup, ...], place: Place, loading: Loading
) -> None:
    """Note which master weights are loaded.  Raises `StateError` where their parameters stay as they are."""
    members = [member for group in groups for member in group.members]
    for slot, member in zip(each, members, strict=True):
        at = place.child("state", slot.name, MASTER)
        if slot.master is None or not loading.takes(at):
            continue
        deepspeed_parameters.note_master(member.parameter, at, slot.places, loading)
        if loading.saved.spec(at) is not None and not any(map(loading.takes, slot.places)):
            raise StateError(
                f"{at} would be loaded and the parameter itself would not, and then the two are at odds",
                remedy="load the engine (or its module) together with the optimizer",
            )


class _States(dict[Any, Any]):
    """The states of an optimizer that counts its steps in plain numbers, here counted as torch does."""

    @classmethod
    def of(cls, optimizer: Any) -> _States:
        found = cls()
        for flat, states in deepspeed_private.inner(optimizer).state.items():
            found[flat] = dict(states)
            if isinstance(states.get("step"), int):
                found[flat]["step"] = torch.tensor(float(states["step"]))
        return found

    def items_of_framework(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """Yield the states as the optimizer keeps them."""
        for flat, states in self.items():
            step = states.get("step")
            numbers = {"step": int(step.item())} if isinstance(step, torch.Tensor) else {}
            yield flat, {**states, **numbers}


def _deliver(optimizer: Any, state: Any) -> None:
    """Put the states back into the optimizer, and let DeepSpeed know of them."""
    if isinstance(state, _States):
        live = deepspeed_private.inner(optimizer).state
        live.clear()
        live.update(state.items_of_framework())
    deepspeed_private.relink(optimizer)
