"""Optimizers of DeepSpeed: the flat ranges of parameters that each rank steps, read in place.

ZeRO keeps the states of many parameters in one flat tensor per group, cut evenly over the data-parallel
ranks.  ZeRO-1 and ZeRO-2 cut through the middle of parameters; ZeRO-3 cuts each parameter for itself. Engines
are read like other data-parallel wrappers, and their parameters in `zero_parameters`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from reknit.errors import StateError
from reknit.frameworks.deepspeed import deepspeed_private, zero_parameters
from reknit.frameworks.deepspeed.zero_parameters import DeepSpeedModules
from reknit.frameworks.numbers import whole
from reknit.frameworks.optimizer import optimizer_protocol
from reknit.frameworks.optimizer.optimizer_adapter import OptimizerAdapter
from reknit.frameworks.optimizer.slots import MASTER, ParamSlot, Slots, named
from reknit.frameworks.torch import tensor_numbers
from reknit.frameworks.torch.flat_part import FlatPart
from reknit.frameworks.walk.load_walk import Loading

if TYPE_CHECKING:
    from reknit.frameworks.deepspeed.deepspeed_private import FlatGroup, ZeroMember
    from reknit.frameworks.torch.modules.extension import ModuleExtension
    from reknit.frameworks.walk.adapter import Adapter
    from reknit.frameworks.walk.walk import Place, Walk


def adapters() -> tuple[Adapter, ...]:
    """Return the adapter of DeepSpeed's optimizers; its engines are recognised as torch's modules are."""
    return (OptimizerAdapter(deepspeed_private.is_optimizer, read),)


def extensions() -> tuple[ModuleExtension, ...]:
    """Return DeepSpeed's extension for torch's modules."""
    return (DeepSpeedModules(),)


def read(optimizer: Any, place: Place, walk: Walk) -> Slots:
    """Return the parameters, each with the elements that this rank steps.  Sends nothing.

    Raises `StateError` for an optimizer that is not one of ZeRO stage 1, 2 or 3, and for an optimizer with
    other weights than its model.
    """
    groups = zero_parameters.groups(optimizer, place, walk)
    if not walk.fills:
        zero_parameters.require_equal(optimizer, place, walk)
    names = {id(parameter): name for parameter, name in deepspeed_private.names(optimizer).items()}
    inner = deepspeed_private.inner(optimizer)
    kind = optimizer_protocol.inner_kind(inner, place)
    each = tuple(_slot(group, member, names, kind, walk) for group in groups for member in group.members)
    if deepspeed_private.steps_are_numbers(optimizer):
        each = tuple(msgspec.structs.replace(slot, whole_steps=True) for slot in each)
    if isinstance(walk, Loading):
        _note_masters(each, groups, place, walk)
    live = state = inner.state
    if deepspeed_private.steps_are_numbers(optimizer):
        # A load makes the counter in the saved dtype, and leaves that of the optimizer unchanged.
        state = {
            flat: dict(states) if walk.fills else counted_in_tensor(states, place)
            for flat, states in live.items()
        }

    def deliver() -> None:
        if state is not live:
            live.clear()
            live.update({flat: counted_in_number(states) for flat, states in state.items()})
        deepspeed_private.relink(optimizer)

    return Slots(state, inner.param_groups, each, deliver, kind=kind)


def _slot(
    group: FlatGroup, member: ZeroMember, names: dict[int, str], kind: tuple[str, ...], walk: Walk
) -> ParamSlot:
    name, places = named(member.parameter, names, walk)
    return ParamSlot(
        name,
        group.flat,
        group.flat,
        group.options,
        walk.world.only_here(group.ranks),
        places=places,
        flat=FlatPart.range_of(member.shape, member.start, member.numel, member.offset, group.flat.numel()),
        counter=walk.world.numbers(group.ranks) if walk.world.inside(group.ranks) else walk.world.alone,
        joint=True,
        master=group.flat.detach() if group.is_master else None,
        kind=kind,
    )


def _note_masters(
    each: tuple[ParamSlot, ...], groups: tuple[FlatGroup, ...], place: Place, loading: Loading
) -> None:
    """Record the loaded master weights.  Raises `StateError` where their parameters are not loaded."""
    members = [member for group in groups for member in group.members]
    for slot, member in zip(each, members, strict=True):
        at = place.child("state", slot.name, MASTER)
        if slot.master is None or not loading.takes(at):
            continue
        zero_parameters.note_master(member.parameter, at, slot.places, loading)
        if loading.saved.spec(at) is not None and not any(map(loading.takes, slot.places)):
            raise StateError(
                f"{at} would be loaded and the parameter itself would not, and then the two would differ",
                remedy="load the engine (or its module) together with the optimizer",
            )


def counted_in_tensor(states: dict[str, Any], place: Place) -> dict[str, Any]:
    """Return states with their steps counted in a tensor, as torch does."""
    step = states.get("step")
    return {**states, "step": tensor_numbers.counter(step, place)} if isinstance(step, int) else dict(states)


def counted_in_number(states: dict[str, Any]) -> dict[str, Any]:
    """Return states with their steps counted in an integer, as DeepSpeed's own optimizers do."""
    if "step" not in states:
        return states
    step = tensor_numbers.number_in(states["step"])
    return {**states, "step": step if (count := whole(step)) is None else count}
