"""The tiny model of the layout matrix in DeepSpeed engines, really trained, with its whole state.

`build("z2-bf16")` makes an engine on all ranks of the job.  `truth(engine)` is its whole state as gathered by
DeepSpeed's own collectives, keyed like reknit's fqns.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.torchrun import models

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

LAYOUTS = [f"z{stage}-{precision}" for stage in (1, 2, 3) for precision in ("fp32", "bf16")]


def deepspeed() -> Any:
    """Import DeepSpeed, on the CPU and without compiling anything."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="1")
    module = import_module("deepspeed")
    if module.ops.__compatible_ops__["deepspeed_shm_comm"]:
        module.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Every engine of ZeRO-3 collects garbage, which takes half a second with so many modules.
        gc.freeze()
    return module


def config(stage: int, precision: str, **zero: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }


def build(layout: str, *, steps: int = 2, seed: int = 0, one_group: bool = False, **more: Any) -> Any:
    """Build the model in an engine on this rank, and train it.  `more` goes into the config."""
    torch.manual_seed(seed)
    stage, precision = layout.removeprefix("z").split("-")
    zero = more.pop("zero", {})
    return engine_of(
        models.Tiny(), {**config(int(stage), precision, **zero), **more}, steps=steps, one_group=one_group
    )


def engine_of(model: nn.Module, how: dict[str, Any], *, steps: int, one_group: bool = False) -> Any:
    """Put a model into an engine with the groups, options and scheduler that all layouts have."""
    trained = models._finished("1group-z" if one_group else "z", model, dist.get_rank())
    engine, *_ = deepspeed().initialize(
        model=model, optimizer=trained.optimizers[0], lr_scheduler=trained.schedulers[0], config=how
    )
    for number in range(steps):
        train_step(engine, number)
    return engine


def train_step(engine: Any, number: int) -> float:
    """Take one step on the batch of this rank and this number."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + number)
    ids = torch.randint(0, models.VOCABULARY, (4, 5), generator=generator)
    loss = models.loss_of(engine(ids).float(), ids)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def state(engine: Any) -> dict[str, Any]:
    """Return the state that a user would save."""
    return {"model": engine, "optimizer": engine.optimizer, "scheduler": engine.lr_scheduler}


def truth(engine: Any) -> dict[str, dict[str, Any]]:
    """Return the whole state by item and fqn, the same on every rank, as DeepSpeed gathers it.

    The counter of steps is taken from the flat group that a parameter is in: DeepSpeed has no getter for it.
    """
    get = import_module("deepspeed.utils")
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    found: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    found["model"] |= {
        name: buffer.clone() for name, buffer in engine.module.state_dict().items() if "seen" in name
    }
    inner = engine.optimizer.optimizer
    if inner.state and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # With several parameter groups, DeepSpeed only looks for states in the first one.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for parameter, name in names.items():
        found["model"][name] = whole(parameter)
        master = get.safe_get_full_fp32_param(parameter)
        if parameter.dtype != torch.float32:
            found["optimizer"][f"state/{name}/master"] = master.reshape(shape(parameter)).clone()
        elif not torch.equal(master.reshape(shape(parameter)), found["model"][name]):
            found["optimizer"][f"state/{name}/stale"] = master
        for key in ("exp_avg", "exp_avg_sq") if inner.state else ():
            full = get.safe_get_full_optimizer_state(parameter, key)
            found["optimizer"][f"state/{name}/{key}"] = full.reshape(shape(parameter)).clone()
        for flat, group in flats(engine, parameter):
            if inner.state:
                found["optimizer"][f"state/{name}/step"] = torch.as_tensor(inner.state[flat]["step"]).clone()
            options = {k: v for k, v in group.items() if k not in ("params", "foreach", "fused")}
            found["optimizer"][f"param_groups/{name}"] = options
    return found


def unlike(engine: Any, expected: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names under which this rank does not hold its part of `expected`.  Sends nothing."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    wrong = [f"state/{name}" for name in names.values() if not engine.optimizer.optimizer.state]
    seen = {name: buffer for name, buffer in engine.module.state_dict().items() if "seen" in name}
    wrong += [name for name, buffer in seen.items() if not torch.equal(buffer, expected["model"][name])]
    for parameter, name in names.items():
        ((flat, group),) = flats(engine, parameter)
        options = {k: v for k, v in group.items() if k not in ("params", "foreach", "fused")}
        if options != expected["optimizer"][f"param_groups/{name}"]:
            wrong.append(f"param_groups/{name}")
        step = torch.as_tensor(engine.optimizer.optimizer.state[flat]["step"])
        if not torch.equal(step, expected["optimizer"][f"state/{name}/step"]):
            wrong.append(f"state/{name}/step")
        mine = dict(held(parameter))
        for key in ("exp_avg", "exp_avg_sq", *(["master"] if parameter.dtype != torch.float32 else [])):
            if not _same(mine[key], expected["optimizer"][f"state/{name}/{key}"]):
                wrong.append(f"state/{name}/{key}")
        if not _same(mine["model"], expected["model"][name]):
            wrong.append(name)
        if parameter.dtype == torch.float32 and not _same(mine["master"], expected["model"][name]):
            wrong.append(f"state/{name}/stale")
    known = {
        f"state/{name}/{key}"
        for name in names.values()
        for key in ("exp_avg", "exp_avg_sq", "step", "master")
    }
    known |= {f"param_groups/{name}" for name in names.values()}
    return [*wrong, *sorted(set(expected["optimizer"]) - known)]


def held(parameter: Any) -> Iterator[tuple[str, tuple[int, torch.Tensor]]]:
    """Yield this rank's parts of a parameter and their starts in it, by DeepSpeed's own mapping."""
    get = import_module("deepspeed.utils")
    keys = ("exp_avg", "exp_avg_sq")
    if hasattr(parameter, "ds_id"):
        start = dist.get_rank() * parameter.ds_tensor.ds_numel
        cut = slice(0, max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start)))
        yield "model", (start, parameter.ds_tensor[cut])
        yield "master", (start, get.safe_get_local_fp32_param(parameter)[cut])
        yield from ((key, (start, get.safe_get_local_optimizer_state(parameter, key)[cut])) for key in keys)
        return
    yield "model", (0, parameter.detach().reshape(-1))
    mapping = parameter._hp_mapping
    start = 0 if mapping is None else mapping.lp_fragment_address.start
    nothing = torch.empty(0)
    yield "master", (start, nothing if mapping is None else mapping.get_hp_fragment().detach())
    for key in keys:
        yield key, (start, nothing if mapping is None else mapping.get_optim_state_fragment(key))


def _same(held: tuple[int, torch.Tensor], expected: torch.Tensor) -> bool:
    start, mine = held
    part = expected.reshape(-1)[start : start + mine.numel()]
    return not mine.numel() or (mine.dtype == part.dtype and torch.equal(mine, part))


def whole(parameter: Any) -> torch.Tensor:
    """Return a whole parameter of the model in its own precision."""
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().clone()  # type: ignore[no-any-return]
    parts = [torch.empty_like(parameter.ds_tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, parameter.ds_tensor.detach().clone())
    return torch.cat(parts)[: parameter.ds_numel].reshape(parameter.ds_shape)


def shape(parameter: Any) -> torch.Size:
    return parameter.ds_shape if hasattr(parameter, "ds_id") else parameter.shape  # type: ignore[no-any-return]


def flats(engine: Any, parameter: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the flat group that a parameter is in, with its options."""
    optimizer = engine.optimizer
    if hasattr(parameter, "ds_id"):
        groups, tensors = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
        numbers = [optimizer.sub_group_to_group_id[n] for n in range(len(groups))]
    elif hasattr(optimizer, "bf16_groups"):
        groups, tensors = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        numbers = list(range(len(groups)))
    else:
        groups, tensors = optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups
        numbers = list(range(len(groups)))
    options = optimizer.optimizer.param_groups
    return [
        (tensor, options[number])
        for members, tensor, number in zip(groups, tensors, numbers, strict=True)
        if any(member is parameter for member in members)
    ]
