"""Unsupported objects of DeepSpeed are refused on every rank, before anything is written or changed.

The objects are DeepSpeed's own.  SuperOffload asks for a GPU and starts a process of its own, and quantized
weights need a kernel.  These three are replaced here, and the engines around them are real.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reknit
from reknit.errors import StateError
from reknit.integrations import deepspeed as integration
from tests.deepspeed import engines
from tests.optional import needs
from tests.rank_cases import Cases

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs("deepspeed", "DeepSpeed")

WORLD = 2
CASES = Cases()
case = CASES.add
SAVE = reknit.SaveOptions(durability="process", threads=1, timeout_s=60)


def run_cases(root: str) -> dict[str, str]:
    engines.deepspeed().init_distributed("gloo")
    net = Net()
    reknit.save(f"{root}/good", {"m": net, "o": _trained(net)}, options=SAVE)
    return CASES.tracebacks(root, around=_groups_kept)


@contextmanager
def _groups_kept() -> Iterator[None]:
    """Remove new groups from DeepSpeed's globals, since later engines would use them."""
    groups = import_module("deepspeed.utils.groups")
    before = {
        name: dict(v) if isinstance(v, dict) else v
        for name, v in vars(groups).items()
        if name != "__builtins__"
    }
    yield
    vars(groups).update(before)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


def _trained(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def initialized(model: nn.Module, how: dict[str, Any], **more: Any) -> Any:
    groups = more.pop("groups", None) or model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    made, *_ = engines.deepspeed().initialize(model=model, optimizer=optimizer, config=how, **more)
    return made


def alone(how: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for a job whose ranks share one batch."""
    return {key: value for key, value in how.items() if not key.startswith("train_")} | {
        "train_batch_size": 4
    }


def refuses(root: str, made: Any, match: str, *names: str) -> None:
    """Check that a state with an engine, its module or its optimizer is refused by saves and loads."""
    parts = {"engine": ("m", made), "module": ("m", made.module), "optimizer": ("o", made.optimizer)}
    for chosen in names:
        state = dict(parts[part] for part in chosen.split("+"))
        _refuses_to_save(root, state, match)
        _refuses_to_load(root, made, state, match)


def _refuses_to_save(root: str, state: dict[str, Any], match: str) -> None:
    with pytest.raises(StateError, match=match) as caught:
        reknit.save(f"{root}/bad", state, options=SAVE)
    _is_whole(caught.value)
    assert not os.path.exists(f"{root}/bad") or os.listdir(f"{root}/bad") == []


def _refuses_to_load(root: str, made: Any, state: dict[str, Any], match: str) -> None:
    before = [tensor.clone() for tensor in _memory(made)]
    with pytest.raises(StateError, match=match) as caught:
        reknit.load(f"{root}/good", state, strict=False)
    _is_whole(caught.value)
    assert len(before) == len(_memory(made))
    assert all(map(torch.equal, before, _memory(made)))


def _is_whole(error: StateError) -> None:
    assert error.remedy
    assert error.rank in range(WORLD)
    assert error.phase == "collect"
    assert re.search(r"\b[mo]\b", str(error))


def _memory(made: Any) -> list[torch.Tensor]:
    """Return all tensors of an engine's model and of the optimizer that steps it."""
    found = [getattr(p, "ds_tensor", p).detach() for p in made.module.parameters()]
    inner = getattr(made.optimizer, "optimizer", made.optimizer)
    found += [p.detach() for group in inner.param_groups for p in group["params"]]
    found += [t for states in inner.state.values() for t in states.values() if isinstance(t, torch.Tensor)]
    return found


@case
def stages_of_a_pipeline(root: str) -> None:
    pipe = import_module("deepspeed.pipe")
    for stage, precision in ((0, "fp32"), (1, "fp32"), (1, "bf16")):
        layers = [pipe.LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
        model = pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        made = initialized(model, alone(engines.config(stage, precision)))
        assert type(made).__name__ == "PipelineEngine"
        refuses(root, made, "PipelineModule", "engine", "module", "engine+optimizer", "module+optimizer")
        if stage:
            refuses(root, made, "pipeline stages", "optimizer")


class Mpu:
    """The description of two ranks that have a part of the model each, which a script passes to DeepSpeed."""

    def __init__(self) -> None:
        self.all = dist.new_group([0, 1])
        self.mine = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.all

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return self.mine


@case
def a_model_parallel_unit(root: str) -> None:
    for stage in (0, 1, 2, 3):
        made = initialized(Net(), alone(engines.config(stage, "fp32")), mpu=Mpu())
        refuses(root, made, "model parallelism", "engine", "engine+optimizer")
        if stage:
            refuses(root, made, "model parallelism", "module", "optimizer", "module+optimizer")
    how = alone(engines.config(1, "bf16") | {"data_types": {"grad_accum_dtype": "fp32"}})
    made = initialized(Net(), how, mpu=Mpu())
    assert type(made.optimizer).__name__ == "BF16_Optimizer"
    refuses(root, made, "model parallelism", "engine", "optimizer")


@case
def automatic_tensor_parallelism(root: str) -> None:
    cuts = [
        {"patterns": [".*up.weight$"], "partition_type": "column"},
        {"patterns": [".*down.weight$"], "partition_type": "row"},
    ]
    cut = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": cuts}}
    made = initialized(Net(), alone(engines.config(1, "fp32")) | {"tensor_parallel": cut})
    assert made.module.up.weight.shape == (4, 4)
    refuses(root, made, "model parallelism", "engine", "optimizer")
    refuses(root, made, "automatic tensor parallelism", "module", "module+optimizer")


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        moe = import_module("deepspeed.moe.layer").MoE
        self.experts = moe(hidden_size=4, expert=nn.Linear(4, 4), num_experts=2, ep_size=2)
        self.out = nn.Linear(4, 4)


@case
def experts_that_each_rank_has_its_own_of(root: str) -> None:
    split = import_module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
    for stage in (0, 1):
        model = Mixture()
        groups = split({"params": list(model.parameters()), "name": "all"})
        made = initialized(model, engines.config(stage, "fp32"), groups=groups)
        refuses(root, made, "has mixture-of-experts layers", "engine", "engine+optimizer")
        refuses(root, made, "belongs to a mixture-of-experts layer", "module", "module+optimizer")
        if stage:
            refuses(root, made, "has mixture-of-experts layers", "optimizer")


@case
def zenflow(root: str) -> None:
    for stage in (1, 2, 3):
        flow = {"topk_ratio": 0.5, "select_strategy": "step", "select_interval": 2, "update_interval": 2}
        zero = {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True, "zenflow": flow}
        how = engines.config(stage, "fp32", **zero)
        made = initialized(Net(), how | {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
        refuses(root, made, "ZenFlow", "optimizer", "engine+optimizer", "module+optimizer")
        _refuses_to_load(root, made, {"m": made}, "ZenFlow")


@case
def superoffload(root: str) -> None:
    module: Any = import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    module._validate_superoffload_accelerator = lambda: None
    module.SuperOffloadCPUOptimizer = lambda **_: None
    zero = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    made = initialized(Net(), engines.config(3, "fp32", **zero))
    assert type(made.optimizer) is module.SuperOffloadOptimizer_Stage3
    refuses(root, made, "SuperOffload", "optimizer", "engine+optimizer", "module+optimizer")
    _refuses_to_load(root, made, {"m": made}, "SuperOffload")
    _refuses_to_load(root, made, {"m": made.module}, "SuperOffload")


class Rounding:
    """Quantizes as DeepSpeed's kernel does, one scale for all."""

    def quantize(self, tensor: torch.Tensor, groups: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.detach().abs().max() / 127
        return (tensor / scale).round().to(torch.int8), scale.reshape(1).clone()


@case
def quantized_weights(root: str) -> None:
    module: Any = import_module("deepspeed.runtime.zero.partition_parameters")
    module.CUDAQuantizer = Rounding
    net = Net()
    net.up.requires_grad_(False)
    made = initialized(net, engines.config(3, "fp32", zero_quantized_nontrainable_weights=True))
    assert net.up.weight.ds_tensor.dtype == torch.int8  # type: ignore[attr-defined]
    refuses(root, made, r"up\.weight of m is quantized", "engine", "module", "engine+optimizer")


@case
def secondary_partitions(root: str) -> None:
    made = initialized(Net(), engines.config(3, "fp32", zero_hpz_partition_size=2))
    refuses(root, made, "zero_hpz_partition_size", "engine", "module", "engine+optimizer")


@case
def sixteen_bits_without_zero(root: str) -> None:
    made = initialized(Net().bfloat16(), engines.config(0, "bf16"))
    refuses(root, made, "FP16_UnfusedOptimizer", "optimizer", "engine+optimizer", "module+optimizer")
    # Its weights can be saved, but the optimizer would undo a load.
    reknit.save(f"{root}/weights", {"model": made}, options=SAVE)
    before = [tensor.clone() for tensor in _memory(made)]
    with pytest.raises(StateError, match="would undo the load"):
        reknit.load(f"{root}/weights", {"model": made})
    with pytest.raises(StateError, match="FP16_UnfusedOptimizer"):
        integration.load(made, f"{root}/weights", load_module_only=True)
    assert all(map(torch.equal, before, _memory(made)))


@case
def an_engine_of_one_rank_alone(root: str) -> None:
    mpu = Mpu()
    made = initialized(Net(), alone(engines.config(1, "fp32")), mpu=mpu)
    state = {"m": made if dist.get_rank() else Net()}
    with pytest.raises(StateError, match="model parallelism") as caught:
        reknit.save(f"{root}/bad", state, options=SAVE)
    assert caught.value.rank == 1


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused_is(name: str, tmp_path: Path) -> None:
    failure = CASES.failure(name, partial(run_cases, str(tmp_path)), WORLD, warm="deepspeed")
    assert failure is None, failure
