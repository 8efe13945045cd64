"""One tiny model in every layout that reknit supports, really trained, with its true whole state.

`LAYOUTS` names the layouts and how many ranks each needs.  On those ranks, `build(layout)` returns a
`Trained`: this rank's model parts, optimizers and schedulers, after two real deterministic steps of AdamW.
With `steps=0` and another `seed` it is a fresh target to load into, whose optimizers have no state yet.

The model has the same names and global shapes everywhere, so a checkpoint of any layout loads into any other.
The shapes are odd on purpose, so that shards are uneven and some are empty.  The model has an embedding, four
blocks (layer norm, two linear maps, a 0-d integer buffer that counts forward passes), stacked experts with a
router, and a head.  Two parameter groups: matrices decay, vectors do not.  One StepLR scheduler for each
optimizer.

`state(trained)` is the state that a user would save: items model, optimizer, scheduler, progress.
`truth(trained)` is the same state as whole tensors, joined from the memory of all ranks without reknit: equal
on every rank, keyed like reknit's fqns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.torchrun import flat_truth, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LAYOUTS: dict[str, int] = {
    "single": 1,
    "ddp-2": 2,
    "fsdp2-2": 2,
    "fsdp2-3": 3,
    "fsdp2-4": 4,
    "hsdp-2x2": 4,
    "tp-2": 2,
    "fsdp2xtp-2x2": 4,
    "pp-2xfsdp2-2": 4,
    "ep-2x2": 4,
    "fsdp1full-2": 2,
    "fsdp1gradop-3": 3,
    "fsdp1hybrid-2x2": 4,
    "fsdp1none-2": 2,
    "fsdp1xtp-2x2": 4,
}
"""Ranks that each layout runs on."""

ONE_GROUP: dict[str, int] = {
    "1group-single": 1,
    "1group-fsdp2-2": 2,
    "1group-fsdp1flatfull-2": 2,
    "1group-fsdp1flatgradop-3": 3,
    "1group-fsdp1flathybrid-2x2": 4,
    "1group-fsdp1flatnone-2": 2,
    "1group-fsdp1flatxtp-2x2": 4,
}
"""Layouts with one parameter group: FSDP with use_orig_params=False ("flat") has all in one tensor."""

WIDTH, HIDDEN, VOCABULARY, LAYERS, EXPERTS = 6, 10, 12, 4, 6


class Block(nn.Module):
    """A residual block that counts its forward passes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Experts(nn.Module):
    """Experts whose weights are stacked, each seeing every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weights = ExpertWeights()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.router(x).softmax(-1).amax(-1, keepdim=True)
        out: torch.Tensor = x + gate * self.weights(x)
        return out


class ExpertWeights(nn.Module):
    """The stacked weights of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, 5, WIDTH) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        hidden = torch.einsum("ehd,bsd->ebsh", w1, x).relu()
        return torch.einsum("edh,ebsh->bsd", w2, hidden)


class Tiny(nn.Module):
    """The model, or a stage of it: absent modules of a stage are None, and layers keep their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.experts: Experts | None = Experts()
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.emb is not None:
            x = self.emb(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.experts is not None:
            x = self.experts(x)
        return x if self.head is None else self.head(x)


@dataclass
class Trained:
    """One rank's part of a trained job.

    `forward` runs the rank's whole model on token ids, `replica` is the number of its batches.
    """

    layout: str
    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[torch.optim.lr_scheduler.LRScheduler]
    replica: int
    mesh: DeviceMesh | None = None
    schedule: Any = None
    progress: dict[str, Any] = field(default_factory=lambda: {"step": 0, "losses": []})


def build(layout: str, *, steps: int = 2, seed: int = 0, device: str = "cpu") -> Trained:
    """Build the model in a layout on this rank and a device of it, and train it."""
    torch.manual_seed(seed)
    trained = _BUILDERS[layout.removeprefix("1group-").split("-")[0]](layout, Tiny().to(device))
    for number in range(steps):
        train_step(trained, number)
    return trained


def train_step(trained: Trained, number: int) -> None:
    """Take one step on the batch of this replica and this number."""
    generator = torch.Generator().manual_seed(100 * trained.replica + number)
    ids = torch.randint(0, VOCABULARY, (4, 5), generator=generator).to(device_of(trained.parts[0]))
    for optimizer in trained.optimizers:
        optimizer.zero_grad()
    if trained.schedule is None:
        loss_of(trained.parts[0](ids), ids).backward()  # type: ignore[no-untyped-call]
    else:
        first, last = trained.parts[0].emb is not None, trained.parts[0].head is not None
        trained.schedule.step(*((ids,) if first else ()), **({"target": ids} if last else {}))
    for optimizer, scheduler in zip(trained.optimizers, trained.schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    trained.progress["step"] += 1
    trained.progress["losses"].append(number / 2)


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.reshape(-1, VOCABULARY), ids.reshape(-1))


def state(trained: Trained) -> dict[str, Any]:
    """Return the state that a user would save: single objects, or lists for the parts of a pipeline."""
    several = trained.schedule is not None
    return {
        "model": list(trained.parts) if several else trained.parts[0],
        "optimizer": list(trained.optimizers) if several else trained.optimizers[0],
        "scheduler": trained.schedulers[0],
        "progress": trained.progress,
    }


def _finished(layout: str, model: nn.Module, replica: int, **more: Any) -> Trained:
    vectors = [p for name, p in model.named_parameters() if ".norm." in name or name.endswith("bias")]
    known = set(map(id, vectors))
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in known], "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 5e-3},
    ]
    if layout.startswith("1group-"):
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    # Not foreach: under FSDP with tensor parallelism, the parameters of a group lie on different meshes.
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return Trained(layout, [model], [optimizer], [scheduler], replica, **more)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model is on."""
    return next(model.parameters()).device


def _sizes(layout: str) -> list[int]:
    return [int(size) for size in layout.rsplit("-", 1)[1].split("x")]


def _mesh(model: nn.Module, sizes: Sequence[int], *names: str) -> DeviceMesh:
    return init_device_mesh(device_of(model).type, tuple(sizes), mesh_dim_names=names)


def _single(layout: str, model: Tiny) -> Trained:
    return _finished(layout, model, 0)


def _ddp(layout: str, model: Tiny) -> Trained:
    return _finished(layout, DistributedDataParallel(model), dist.get_rank())


def _shard_blocks(model: Tiny, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)


def _fsdp2(layout: str, model: Tiny) -> Trained:
    mesh = _mesh(model, _sizes(layout), "dp")
    _shard_blocks(model, mesh)
    assert model.experts is not None
    fully_shard(model.experts.weights, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _finished(layout, model, dist.get_rank(), mesh=mesh)


def _hsdp(layout: str, model: Tiny) -> Trained:
    mesh = _mesh(model, _sizes(layout), "replicate", "shard")
    _shard_blocks(model, mesh)
    fully_shard(model, mesh=mesh)
    return _finished(layout, model, dist.get_rank(), mesh=mesh)


def _tensor_parallel(model: Tiny, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {
        "emb": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(LAYERS):
        plan[f"layers.{number}.up"] = ColwiseParallel()
        plan[f"layers.{number}.down"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def _tp(layout: str, model: Tiny) -> Trained:
    mesh = _mesh(model, _sizes(layout), "tp")
    _tensor_parallel(model, mesh)
    return _finished(layout, model, 0, mesh=mesh)


def _fsdp2xtp(layout: str, model: Tiny) -> Trained:
    mesh = _mesh(model, _sizes(layout), "dp", "tp")
    _tensor_parallel(model, mesh["tp"])
    _shard_blocks(model, mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _finished(layout, model, mesh["dp"].get_local_rank(), mesh=mesh)


def _pp(layout: str, model: Tiny) -> Trained:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = _mesh(model, (2, 2), "pp", "dp")
    stage = mesh["pp"].get_local_rank()
    half = LAYERS // 2
    kept = range(half) if stage == 0 else range(half, LAYERS)
    model.layers = nn.ModuleDict({str(number): model.layers[str(number)] for number in kept})
    if stage == 0:
        model.experts = model.head = None
    else:
        model.emb = None
    _shard_blocks(model, mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    pipe = PipelineStage(model, stage, 2, device_of(model), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(pipe, n_microbatches=2, loss_fn=loss_of)
    return _finished(layout, model, mesh["dp"].get_local_rank(), mesh=mesh, schedule=schedule)


def _ep(layout: str, model: Tiny) -> Trained:
    sizes = _sizes(layout)
    mesh = _mesh(model, sizes, "efsdp", "ep")
    everyone = _mesh(model, [sizes[0] * sizes[1]], "dp")
    assert model.experts is not None
    weights = model.experts.weights
    for name in ("w1", "w2"):
        whole = getattr(weights, name).data
        setattr(weights, name, nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)])))
    fully_shard(weights, mesh=mesh["efsdp"])
    _shard_blocks(model, everyone)
    fully_shard(model, mesh=everyone)
    return _finished(layout, model, dist.get_rank(), mesh=mesh)


def _fsdp1(layout: str, model: Tiny) -> Trained:
    kind = layout.removeprefix("1group-").removeprefix("fsdp1").split("-")[0]
    sizes = _sizes(layout)
    strategy = {
        "full": ShardingStrategy.FULL_SHARD,
        "gradop": ShardingStrategy.SHARD_GRAD_OP,
        "hybrid": ShardingStrategy.HYBRID_SHARD,
        "none": ShardingStrategy.NO_SHARD,
        "xtp": ShardingStrategy.FULL_SHARD,
    }[kind.removeprefix("flat")]
    mesh = _mesh(model, sizes, *(("replicate", "shard") if "hybrid" in kind else ("dp", "tp"))[: len(sizes)])
    if kind.endswith("xtp"):
        _tensor_parallel(model, mesh["tp"])
        replica, mesh = mesh["dp"].get_local_rank(), mesh["dp"]
    else:
        replica = dist.get_rank()
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block, ExpertWeights}),
        use_orig_params=not kind.startswith("flat"),
        sharding_strategy=strategy,
        device_mesh=mesh,
        device_id=device_of(model),
    )
    return _finished(layout, wrapped, replica, mesh=mesh)


_BUILDERS: dict[str, Callable[[str, Tiny], Trained]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp2xtp": _fsdp2xtp,
    "pp": _pp,
    "ep": _ep,
    **{
        f"fsdp1{flat}{kind}": _fsdp1
        for flat in ("", "flat")
        for kind in ("full", "gradop", "hybrid", "none", "xtp")
    },
}


def truth(trained: Trained) -> dict[str, dict[str, Any]]:
    """Return the whole state by item and fqn, the same on every rank: tensors, options of parameter groups.

    It is gathered over all ranks, so every rank has to call it.
    """
    mine: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for part, optimizer in zip(trained.parts, trained.optimizers, strict=True):
        if isinstance(part, FullyShardedDataParallel):
            flat_truth.add(part, optimizer, mine)
            continue
        module = part.module if isinstance(part, DistributedDataParallel) else part
        for name, tensor in module.state_dict().items():
            mine["model"][name] = pieces.of(tensor)
        names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, states in optimizer.state.items():
            for key, value in states.items():
                mine["optimizer"][f"state/{names[parameter]}/{key}"] = pieces.of(value)
        for group in optimizer.param_groups:
            options = {k: v for k, v in group.items() if k not in ("params", "foreach", "fused")}
            for parameter in group["params"]:
                mine["optimizer"][f"param_groups/{names[parameter]}"] = options
    if not dist.is_initialized():
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {item: pieces.joined([one[item] for one in everyone]) for item in mine}
