"""All of DeepSpeed's internals that reknit uses.  DeepSpeed may change any of them without notice."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from reknit.plugins.framework import imported

if TYPE_CHECKING:
    from collections.abc import Iterator

_ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"
_ZERO_3 = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"
_PIPELINE = "deepspeed.runtime.pipe.module", "PipelineModule"
_MPU = "uses model parallelism (mpu, or pipeline stages), whose layout DeepSpeed does not record"


class ZeroMember(NamedTuple):
    """A parameter in a flat group: this rank has `numel` elements from `start` on, at `offset` of it."""

    parameter: Any
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int


class FlatGroup(NamedTuple):
    """A rank's part of some parameters: `flat`, which the inner optimizer updates, and `live`.

    Both are one-dimensional and of equal length.  `live` is the memory of the model's parameters; without a
    separate copy, it is the same memory as `flat`.  `options` is the parameter group of the inner optimizer,
    and `ranks` are the ranks that hold a part each.
    """

    flat: Any
    live: Any
    options: dict[str, Any]
    ranks: tuple[int, ...]
    members: tuple[ZeroMember, ...]

    def copies(self) -> Iterator[tuple[ZeroMember, Any, Any]]:
        """Yield each member with its elements in `flat` and in `live`."""
        flat = self.flat.detach()
        for member in self.members:
            inside = slice(member.offset, member.offset + member.numel)
            yield member, flat[inside], self.live[inside]

    @property
    def is_master(self) -> bool:
        """Return whether `flat` has another dtype than the parameters: it holds master weights."""
        return bool(self.flat.dtype != self.live.dtype)

    @property
    def is_twin(self) -> bool:
        """Return whether `flat` is a copy of the parameters in separate memory, with the same dtype."""
        return not self.is_master and bool(self.flat.data_ptr() != self.live.data_ptr())


class Partition(NamedTuple):
    """This rank's partition of a ZeRO-3 parameter: `numel` elements from `start` on, then padding.

    `whole` is the gathered parameter, None while it is not gathered.
    """

    memory: Any
    shape: tuple[int, ...]
    start: int
    numel: int
    ranks: tuple[int, ...]
    whole: Any


def is_engine(module: Any) -> bool:
    """Return whether a module is an engine of `deepspeed.initialize`."""
    return isinstance(module, imported("deepspeed.runtime.engine", "DeepSpeedEngine"))


def optimizer_type() -> Any:
    """Return the base type of the optimizers in which DeepSpeed wraps others."""
    return imported("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer")


def is_optimizer(value: Any) -> bool:
    """Return whether this is an optimizer in which DeepSpeed wraps another one."""
    return isinstance(value, optimizer_type())


def stepped_by(engine: Any) -> Any:
    """Return an engine's optimizer, or None: ZeRO-3 without one keeps its parameter offload there instead."""
    offload = imported("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload")
    return None if isinstance(engine.optimizer, offload) else engine.optimizer


def engine_ranks(engine: Any) -> tuple[int, ...]:
    """Return the ranks among which an engine averages gradients."""
    return _ranks(engine.seq_data_parallel_group)


def module_flaw(module: Any) -> str | None:
    """Return the feature of a DeepSpeed module that hides names or layouts, None without one."""
    if isinstance(module, imported(*_PIPELINE)):
        return "is a PipelineModule, which has only some layers on each rank"
    if not is_engine(module):
        return None
    if isinstance(module.module, imported(*_PIPELINE)):
        return "is an engine of a PipelineModule, which has only some layers on each rank"
    if module.has_moe_layers:
        return "has mixture-of-experts layers, whose experts have the same names on every rank"
    return _MPU if module.mp_world_size > 1 else None


def parameter_flaw(parameter: Any) -> str | None:
    """Return the DeepSpeed feature that hides a parameter's layout, None without one."""
    if getattr(parameter, "ds_is_replaced_module", False):
        return "is sharded by DeepSpeed's automatic tensor parallelism"
    if hasattr(parameter, "group_name") and not getattr(parameter, "allreduce", True):
        return "belongs to a mixture-of-experts layer, whose experts have the same names on every rank"
    if (has_copies(parameter) or is_partitioned(parameter)) and _has_model_parallelism():
        return _MPU
    if not is_partitioned(parameter):
        return None
    if getattr(parameter, "ds_zero_param_process_group", None) is not None:
        return "has secondary partitions (zero_hpz_partition_size)"
    kept = parameter.ds_tensor
    if hasattr(kept, "ds_quant_scale"):
        return "is quantized (zero_quantized_nontrainable_weights)"
    if kept.final_location == "nvme" or kept.status.name != "AVAILABLE":
        return "is offloaded to NVMe"
    if parameter.ds_status.name == "INFLIGHT":
        return "is being gathered"
    return None


def optimizer_flaw(optimizer: Any) -> str | None:
    """Return why the states of a DeepSpeed optimizer cannot be read, None if they can."""
    kind = type(optimizer)
    if not any(kind is imported(*place) for place in (_ZERO_1_2, _ZERO_3, _BF16)):
        return f"is a {kind.__name__}, not the optimizer of ZeRO stage 1, 2 or 3"
    if getattr(optimizer, "zenflow", False):
        return "updates some columns separately (ZenFlow)"
    if _is_model_parallel(optimizer):
        return _MPU
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        return "is offloaded to NVMe"
    if getattr(optimizer, "offloaded_states", None):
        return "has offloaded its states (offload_states)"
    if getattr(optimizer, "has_moe_layers", False):
        return "has mixture-of-experts layers"
    return None


def _has_model_parallelism() -> bool:
    """Return whether an engine of this process got an mpu that splits the model: it is global."""
    groups: Any = sys.modules["deepspeed.utils.groups"]
    return bool(groups._get_model_parallel_world_size() > 1)


def _is_model_parallel(optimizer: Any) -> bool:
    if hasattr(optimizer, "model_parallel_group"):
        group = optimizer.model_parallel_group
    else:
        # An mpu that DeepSpeed recognizes as pure sequence parallelism does not split the model.
        splits = optimizer.mpu is not None and not hasattr(optimizer.mpu, "initialize_sequence_parallel")
        group = optimizer.mpu.get_model_parallel_group() if splits else None
    return group is not None and len(_ranks(group)) > 1


def inner(optimizer: Any) -> Any:
    """Return the torch optimizer that updates the flat groups."""
    return optimizer.optimizer


def names(optimizer: Any) -> dict[Any, str]:
    """Return the parameters' names in the engine's module."""
    found: dict[Any, str] = optimizer.param_names
    return found


def is_partitioned(parameter: Any) -> bool:
    """Return whether a parameter is partitioned by ZeRO-3."""
    return hasattr(parameter, "ds_id")


def has_copies(parameter: Any) -> bool:
    """Return whether a ZeRO-1 or ZeRO-2 optimizer keeps a copy of its share of a parameter."""
    return hasattr(parameter, "_hp_mapping")


def partition(parameter: Any) -> Partition:
    """Return this rank's partition of a ZeRO-3 parameter."""
    kept = parameter.ds_tensor
    ranks = _ranks(parameter.ds_process_group)
    length = kept.ds_numel
    start = min(dist.get_rank(parameter.ds_process_group) * length, parameter.ds_numel)
    numel = min(length, parameter.ds_numel - start)
    whole = parameter.data if parameter.ds_status.name == "AVAILABLE" else None
    return Partition(kept.data, tuple(parameter.ds_shape), start, numel, ranks, whole=whole)


def owner(parameter: Any) -> Any:
    """Return the optimizer of a ZeRO-3 parameter, or None."""
    return getattr(parameter, "_z3_optimizer", None)


def flat_groups(optimizer: Any) -> tuple[FlatGroup, ...]:
    """Return this rank's part of all parameters.

    Raises `ValueError` for a parameter that no longer lies in the memory that DeepSpeed allocated for it.
    """
    if type(optimizer) is imported(*_ZERO_3):
        return tuple(_partitioned_groups(optimizer))
    return tuple(_replicated_groups(optimizer))


def _replicated_groups(optimizer: Any) -> Iterator[FlatGroup]:
    """Yield the groups of ZeRO-1 and ZeRO-2, whose whole parameters lie one after another in flat memory.

    The parameters' addresses give their offsets: with round_robin_gradients, their order differs from
    DeepSpeed's own mapping (`_hp_mapping`).
    """
    if type(optimizer) is imported(*_BF16):
        columns = (optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition)
    else:
        columns = (
            optimizer.bit16_groups,
            optimizer.bit16_groups_flat,
            optimizer.single_partition_of_fp32_groups,
        )
    options = inner(optimizer).param_groups
    rows = zip(*columns, optimizer.real_dp_process_group, options, strict=True)
    for parameters, whole, flat, group, option in rows:
        begin, length = dist.get_rank(group) * flat.numel(), flat.numel()
        members = []
        for parameter in parameters:
            at = _offset(parameter, whole)
            start = min(max(begin - at, 0), parameter.numel())
            end = min(max(begin + length - at, 0), parameter.numel())
            shape = tuple(parameter.shape)
            members.append(ZeroMember(parameter, shape, start, end - start, max(at - begin, 0)))
        live = whole.narrow(0, begin, length)
        yield FlatGroup(flat, live, option, _ranks(group), tuple(members))


def _partitioned_groups(optimizer: Any) -> Iterator[FlatGroup]:
    """Yield the sub-groups of ZeRO-3, in which the partitions of the parameters lie one after another."""
    options = inner(optimizer).param_groups
    columns = zip(
        optimizer.fp16_groups,
        optimizer.fp16_partitioned_groups_flat,
        optimizer.fp32_partitioned_groups_flat,
        strict=True,
    )
    for number, (parameters, live, flat) in enumerate(columns):
        members, offset = [], 0
        for parameter in parameters:
            part = partition(parameter)
            if _offset(part.memory, live) != offset:
                raise ValueError("is not at its place in the flat memory of its sub-group")
            members.append(ZeroMember(parameter, part.shape, part.start, part.numel, offset))
            offset += part.memory.numel()
        ranks = partition(parameters[0]).ranks
        yield FlatGroup(flat, live, options[optimizer.sub_group_to_group_id[number]], ranks, tuple(members))


def _offset(tensor: Any, flat: Any) -> int:
    """Return the element at which a tensor begins in flat memory."""
    nbytes = tensor.data_ptr() - flat.data_ptr()
    offset, rest = divmod(nbytes, flat.element_size())
    inside = 0 <= offset <= flat.numel() - tensor.numel()
    if rest or not inside or not tensor.is_contiguous() or tensor.dtype != flat.dtype:
        raise ValueError("does not lie in the flat memory of its group any more")
    return int(offset)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def release(parameters: list[Any]) -> None:
    """Free gathered ZeRO-3 parameters until they are needed again.  Sends nothing."""
    for parameter in parameters:
        if parameter.ds_status.name == "AVAILABLE":
            if (optimizer := owner(parameter)) is not None:
                optimizer.parameter_offload.partition_all_parameters()
            else:
                parameter.partition()


def relink(optimizer: Any) -> None:
    """Point DeepSpeed's own per-parameter view of the states, if it has one, at the current states."""
    if type(optimizer) is imported(*_ZERO_3):
        return
    optimizer._hp_optimizer_states_linked = False
    state = inner(optimizer).state
    if all(state.get(group.flat) for group in flat_groups(optimizer)):
        optimizer._lazy_init_hp_params_optimizer_state()


def steps_are_numbers(optimizer: Any) -> bool:
    """Return whether the inner optimizer is DeepSpeed's own, which counts steps in plain numbers."""
    return type(inner(optimizer)).__module__.startswith("deepspeed.ops")


_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def progress(engine: Any) -> dict[str, dict[str, Any]]:
    """Return an engine's counters, and the state of its loss scaler if it has one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "loss_scaler": {name: getattr(scaler, name) for name in _SCALER if hasattr(scaler, name)},
    }


def set_progress(engine: Any, saved: dict[str, dict[str, Any]]) -> None:
    """Set an engine's counters and loss scaler; fields that its loss scaler lacks are left out."""
    for name, value in saved["counters"].items():
        setattr(engine, name, value)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for name, value in saved["loss_scaler"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
