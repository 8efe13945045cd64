"""Optimizers of DeepSpeed: the flat ranges of parameters that each rank steps, read in place.

ZeRO keeps the states of many parameters in one flat tensor per group, cut evenly over the data-parallel
ranks.  ZeRO-1 and ZeRO-2 cut through the middle of parameters; ZeRO-3 cuts each parameter for itself. Engines
are read like other data-parallel wrappers, and their parameters in `zero_parameters`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.torch import numbers
from reknit.frameworks.torch.numbers import same
from reknit.frameworks.torch.slots import named
from reknit.integrations.deepspeed import private
from reknit.plugins.framework import (
    MASTER,
    FlatParameter,
    FlatPart,
    Loading,
    OptimizerAdapter,
    ParamSlot,
    Slots,
    converts,
    inner_kind,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.integrations.deepspeed.private import FlatGroup, ZeroMember
    from reknit.plugins.framework import Adapter, ModuleExtension, Place, Walk, World


_MASTERS = "masters of DeepSpeed"
"""Key of a walk's memo: the places from which each parameter's master weights are loaded."""


Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By parameter id: the elements that an optimizer updates, and those of the parameter itself."""


class DeepSpeedModules:
    """DeepSpeed engines, and modules whose parameters they have partitioned."""

    def is_wrapper(self, module: Any) -> bool:
        """Return whether a module is an engine."""
        return private.is_engine(module)

    def ranks(self, wrapper: Any) -> tuple[int, ...]:
        """Return the ranks among which an engine averages gradients."""
        return private.engine_ranks(wrapper)

    def require_readable(self, module: nn.Module, place: Place) -> None:
        """Raise `StateError` for DeepSpeed features whose names or layouts reknit cannot determine."""
        for path, inner in module.named_modules():
            flaw = private.module_flaw(inner)
            if flaw is not None:
                raise StateError(
                    f"the module {path or 'at the root'} of {place} {flaw}",
                    remedy="turn that feature off, or use DeepSpeed's own save_checkpoint, without take_over",
                )
        for name, parameter in module.named_parameters():
            flaw = private.parameter_flaw(parameter)
            if flaw is not None:
                raise StateError(
                    f"the parameter {name} of {place} {flaw}; reknit cannot determine this rank's part of it",
                    remedy="turn that feature off, or use DeepSpeed's own save_checkpoint, without take_over",
                )

    def is_partitioned(self, parameter: Any) -> bool:
        """Return whether a parameter is partitioned by ZeRO-3."""
        return private.is_partitioned(parameter)

    def partitioned(
        self, parameter: Any, names: tuple[str, ...], place: Place, world: World
    ) -> FlatParameter:
        """Return this rank's part of a ZeRO-3 parameter.

        Raises `StateError` if the gathered parameter, which the caller may be changing, differs from its
        partitions.
        """
        found = private.partition(parameter)
        here = found.memory[: found.numel]
        if found.whole is not None and found.numel:
            shown = found.whole.reshape(-1)[found.start : found.start + found.numel]
            if not same(shown.to(here.device), here):
                raise StateError(
                    f"the gathered parameter {names[0]} of {place} was changed, but its partitions were "
                    "not updated yet",
                    remedy="leave the GatheredParameters context before you save or load, and give it a "
                    "modifier_rank",
                )
        part = FlatPart.range_of(found.shape, found.start, found.numel, 0, found.memory.numel())
        holders = world.only_here(found.ranks)
        release = partial(private.release, [parameter])
        return FlatParameter(
            names,
            parameter,
            parameter,
            0,
            found.memory,
            part=part,
            replicas=holders,
            counter=world.alone,
            settle=release,
        )

    def follow(self, parameters: list[tuple[Any, Place]], place: Place, loading: Loading) -> None:
        """Refresh the optimizers' copies of these parameters once a load has filled the parameters."""
        # A parameter that the checkpoint lacks stays as it is, and so must its copy, which may be more exact.
        arriving = [parameter for parameter, at in parameters if loading.saved.spec(at) is not None]
        if not arriving:
            return
        _require_known_steps(arriving, loading)
        copied = [parameter for parameter in arriving if private.has_copies(parameter)]
        copied += [parameter for parameter in arriving if private.owner(parameter) is not None]
        if not copied:
            return
        copies = _copies(place, loading, copied)
        places = {id(parameter): at for parameter, at in parameters}
        for parameter in copied:
            if id(parameter) not in copies and private.has_copies(parameter):
                raise StateError(
                    f"{places[id(parameter)]} has a copy in the optimizer of its DeepSpeed engine. That "
                    "optimizer is not in the state, so its next step would undo the load",
                    remedy="put the engine itself into the state, or engine.optimizer beside its module",
                )
        loading.later(lambda: _refresh(copied, copies, loading))


def flat_groups(optimizer: Any, place: Place, walk: Walk) -> tuple[FlatGroup, ...]:
    """Return the flat groups of a DeepSpeed optimizer.  Raises `StateError` if it is not supported."""
    return walk.world.once(("DeepSpeed", id(optimizer)), lambda: _groups(optimizer, place))


def _groups(optimizer: Any, place: Place) -> tuple[FlatGroup, ...]:
    flaw = private.optimizer_flaw(optimizer)
    if flaw is not None:
        raise StateError(
            f"the optimizer {place} {flaw}; reknit cannot determine which parameters its states belong to",
            remedy="use ZeRO stage 1, 2 or 3 with its states in memory; after offload_states, call "
            "engine.reload_states()",
        )
    try:
        return private.flat_groups(optimizer)
    except ValueError as error:
        raise StateError(
            f"a parameter of the optimizer {place} {error}",
            remedy="change parameters in place (with torch.no_grad(): parameter.copy_(...)), and convert "
            "and move the module before deepspeed.initialize",
        ) from error


def _require_known_steps(arriving: list[Any], loading: Loading) -> None:
    """Raise `StateError` for parameters of engines whose unsupported optimizer may copy the weights."""
    for engine, at in _engines(loading):
        flaw = None
        if private.is_optimizer(engine.optimizer):
            flaw = private.optimizer_flaw(engine.optimizer)
        inside = set(map(id, engine.parameters())) if flaw else ()
        if any(id(parameter) in inside for parameter in arriving):
            raise StateError(
                f"the optimizer of the DeepSpeed engine {at} {flaw}. It may have a copy of the "
                "weights, and its next step would undo the load",
                remedy="use ZeRO stage 1, 2 or 3 with its states in memory, or load before the engine exists",
            )


def _engines(walk: Walk) -> Iterator[tuple[Any, Place]]:
    """Yield all engines in a state with their places."""
    for module, place in walk.find(nn.Module):
        for path, inner in module.named_modules():
            if private.is_engine(inner):
                yield inner, place.child(path) if path else place


def _copies(place: Place, loading: Loading, parameters: list[Any]) -> Copies:
    """Return the copies in all DeepSpeed optimizers that the state contains or refers to."""
    found = [optimizer for optimizer, _ in loading.find(private.optimizer_type())]
    found += [engine.optimizer for engine, _ in _engines(loading)]
    found += [private.owner(parameter) for parameter in parameters]
    known = {id(one): one for one in found if private.is_optimizer(one)}
    return {
        id(member.parameter): (stepped, live)
        for optimizer in known.values()
        for group in flat_groups(optimizer, place, loading)
        for member, stepped, live in group.copies()
    }


def _refresh(parameters: list[Any], copies: Copies, loading: Loading) -> None:
    masters: dict[int, tuple[Place, ...]] = loading.memo.get(_MASTERS, {})
    with torch.no_grad():
        for key in map(id, parameters):
            if key in copies and not _comes(copies[key][0], masters.get(key, ()), loading):
                stepped, live = copies[key]
                stepped.copy_(live)


def _comes(master: torch.Tensor, sources: tuple[Place, ...], loading: Loading) -> bool:
    """Return whether master weights are loaded: a lenient load leaves those of a dtype that does not fit."""
    saved = next((spec.dtype for at in sources if (spec := loading.saved.spec(at)) is not None), None)
    mine = str(master.dtype).removeprefix("torch.")
    return saved == mine or (saved is not None and loading.catalog.terms.cast and converts(saved, mine))


def note_master(parameter: Any, at: Place, places: tuple[Place, ...], loading: Loading) -> None:
    """Record that a parameter's master weights are loaded from the first of these places that exists."""
    loading.memo.setdefault(_MASTERS, {})[id(parameter)] = (at, *places)


def require_equal(optimizer: Any, place: Place, walk: Walk) -> None:
    """Raise `StateError` if an optimizer's copies of the parameters differ from the parameters."""
    for group in flat_groups(optimizer, place, walk):
        copies = group.copies() if group.is_twin else ()
        if not all(same(stepped.to(live.device), live) for _, stepped, live in copies):
            raise StateError(
                f"the optimizer {place} has other weights than the model: one of the two was changed alone",
                remedy="if the model is right, call engine.optimizer.refresh_fp32_params(); if the optimizer "
                "is, engine.optimizer.update_lp_params() (ZeRO-1, ZeRO-2)",
            )


def adapters() -> tuple[Adapter, ...]:
    """Return the adapter of DeepSpeed's optimizers; its engines are recognised as torch's modules are."""
    return (OptimizerAdapter(private.is_optimizer, read),)


def extensions() -> tuple[ModuleExtension, ...]:
    """Return DeepSpeed's extension for torch's modules."""
    return (DeepSpeedModules(),)


def read(optimizer: Any, place: Place, walk: Walk) -> Slots:
    """Return the parameters, each with the elements that this rank steps.  Sends nothing.

    Raises `StateError` for an optimizer that is not one of ZeRO stage 1, 2 or 3, and for an optimizer with
    other weights than its model.
    """
    groups = flat_groups(optimizer, place, walk)
    if not walk.fills:
        require_equal(optimizer, place, walk)
    names = {id(parameter): name for parameter, name in private.names(optimizer).items()}
    inner = private.inner(optimizer)
    kind = inner_kind(inner, place)
    each = tuple(_slot(group, member, names, kind, walk) for group in groups for member in group.members)
    if private.steps_are_numbers(optimizer):
        each = tuple(msgspec.structs.replace(slot, whole_steps=True) for slot in each)
    if isinstance(walk, Loading):
        _note_masters(each, groups, place, walk)
    live = state = inner.state
    if private.steps_are_numbers(optimizer):
        # A load makes the counter in the saved dtype, and leaves that of the optimizer unchanged.
        state = {
            flat: dict(states) if walk.fills else counted_in_tensor(states, place)
            for flat, states in live.items()
        }

    def deliver() -> None:
        if state is not live:
            live.clear()
            live.update({flat: counted_in_number(states) for flat, states in state.items()})
        private.relink(optimizer)

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
        note_master(member.parameter, at, slot.places, loading)
        if loading.saved.spec(at) is not None and not any(map(loading.takes, slot.places)):
            raise StateError(
                f"{at} would be loaded and the parameter itself would not, and then the two would differ",
                remedy="load the engine (or its module) together with the optimizer",
            )


def counted_in_tensor(states: dict[str, Any], place: Place) -> dict[str, Any]:
    """Return states with their steps counted in a tensor, as torch does."""
    step = states.get("step")
    return {**states, "step": numbers.counter(step, place)} if isinstance(step, int) else dict(states)


def counted_in_number(states: dict[str, Any]) -> dict[str, Any]:
    """Return states with their steps counted in an integer, as DeepSpeed's own optimizers do."""
    if "step" not in states:
        return states
    step = numbers.number_in(states["step"])
    return {**states, "step": step if (count := whole(step)) is None else count}
