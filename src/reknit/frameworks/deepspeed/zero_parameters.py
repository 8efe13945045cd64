"""Parameters of DeepSpeed engines, whole or partitioned, and the copies that optimizers update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.deepspeed import deepspeed_private
from reknit.frameworks.torch.flat_part import FlatPart
from reknit.frameworks.torch.modules.flat_parameter import FlatParameter
from reknit.frameworks.torch.tensor_numbers import same
from reknit.types.dtype import converts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.deepspeed.deepspeed_private import FlatGroup
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.walk import Place, Walk, World

_MASTERS = "masters of DeepSpeed"
"""Key of a walk's memo: the places from which each parameter's master weights are loaded."""


Copies = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By parameter id: the elements that an optimizer updates, and those of the parameter itself."""


class DeepSpeedModules:
    """DeepSpeed engines, and modules whose parameters they have partitioned."""

    def is_wrapper(self, module: Any) -> bool:
        """Return whether a module is an engine."""
        return deepspeed_private.is_engine(module)

    def ranks(self, wrapper: Any) -> tuple[int, ...]:
        """Return the ranks among which an engine averages gradients."""
        return deepspeed_private.engine_ranks(wrapper)

    def require_readable(self, module: nn.Module, place: Place) -> None:
        """Raise `StateError` for DeepSpeed features whose names or layouts reknit cannot determine."""
        for path, inner in module.named_modules():
            flaw = deepspeed_private.module_flaw(inner)
            if flaw is not None:
                raise StateError(
                    f"the module {path or 'at the root'} of {place} {flaw}",
                    remedy="turn that feature off, or use DeepSpeed's own save_checkpoint, without take_over",
                )
        for name, parameter in module.named_parameters():
            flaw = deepspeed_private.parameter_flaw(parameter)
            if flaw is not None:
                raise StateError(
                    f"the parameter {name} of {place} {flaw}; reknit cannot determine this rank's part of it",
                    remedy="turn that feature off, or use DeepSpeed's own save_checkpoint, without take_over",
                )

    def is_partitioned(self, parameter: Any) -> bool:
        """Return whether a parameter is partitioned by ZeRO-3."""
        return deepspeed_private.is_partitioned(parameter)

    def partitioned(
        self, parameter: Any, names: tuple[str, ...], place: Place, world: World
    ) -> FlatParameter:
        """Return this rank's part of a ZeRO-3 parameter.

        Raises `StateError` if the gathered parameter, which the caller may be changing, differs from its
        partitions.
        """
        found = deepspeed_private.partition(parameter)
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
        release = partial(deepspeed_private.release, [parameter])
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
        copied = [parameter for parameter in arriving if deepspeed_private.has_copies(parameter)]
        copied += [parameter for parameter in arriving if deepspeed_private.owner(parameter) is not None]
        if not copied:
            return
        copies = _copies(place, loading, copied)
        places = {id(parameter): at for parameter, at in parameters}
        for parameter in copied:
            if id(parameter) not in copies and deepspeed_private.has_copies(parameter):
                raise StateError(
                    f"{places[id(parameter)]} has a copy in the optimizer of its DeepSpeed engine. That "
                    "optimizer is not in the state, so its next step would undo the load",
                    remedy="put the engine itself into the state, or engine.optimizer beside its module",
                )
        loading.later(lambda: _refresh(copied, copies, loading))


def groups(optimizer: Any, place: Place, walk: Walk) -> tuple[FlatGroup, ...]:
    """Return the flat groups of a DeepSpeed optimizer.  Raises `StateError` if it is not supported."""
    return walk.world.once(("DeepSpeed", id(optimizer)), lambda: _groups(optimizer, place))


def _groups(optimizer: Any, place: Place) -> tuple[FlatGroup, ...]:
    flaw = deepspeed_private.optimizer_flaw(optimizer)
    if flaw is not None:
        raise StateError(
            f"the optimizer {place} {flaw}; reknit cannot determine which parameters its states belong to",
            remedy="use ZeRO stage 1, 2 or 3 with its states in memory; after offload_states, call "
            "engine.reload_states()",
        )
    try:
        return deepspeed_private.flat_groups(optimizer)
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
        if deepspeed_private.is_optimizer(engine.optimizer):
            flaw = deepspeed_private.optimizer_flaw(engine.optimizer)
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
            if deepspeed_private.is_engine(inner):
                yield inner, place.child(path) if path else place


def _copies(place: Place, loading: Loading, parameters: list[Any]) -> Copies:
    """Return the copies in all DeepSpeed optimizers that the state contains or refers to."""
    found = [optimizer for optimizer, _ in loading.find(deepspeed_private.optimizer_type())]
    found += [engine.optimizer for engine, _ in _engines(loading)]
    found += [deepspeed_private.owner(parameter) for parameter in parameters]
    known = {id(one): one for one in found if deepspeed_private.is_optimizer(one)}
    return {
        id(member.parameter): (stepped, live)
        for optimizer in known.values()
        for group in groups(optimizer, place, loading)
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
    for group in groups(optimizer, place, walk):
        copies = group.copies() if group.is_twin else ()
        if not all(same(stepped.to(live.device), live) for _, stepped, live in copies):
            raise StateError(
                f"the optimizer {place} has other weights than the model: one of the two was changed alone",
                remedy="if the model is right, call engine.optimizer.refresh_fp32_params(); if the optimizer "
                "is, engine.optimizer.update_lp_params() (ZeRO-1, ZeRO-2)",
            )
