"""Folders that DeepSpeed itself writes, each with the whole state that the ranks held at that time.

`write(root, names)` runs on all ranks, and makes a folder ``root/name/tag`` and a file ``root/name.truth``.
"""

from __future__ import annotations

import datetime
import re
import uuid
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import reknit
from tests.deepspeed import engines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Engine = Callable[[], Any]

CLIENT_STATE = {
    "args": Namespace(out=Path("runs"), inner=SimpleNamespace(depth=3), loss=nn.CrossEntropyLoss),
    "began": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    "run": uuid.UUID(int=5),
    "seen": {("a", 1), ("b", 2)},
}
"""Values of a script, which DeepSpeed puts beside the weights."""
DEVICES = ("params", "foreach", "fused", "capturable", "differentiable")
"""Options that name parameters, or that depend on the devices of a job."""


class Various(nn.Module):
    """Tied and frozen parameters, buffers, a parameter of one element, and odd sizes."""

    seen: torch.Tensor
    mean: torch.Tensor

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.arange(5.0))
        self.register_buffer("passing", torch.ones(5), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.frozen.requires_grad_(plain)
        if not plain:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.frozen(self.embedding(ids)) * self.scale
        return self.head(self.middle(hidden + self.mean.to(hidden.dtype)))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Two layers of four experts."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        make = import_module("deepspeed.moe.layer").MoE
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(
            make(6, nn.Sequential(nn.Linear(6, 6)), num_experts=4, ep_size=ep_size, k=1, min_capacity=0)
            for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)[:, None]
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return hidden  # type: ignore[no-any-return]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [each for each in trained if each.ndim > 1], [each for each in trained if each.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": groups[0], "lr": 0.125}, {"params": groups[1], "lr": 0.25, "weight_decay": 0.0}]
    )


def trained(config: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    engine, *_ = engines.deepspeed().initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        engine.backward(engine(torch.randint(0, 7, (4,), generator=generator)).float().square().mean())
        engine.step()
    return engine


def dense(layout: str, zero: dict[str, Any] | None = None, *, plain: bool = False, **more: Any) -> Engine:
    """Return a maker of an engine with `Various`."""
    return lambda: build(layout, zero, plain=plain, **more)


def build(
    layout: str, zero: dict[str, Any] | None = None, *, plain: bool = False, steps: int = 2, **more: Any
) -> Any:
    stage, precision = layout.removeprefix("z").split("-")
    config = {**engines.config(int(stage), precision, **(zero or {})), **more}
    module = engines.deepspeed()
    if precision == "fp16":
        module.accelerator.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    torch.manual_seed(0 if steps else 7)
    model = Various(plain=plain)
    return trained(config, model, adam(model), steps)


def experts(layout: str, **more: Any) -> Engine:
    """Return a maker of an engine with `Experts`, two ranks for each expert."""

    def make() -> Any:
        stage, precision = layout.removeprefix("z").split("-")
        engines.deepspeed()
        groups = import_module("deepspeed.utils.groups")
        for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
            getattr(groups, name).clear()
            getattr(groups, f"{name}_RANKS").clear()
        torch.manual_seed(0)
        model = Experts(2)
        split = import_module("deepspeed.moe.utils").split_params_into_different_moe_groups_for_optimizer
        optimizer = torch.optim.AdamW(split([{"params": list(model.parameters()), "name": "all"}]))
        return trained({**engines.config(int(stage), precision), **more}, model, optimizer, 2)

    return make


def pipeline(stages: int, layout: str, *, tied: bool = False) -> Engine:
    """Return a maker of an engine of a pipeline of four layers."""

    def make() -> Any:
        stage, precision = layout.removeprefix("z").split("-")
        module = engines.deepspeed()
        module.init_distributed("gloo")
        pipe = import_module("deepspeed.pipe")
        torch.manual_seed(0)
        layers = [
            pipe.TiedLayerSpec("e", nn.Embedding, 7, 6) if tied else pipe.LayerSpec(nn.Embedding, 7, 6),
            pipe.LayerSpec(nn.Linear, 6, 6),
            torch.tanh,
            pipe.LayerSpec(nn.Linear, 6, 5),
        ]
        net = pipe.PipelineModule(
            layers,
            num_stages=stages,
            loss_fn=lambda y, _: y.float().square().mean(),
            partition_method="uniform",
        )
        config = engines.config(int(stage), precision)
        config["train_batch_size"] //= stages
        engine, *_ = module.initialize(model=net, optimizer=adam(net), config=config)
        for _ in range(2):
            engine.train_batch(iter([(torch.arange(4), torch.zeros(4))]))
        return engine

    return make


def tensor_parallel() -> Any:
    config = engines.config(1, "bf16")
    del config["train_micro_batch_size_per_gpu"]
    layers = [{"patterns": [r".*0\.weight$"], "partition_type": "column"}]
    parts = {"use_default_specs": False, "layer_specs": layers}
    config["tensor_parallel"] = {"autotp_size": 2, "partition_config": parts}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return engines.deepspeed().initialize(model=model, optimizer=adam(model), config=config)[0]


CPU = {"device": "cpu"}
DENSE: dict[str, Engine] = {
    "z0-fp32": dense("z0-fp32"),
    "z0-bf16": dense("z0-bf16"),
    **{
        f"z{stage}-{precision}": dense(f"z{stage}-{precision}")
        for stage in (1, 2, 3)
        for precision in ("fp32", "bf16")
    },
    "z2-later": dense("z2-bf16", steps=3),
    "z2-fp16": dense("z2-fp16"),
    "z3-fp16": dense("z3-fp16"),
    "z1-fp32-gradients": dense("z1-bf16", data_types={"grad_accum_dtype": "fp32"}),
    "z2-round-robin": dense("z2-bf16", {"round_robin_gradients": True}, plain=True),
    "z2-elastic": dense("z2-bf16", {"elastic_checkpoint": True}),
    "z2-aligned": dense("z2-bf16", {"parameter_alignment": True}),
    "z3-small-groups": dense("z3-bf16", {"sub_group_size": 8}),
    "z3-offload": dense(
        "z3-bf16", {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    ),
}
PIPELINES: dict[str, Engine] = {
    "one-stage": pipeline(1, "z1-bf16"),
    "two-stages": pipeline(2, "z1-bf16"),
    "tied-stage": pipeline(1, "z1-fp32", tied=True),
    "unnamed-stage": pipeline(1, "z0-fp32"),
}
EXPERTS: dict[str, Engine] = {
    "experts": experts("z1-bf16"),
    "experts-z2": experts("z2-fp32"),
    "experts-data-first": experts("z1-bf16", use_data_before_expert_parallelism=True),
    "experts-z0": experts("z0-fp32"),
}
OTHERS: dict[str, Engine] = {"tensor-parallel": tensor_parallel}
ALL = {**DENSE, **PIPELINES, **EXPERTS, **OTHERS}


def write(root: str, names: Sequence[str]) -> None:
    for name in names:
        engine = ALL[name]()
        engine.save_checkpoint(f"{root}/{name}", "tag", client_state=dict(CLIENT_STATE))
        whole = truth(engine) if name not in OTHERS else {}
        if dist.get_rank() == 0:
            torch.save(whole, f"{root}/{name}.truth")
        dist.barrier()


def truth(engine: Any) -> dict[str, dict[str, Any]]:
    """Return the whole state, put together from the parts that DeepSpeed shows on each rank."""
    persistent = engine.module.state_dict().keys()
    model = {name: one.clone() for name, one in engine.module.named_buffers() if name in persistent}
    parts: list[tuple[str, tuple[int, ...], int, torch.Tensor]] = []
    values: dict[str, Any] = {}
    inner: Any = getattr(engine.optimizer, "optimizer", None)
    if inner is not None and hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    first: dict[Any, str] = {}
    for local, parameter in engine.module.named_parameters(remove_duplicate=False):
        name = _whole_name(engine.module, local)
        model[name] = engines.whole(parameter)
        other = first.setdefault(parameter, name)
        if other != name or not parameter.requires_grad or not _is_divided(engine):
            continue
        for key, (start, part) in engines.held(parameter):
            if key != "model":
                parts.append((f"state/{name}/{key}", tuple(engines.shape(parameter)), start, part.clone()))
        for flat, group in engines.flats(engine, parameter):
            values[f"state/{name}/step"] = torch.as_tensor(inner.state[flat]["step"]).clone()
            values[f"param_groups/{name}"] = {k: v for k, v in group.items() if k not in DEVICES}
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (model, values, parts))
    whole: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for on_rank, known, pieces in everything:
        whole["model"] |= on_rank
        whole["optimizer"] |= known
        for name, shape, start, part in pieces:
            made = whole["optimizer"].setdefault(name, torch.full(shape, torch.nan))
            made.view(-1)[start : start + part.numel()] = part
    return whole


def _is_divided(engine: Any) -> bool:
    return engine.zero_optimization_stage() > 0 or "BF16" in type(engine.optimizer).__name__


def _whole_name(module: nn.Module, name: str) -> str:
    """Return the name of a parameter in the whole model, in which experts count over all ranks."""
    match = re.fullmatch(r"(.*)(\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]+)(\..*)", name)
    if match is None:
        return name
    layer: Any = module.get_submodule(match[1])
    rank = import_module("deepspeed.utils.groups")._get_expert_parallel_rank(layer.expert_group_name)
    return f"{match[1]}{match[2]}{rank * layer.num_local_experts + int(match[3])}{match[4]}"


def convert(root: str, names: Sequence[str]) -> None:
    """Make universal checkpoints ``root/universal/name`` by DeepSpeed's own converter."""
    for name in names:
        import_module("deepspeed.checkpoint.ds_to_universal").main(
            SimpleNamespace(
                input_folder=f"{root}/{name}/tag",
                output_folder=f"{root}/universal/{name}",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


def train_with_transformers(root: str) -> None:
    """Let the Trainer of transformers save with DeepSpeed: ``root/trainer/checkpoint-2/global_step2``."""
    transformers = import_module("transformers")
    engines.deepspeed()
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    config = transformers.LlamaConfig(num_attention_heads=2, tie_word_embeddings=True, **sizes)
    zero = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    how = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True}
    trainer = transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(f"{root}/trainer", deepspeed=zero, report_to=[], **how),
        train_dataset=[{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 4,
    )
    trainer.train()
    torch.save(truth(trainer.deepspeed), f"{root}/trainer.truth")


def continued(root: str, name: str, layout: str) -> list[str]:
    """Load a folder into an engine of another layout; return the names of values that differ."""
    engine = build(layout, steps=0)
    reknit.load(f"{root}/{name}/tag", engines.state(engine), items=["model", "optimizer"])
    expected = torch.load(f"{root}/{name}.truth", weights_only=True)
    got = truth(engine)
    return [
        f"{item}/{key}"
        for item in expected
        for key, value in expected[item].items()
        if not (torch.equal(got[item][key], value) if torch.is_tensor(value) else got[item][key] == value)
    ]
