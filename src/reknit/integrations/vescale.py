"""Optimizers of veScale: the flat ranges, inside tensor-parallel boxes, that each rank steps.

This module supports veScale 0.0.1 and code that its users built on it.  Its DTensors are read by `dtensor`
like torch's. Its DistributedOptimizer cuts the flattened local tensors of all parameters evenly over the
data-parallel ranks, anywhere in a tensor (the irregular tensors of ByteCheckpoint, NSDI'25, section 4.4).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.frameworks.torch import dtensor, slots
from reknit.plugins.framework import FlatPart, OptimizerAdapter, ParamSlot, Slots, imported, inner_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.plugins.framework import Adapter, Place, Walk


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of veScale's optimizers; its modules and tensors are read like torch's."""
    return OptimizerAdapter(_is_distributed, read), OptimizerAdapter(_is_basic, _read_basic)


def _is_basic(value: Any) -> bool:
    """Return whether this is a wrapper around a torch optimizer, which has all the states itself."""
    return isinstance(value, imported("vescale.optim.base_optimizer", "BasicOptimizer"))


def _read_basic(value: Any, place: Place, walk: Walk) -> Slots:
    return slots.read(value.optimizer, place, walk)


def _is_distributed(value: Any) -> bool:
    """Return whether this is an optimizer with states that are cut over the data-parallel ranks."""
    return isinstance(value, imported("vescale.optim.distributed_optimizer", "DistributedOptimizer"))


def read(optimizer: Any, place: Place, walk: Walk) -> Slots:
    """Return the parameters, each with the range that this rank steps.  Sends nothing.

    Raises `StateError` between a step and the next forward pass, which fetches the parameters that other
    ranks stepped. Raises it, too, for an optimizer that has other parameters now than when it cut them.
    """
    _require_gathered(optimizer, place)
    names = _names(optimizer, place, walk)
    shares = {id(share.parameter): share for share in _shares(optimizer, place)}
    groups = optimizer.param_groups
    kind = inner_kind(optimizer.optimizer, place)
    each, elsewhere = [], []
    for key, (parameter, name, places) in names.items():
        share = shares.get(key)
        # The group of a parameter that another rank steps is unknown, unless there is only one group.
        if share is None and parameter.requires_grad and len(groups) == 1:
            share = SteppedRange(parameter, parameter, groups[0], 0, 0)
        if share is not None:
            each.append(_slot(share, name, places, kind, place, walk=walk))
        elif parameter.dtype == torch.float32:
            elsewhere.append((name, places))
    return Slots(
        optimizer.optimizer.state,
        groups,
        tuple(each),
        lambda: _refresh(shares.values()),
        elsewhere=elsewhere,
        kind=kind,
    )


class SteppedRange(NamedTuple):
    """The part of a parameter that this rank steps: the elements from `start` to `end` of its local tensor.

    `stepped` is the tensor in the inner optimizer: a view of those elements, or a copy in another precision.
    """

    parameter: Any
    stepped: torch.Tensor
    group: dict[str, Any]
    start: int
    end: int


def _shares(optimizer: Any, place: Place) -> Iterator[SteppedRange]:
    """Yield the ranges that this rank steps, as the optimizer cut them when it was made."""
    for number, group in enumerate(optimizer.param_groups):
        known = {id(stepped) for stepped in group["params"]}
        whole = zip(optimizer.model_fp32_groups[number], optimizer.shard_fp32_groups[number], strict=True)
        cast = zip(
            optimizer.model_float16_groups[number], optimizer.shard_casted_float16_groups[number], strict=True
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


def _slot(
    share: SteppedRange,
    name: str,
    places: tuple[Place, ...],
    kind: tuple[str, ...],
    place: Place,
    *,
    walk: Walk,
) -> ParamSlot:
    parameter, stepped, start, numel = share.parameter, share.stepped, share.start, share.end - share.start
    local, at, alone = _local(parameter), place.child("state", name), walk.world.alone
    if numel and (stepped.numel() != numel or share.end > local.numel()):
        raise StateError(
            f"{at} has {stepped.numel()} elements on this rank, and for veScale it has those from "
            f"{start} to {share.end} of {local.numel()}",
            remedy="make the DistributedOptimizer after the last change of its model",
        )
    held = dtensor.held_boxes(parameter, tuple(local.shape), at, walk.world) if numel else None
    part = FlatPart.range_of(
        tuple(parameter.shape), start, numel, 0, numel, local=tuple(local.shape), held=held
    )
    master = stepped if numel and stepped.dtype != parameter.dtype else None
    return ParamSlot(
        name,
        stepped,
        stepped,
        share.group,
        alone,
        places=places,
        flat=part,
        counter=alone,
        master=master,
        kind=kind,
    )


def _local(parameter: Any) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    with torch.no_grad():
        local: torch.Tensor = parameter.to_local()
    return local


def _names(optimizer: Any, place: Place, walk: Walk) -> dict[int, tuple[Any, str, tuple[Place, ...]]]:
    """Return all parameters by their ids, each with its name and its places in the state.

    Parameters without a module in the state have their names in the optimizer's own models.
    """
    pairs = [pair for model in optimizer.models for pair in model.module.named_parameters()]
    own = {id(parameter): key for key, parameter in pairs}
    found = {id(parameter): (parameter, *slots.named(parameter, own, walk)) for _, parameter in pairs}
    if len({name for _, name, _ in found.values()}) < len(found):
        raise StateError(
            f"two parameters of the optimizer {place} have one name",
            remedy="give the stages of a pipeline names that go on from one to the next",
        )
    return found


def _require_gathered(optimizer: Any, place: Place) -> None:
    """Raise `StateError` if this rank's parameters lack the updates of other ranks' last step."""
    handles, copied = optimizer.all_gather_handles, optimizer.param_buffer_copied
    fetching = handles and not (len(copied) == optimizer.num_all_gather_handles and all(copied))
    if optimizer.overlap_param_gather and (optimizer.step_issued or fetching):
        raise StateError(
            f"the parameters of the optimizer {place} are outdated: with overlap_param_gather, veScale "
            "gathers other ranks' updates in the next forward pass",
            remedy="save and load between a forward pass and the step, or set overlap_param_gather=False",
        )


def _refresh(shares: Any) -> None:
    """Copy loaded parameters to those stepped copies that have the same precision."""
    for share in shares:
        local = _local(share.parameter).reshape(-1)[share.start : share.end]
        if share.stepped.dtype == local.dtype and share.stepped.data_ptr() != local.data_ptr():
            with torch.no_grad():
                share.stepped.copy_(local)
