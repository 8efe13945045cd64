"""All of Megatron-Core's internals that reknit uses.  Megatron may change any of them without notice."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reknit.errors import StateError
from reknit.integrations.megatron import names, sharded
from reknit.plugins.framework import imported

if TYPE_CHECKING:
    from typing import TypeAlias

    from reknit.plugins.framework import Place, World

    Pairs: TypeAlias = tuple[list[list[Any]], list[list[Any]]]

_METADATA = {"non_homogeneous_layers": True}
"""Makes Megatron give each layer its own key, even if all layers are alike."""


def module_type() -> Any:
    """Return the type of Megatron's modules."""
    return imported("megatron.core.transformer.module", "MegatronModule")


def is_module(value: Any) -> bool:
    """Return whether this is a Megatron model, or one of its wrappers around a model."""
    return isinstance(value, module_type())


def is_optimizer(value: Any) -> bool:
    """Return whether this is a Megatron optimizer, including one that chains others."""
    return isinstance(value, imported("megatron.core.optimizer.optimizer", "MegatronOptimizer"))


def is_rng_tracker(value: Any) -> bool:
    """Return whether this tracks the random generators of tensor and expert parallelism."""
    return isinstance(value, imported("megatron.core.tensor_parallel.random", "CudaRNGStatesTracker"))


def bare(module: Any, place: Place) -> Any:
    """Return a model without Megatron's wrappers.  Raises `StateError` for wrappers that shard parameters."""
    while is_module(module) and isinstance(getattr(module, "module", None), torch.nn.Module):
        if "FullyShardedDataParallel" in type(module).__name__:
            raise StateError(
                f"{place} is wrapped in Megatron's {type(module).__name__}",
                remedy="wrap it in Megatron's DistributedDataParallel with use_distributed_optimizer",
            )
        module = module.module
    return module


def require_gathered(module: Any, place: Place) -> None:
    """Raise `StateError` if this rank's parameters may lack the updates of other ranks' last step."""
    while is_module(module):
        if getattr(module, "remove_forward_pre_hook_handles", None):
            raise StateError(
                f"the parameters of {place} may be outdated: with overlap_param_gather, Megatron gathers "
                "other ranks' updates in the next forward pass",
                remedy="call disable_forward_pre_hook() of every chunk before the save, as Megatron's own "
                "training loop does, and enable_forward_pre_hook() after it",
            )
        module = getattr(module, "module", None)


def described(module: Any, place: Place) -> list[tuple[str, Any]]:
    """Return the name in this process's model and Megatron's sharded description of all that a model saves.

    Sends nothing.
    """
    states = _state()
    if states is None or not states.model_parallel_is_initialized():
        raise StateError(
            f"{place} is a Megatron model, but Megatron's process groups are not initialized",
            remedy="call parallel_state.initialize_model_parallel first",
        )
    found = bare(module, place).sharded_state_dict(metadata=dict(_METADATA))
    return [(key, one) for key, one in found.items() if sharded.is_sharded(one)]


def _state() -> Any:
    return sys.modules.get("megatron.core.parallel_state")


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The global ranks of this rank's groups, for dense layers and for experts."""

    me: int
    tensor: tuple[int, ...]
    data: tuple[int, ...]
    expert_tensor: tuple[int, ...]
    expert_data: tuple[int, ...]

    def copies(self, *, expert: bool, whole: bool) -> tuple[int, ...]:
        """Return the ranks with the same part; all tensor parallel ranks have a `whole` parameter."""
        data, tensor = (self.expert_data, self.expert_tensor) if expert else (self.data, self.tensor)
        return self._grid(data, tensor) if whole else data

    def peers(self, *, expert: bool, whole: bool) -> tuple[int, ...]:
        """Return the ranks with the same part of a parameter and the same data parallel rank."""
        if not whole:
            return (self.me,)
        return self.expert_tensor if expert else self.tensor

    def _grid(self, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks in the grid that two groups span, which share this rank."""
        return tuple(sorted(a + b - self.me for a, b in product(one, other)))


def groups(world: World) -> RankGroups:
    """Return this rank's groups."""
    state = _state()
    world.coordinate.update(
        pp=state.get_pipeline_model_parallel_rank(),
        dp=state.get_data_parallel_rank(with_context_parallel=True),
        tp=state.get_tensor_model_parallel_rank(),
    )
    ranks = torch.distributed.get_process_group_ranks
    tensor = tuple(ranks(state.get_tensor_model_parallel_group()))
    data = tuple(ranks(state.get_data_parallel_group(with_context_parallel=True)))
    if (experts := state.get_expert_data_parallel_group(check_initialized=False)) is None:
        return RankGroups(world.global_rank, tensor, data, tensor, data)
    expert_tensor = tuple(ranks(state.get_expert_tensor_parallel_group()))
    return RankGroups(world.global_rank, tensor, data, expert_tensor, tuple(ranks(experts)))


def coordinate() -> tuple[dict[str, int], dict[str, int]]:
    """Return the coordinate of this rank's random states, and the size of each of its dimensions.

    Megatron keys them by pipeline stage and tensor rank and, with expert parallelism, by data rank too.
    """
    state = _state()
    here = {"pp": state.get_pipeline_model_parallel_rank(), "tp": state.get_tensor_model_parallel_rank()}
    sizes = {
        "pp": state.get_pipeline_model_parallel_world_size(),
        "tp": state.get_tensor_model_parallel_world_size(),
    }
    if state.get_expert_model_parallel_world_size() > 1:
        here["dp"] = state.get_data_parallel_rank(with_context_parallel=True)
        sizes["dp"] = state.get_data_parallel_world_size(with_context_parallel=True)
    return here, sizes


def is_synced_with_experts(parameter: Any) -> bool:
    """Return whether a parameter's gradients are reduced over the ranks that have the same experts."""
    return not getattr(parameter, "allreduce", True)


def chained(optimizer: Any, place: Place) -> list[Any]:
    """Return the optimizers in a chain.  Raises `StateError` for kinds that reknit does not support."""
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":
        raise _unknown(optimizer, place)
    parts = getattr(optimizer, "chained_optimizers", None)
    found = [optimizer] if parts is None else [inner for part in parts for inner in chained(part, place)]
    return [one for one in found if not getattr(one, "is_stub_optimizer", False)]


def _unknown(optimizer: Any, place: Place) -> StateError:
    return StateError(
        f"{place} has a {type(optimizer).__name__}, which reknit does not support",
        remedy="pass optimizer.sharded_state_dict(model_state_dict) in its place to save and load of "
        "reknit.integrations.megatron, and the loaded one to optimizer.load_state_dict",
    )


class MainTensors(NamedTuple):
    """The tensors that an optimizer (not a chain) updates on this rank.

    `inner` is the optimizer of torch that does it.  `copies` and `views` are parameters of each group, and
    the tensors that it updates in their place: copies in float32, or views of the parameters.  `ranges` are
    the elements of parameters that this rank has, by the parameters' ids; None if it updates whole ones.
    """

    inner: Any
    copies: Pairs
    views: Pairs
    ranges: dict[int, tuple[int, int]] | None


def main_tensors(optimizer: Any, place: Place) -> MainTensors:
    """Return the tensors that an optimizer updates.  Raises `StateError` for an unsupported kind.

    Each step of Megatron copies along these lists.  Its map of places in the groups
    (`model_param_group_index_map`) has another order than the groups if these have several dtypes.
    """
    inner = optimizer.optimizer
    scaled = getattr(optimizer.config, "use_precision_aware_optimizer", False)
    if scaled or type(inner).__name__ == "HybridDeviceOptimizer":
        raise _unknown(inner if not scaled else optimizer, place)
    nothing: list[list[Any]] = [[] for _ in inner.param_groups]
    whole = nothing, nothing
    if hasattr(optimizer, "gbuf_ranges"):
        copies = optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups
        views = optimizer.model_fp32_groups, optimizer.shard_fp32_groups
        return MainTensors(inner, copies, views, _ranges(optimizer))
    if hasattr(optimizer, "fp32_from_float16_groups"):
        copies = optimizer.float16_groups, optimizer.fp32_from_float16_groups
        return MainTensors(inner, copies, whole, None)
    if type(optimizer).__name__ == "FP32Optimizer":
        return MainTensors(inner, whole, whole, None)
    raise _unknown(optimizer, place)


def _ranges(optimizer: Any) -> dict[int, tuple[int, int]]:
    return {
        id(parameter): (ranges["param"].start, ranges["param"].end)
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }


class BufferBucket(NamedTuple):
    """A bucket of a distributed optimizer, in Megatron's names.

    `numel` counts its elements without the padding at its end, and `buffer_numel` those of all buckets of
    its buffer, in which it begins at `first`.  `ranges` are the elements of this rank in the bucket, by the
    ids of the parameters that they belong to.
    """

    name: str
    buffer_name: str
    numel: int
    first: int
    buffer_numel: int
    ranges: dict[int, tuple[int, int]]


def buckets(optimizer: Any) -> list[BufferBucket]:
    """Return the buckets of a distributed optimizer; none for another."""
    found: list[BufferBucket] = []
    for number, buffer in enumerate(getattr(optimizer, "gbuf_ranges", ())):
        for dtypes, each in buffer.items():
            sizes = optimizer.per_bucket_numel_unpadded[number][dtypes]
            for place, bucket in enumerate(each):
                ranges = {
                    id(parameter): (known["gbuf_world_in_bucket"].start, known["gbuf_world_in_bucket"].end)
                    for parameter, known in bucket["param_map"].items()
                }
                name = names.bucket_name(number, str(dtypes), place)
                first, total = sum(sizes[:place]), sum(sizes)
                buffer_name = names.buffer_name(number, str(dtypes))
                found.append(BufferBucket(name, buffer_name, sizes[place], first, total, ranges))
    return found


def numbered_chain(optimizer: Any, place: Place) -> list[tuple[int, Any]]:
    """Return the optimizers in a chain with the numbers that Megatron saves them under."""
    chained(optimizer, place)
    parts = getattr(optimizer, "chained_optimizers", None)
    if parts is None:
        return [(0, optimizer)]
    if len(parts) == 1:
        return numbered_chain(parts[0], place)
    return [(n, part) for n, part in enumerate(parts) if not getattr(part, "is_stub_optimizer", False)]


def data_parallel_group_index(optimizer: Any) -> int:
    """Return the number of the data parallel group of this rank in Megatron's names of an optimizer."""
    return int(getattr(optimizer, "data_parallel_group_idx", 0))


def is_instance_of_several(optimizer: Any) -> bool:
    """Return whether several groups of data parallel ranks each hold the whole optimizer."""
    config = getattr(optimizer, "ddp_config", None)
    return getattr(config, "num_distributed_optimizer_instances", 1) > 1


def scaler(optimizer: Any) -> Any:
    """Return the loss scaler of an optimizer, or None."""
    return getattr(optimizer, "grad_scaler", None)


def counts_in_group(inner: Any) -> bool:
    """Return whether an optimizer counts its steps in the group, as those of Apex and TransformerEngine do.

    Torch's optimizers count steps, if at all, in the states of each parameter.
    """
    return not type(inner).__module__.startswith("torch.optim.")


def is_leaf(value: Any) -> bool:
    """Return whether a value in a state dict has its own adapter: a sharded part, or a live object."""
    return any(is_one(value) for is_one in (sharded.is_sharded, is_module, is_optimizer, is_rng_tracker))
