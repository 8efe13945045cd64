"""Optimizers of veScale: the flat ranges, inside tensor-parallel boxes, that each rank steps.

This is veScale 0.0.1 and what its users built on it: DTensors of its own, which `dtensor` reads as torch's,
and a DistributedOptimizer that cuts the flattened local tensors of all parameters evenly over the
data-parallel ranks, wherever that falls (the irregular tensors of ByteCheckpoint, NSDI'25, section 4.4).
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.frameworks.optimizer import protocol as optimizer_protocol
from reknit.frameworks.optimizer.slots import ParamSlot, Slots
from reknit.frameworks.optimizer.slots import read as read_torch
from reknit.frameworks.optimizer.states import OptimizerAdapter
from reknit.frameworks.torch import dtensor
from reknit.frameworks.torch.flat import FlatPart
from reknit.frameworks.torch.modules.members import parameters
from reknit.frameworks.torch.modules.names import without_wrappers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.frameworks.walk.adapter import Adapter
    from reknit.frameworks.walk.loading import Loading
    from reknit.frameworks.walk.walk import Assign, Place, Walk


def adapters() -> tuple[Adapter, ...]:
    """Return what knows veScale's optimizers; its modules and tensors are known as torch's are."""
    return DistributedOptimizerAdapter(DistributedOptimizers()), OptimizerAdapter(BasicOptimizers())


class BasicOptimizers:
    """veScale's wrapper around a torch optimizer, which has all the states itself."""

    def matches(self, value: Any) -> bool:
        """Tell whether this is one, without importing what defines them."""
        return _is(value, "vescale.optim.base_optimizer", "BasicOptimizer")

    def read(self, value: Any, place: Place, walk: Walk) -> Slots:
        """Return the parameters of the optimizer inside."""
        return read_torch(value.optimizer, place, walk)


class DistributedOptimizers:
    """veScale's optimizers whose states are cut over the data-parallel ranks."""

    def matches(self, value: Any) -> bool:
        """Tell whether this is one, without importing what defines them."""
        return _is(value, "vescale.optim.distributed_optimizer", "DistributedOptimizer")

    def read(self, value: Any, place: Place, walk: Walk) -> Slots:
        """Return the parameters, each with the range of it that this rank steps.  Sends nothing.

        Raises `StateError` between a step and the forward that fetches the parameters which others stepped,
        and for an optimizer that was given other parameters than it cut.
        """
        _require_gathered(value, place)
        names = _names(value, place, walk)
        shares = {id(share.parameter): share for share in _shares(value, place)}
        every = [parameter for model in value.models for parameter in model.module.parameters()]
        groups = value.param_groups
        kind = optimizer_protocol.inner_kind(value.optimizer, place)
        each = []
        for parameter in every:
            share = shares.get(id(parameter))
            # Whose group a parameter is in that others step is known where there is only one.
            if share is None and parameter.requires_grad and len(groups) == 1:
                share = SteppedRange(parameter, parameter, groups[0], 0, 0)
            if share is not None:
                each.append(_slot(share, names[id(parameter)], kind, place, walk))
        return Slots(value.optimizer.state, groups, tuple(each), lambda: _refresh(shares.values()))


class DistributedOptimizerAdapter(OptimizerAdapter):
    """Optimizers whose states are cut over the data-parallel ranks."""

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Ask for states and options, and for all parameters in the precision that their owners take."""
        names = _names(value, place, loading)
        for model in value.models:
            for parameter in model.module.parameters():
                at = place.child("state", names[id(parameter)], "master")
                if loading.saved.spec(at) is not None and parameter.dtype == torch.float32:
                    loading.prefer(at, _places(parameter, loading))
        super().wanted(value, place, loading, assign)


class SteppedRange(NamedTuple):
    """What this rank steps of a parameter: the elements from `start` to `end` of its local tensor.

    `stepped` is the tensor that the inner optimizer knows: a view of those elements, or a copy of them in
    another precision.
    """

    parameter: Any
    stepped: torch.Tensor
    group: dict[str, Any]
    start: int
    end: int


def _is(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _shares(optimizer: Any, place: Place) -> Iterator[SteppedRange]:
    """Yield what this rank steps, as the optimizer cut it when it was made."""
    for number, group in enumerate(optimizer.param_groups):
        known = {id(stepped) for stepped in group["params"]}
        whole = zip(optimizer.model_fp32_groups[number], optimizer.shard_fp32_groups[number], strict=True)
        cast = zip(
            optimizer.model_float16_groups[number],
            optimizer.shard_casted_float16_groups[number],
            strict=True,
        )
        pairs = list(chain(whole, cast))
        if known != {id(stepped) for _, stepped in pairs}:
            raise StateError(
                f"group {number} of the optimizer {place} has other parameters than veScale put into it",
                remedy="make a new DistributedOptimizer when parameters come or go",
            )
        for parameter, stepped in pairs:
            span = optimizer.get_model_param_range_map(parameter)["param"]
            yield SteppedRange(parameter, stepped, group, span.start, span.end)


def _slot(share: SteppedRange, name: str, kind: tuple[str, ...], place: Place, walk: Walk) -> ParamSlot:
    parameter, numel = share.parameter, share.end - share.start
    local = _local(parameter)
    part = FlatPart.nothing(tuple(parameter.shape), 0)
    if numel:
        at = place.child("state", name)
        held = dtensor.held(parameter, tuple(local.shape), at)
        part = FlatPart(tuple(parameter.shape), tuple(local.shape), held, None, share.start, numel, 0, numel)
        if share.stepped.numel() != numel or share.end > local.numel():
            raise StateError(
                f"{at} has {share.stepped.numel()} elements on this rank, and veScale says that it has "
                f"those from {share.start} to {share.end} of {local.numel()}",
                remedy="make the DistributedOptimizer after the last change of its model",
            )
    master = share.stepped if numel and share.stepped.dtype != parameter.dtype else None
    return ParamSlot(
        name, share.stepped, share.stepped, share.group, walk.world.alone, _places(parameter, walk), part,
        counter=walk.world.alone, master=master, kind=kind,
    )  # fmt: skip


def _local(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    with torch.no_grad():
        local: torch.Tensor = parameter.to_local()
    return local


def _places(parameter: Any, walk: Walk) -> tuple[Place, ...]:
    return next((named.places for named in parameters(walk).get(id(parameter), ())), ())


def _names(optimizer: Any, place: Place, walk: Walk) -> dict[int, str]:
    """Return the names of all parameters: those that modules in the state give, else the models' own."""
    named = parameters(walk)
    names: dict[int, str] = {}
    for model in optimizer.models:
        for key, parameter in model.module.named_parameters():
            known = named.get(id(parameter))
            names[id(parameter)] = known[0].name if known else without_wrappers(key)
    if len(set(names.values())) < len(names):
        raise StateError(
            f"two parameters of the optimizer {place} have one name",
            remedy="give the stages of a pipeline names that go on from one to the next",
        )
    return names


def _require_gathered(optimizer: Any, place: Place) -> None:
    """Refuse parameters of which this rank has old elements, that others have stepped."""
    handles, copied = optimizer.all_gather_handles, optimizer.param_buffer_copied
    fetching = handles and not (len(copied) == optimizer.num_all_gather_handles and all(copied))
    if optimizer.overlap_param_gather and (optimizer.step_issued or fetching):
        raise StateError(
            f"the parameters of the optimizer {place} are on their way: with overlap_param_gather, veScale "
            "fetches what other ranks stepped in the next forward",
            remedy="save and load after a forward, before the step; or set overlap_param_gather=False",
        )


def _refresh(shares: Any) -> None:
    """Copy what was loaded into the parameters to the copies of the same precision that are stepped."""
    for share in shares:
        local = _local(share.parameter).reshape(-1)[share.start : share.end]
        if share.stepped.dtype == local.dtype and share.stepped.data_ptr() != local.data_ptr():
            with torch.no_grad():
                share.stepped.copy_(local)
