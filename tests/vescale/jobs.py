"""veScale 0.0.1 on a CPU: the lines that it needs for that, and a tiny model in several layouts."""

from __future__ import annotations

import importlib.util
import sys
import types
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HIDDEN, OUT = 6, 10, 14


class Job(NamedTuple):
    """A model under veScale's DDP, its optimizer, and the meshes of both kinds of parallelism."""

    model: Any
    optimizer: Any
    mesh: Any

    def state(self) -> dict[str, Any]:
        """Return the state that a user would save."""
        return {"model": self.model, "optimizer": self.optimizer}


@cache
def shim() -> None:
    """Adapt veScale to the CPU, and to a torch that is two years newer than it."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    own_type: Callable[..., Any] = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = own_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type  # type: ignore[assignment, method-assign]
    if importlib.util.find_spec("optree") is None:
        # an undeclared dependency of veScale, in whose place torch's own trees suffice
        trees: Any = types.ModuleType("optree")
        trees.PyTreeSpec, trees.tree_flatten = _pytree.TreeSpec, _pytree.tree_flatten
        trees.tree_map = lambda fn, tree, **_: _pytree.tree_map(fn, tree)
        trees.tree_unflatten = lambda spec, leaves: _pytree.tree_unflatten(leaves, spec)
        sys.modules["optree"] = trees
    import torch.distributed._functional_collectives as collectives
    import vescale.dtensor._collective_utils as of_vescale

    patched = types.SimpleNamespace(**vars(collectives))
    # Since torch 2.4 the source of a broadcast is a rank of the group instead of the job.
    patched.broadcast = lambda tensor, src, group, tag="": collectives.broadcast(
        tensor, dist.get_group_rank(group, src), group
    )
    of_vescale.funcol = patched


class Net(nn.Module):
    """Odd sizes, so that ranges begin and end in the middle of rows; a norm that all ranks have."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, OUT, bias=False)
        self.norm = nn.LayerNorm(OUT)
        self.register_buffer("scale", torch.arange(3))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.down(torch.nn.functional.gelu(self.up(x))))
        return y


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups with different options."""
    matrices = [p for name, p in model.named_parameters() if name in ("up.weight", "down.weight")]
    others = [p for name, p in model.named_parameters() if name not in ("up.weight", "down.weight")]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]


def build(dp: int, tp: int, seed: int, *, two_groups: bool = True, **options: Any) -> Job:
    """Build a job on `dp * tp` ranks."""
    shim()
    from vescale.ddp.distributed_data_parallel import DistributedDataParallel
    from vescale.dmodule.api import parallelize_module
    from vescale.dtensor.device_mesh import DeviceMesh
    from vescale.dtensor.placement_types import Replicate, Shard
    from vescale.optim.distributed_optimizer import DistributedOptimizer

    mesh = DeviceMesh("cpu", torch.arange(dp * tp).reshape(dp, tp), mesh_dim_names=("DP", "TP"))
    plan = {
        "parameter": {"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]},
        "forward": {"input": [[Replicate()]], "norm.input": [[Replicate()]], "norm.output": [[Replicate()]]},
    }
    net = parallelize_module(Net(seed, options.pop("dtype", torch.float32)), mesh["TP"], plan)
    ddp_options = {"accumulate_allreduce_grads_in_fp32": options.pop("fp32_grads", True)}
    ddp_options |= options.pop("ddp", {})
    model = DistributedDataParallel(net, mesh["DP"], use_distributed_optimizer=True, **ddp_options)
    inner = torch.optim.AdamW(groups(net) if two_groups else net.parameters(), lr=1e-2)
    options.setdefault("overlap_param_gather", False)
    return Job(model, DistributedOptimizer(inner, models=[model], **options), mesh)


def train(job: Job, steps: int = 2, first: int = 0) -> list[float]:
    """Take steps, each data-parallel rank with data of its own, and return the losses."""
    from vescale.dtensor.dtensor import DTensor

    losses = []
    part = job.mesh.get_coordinate()[0]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(10 * step + part)
        x = torch.randn(5, WIDTH, generator=generator).to(next(job.model.parameters()).dtype)
        job.optimizer.zero_grad()
        y = job.model(x)
        y = y.to_local() if isinstance(y, DTensor) else y
        loss = (y.float() ** 2).mean() + y.float().sin().mean()
        loss.backward()
        job.model.finish_grad_sync()
        job.optimizer.step()
        losses.append(float(loss))
    return losses


Entry = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], "tuple[int, int] | None", torch.Tensor]
"""Name, global shape, offsets and lengths of a box, a flat range in it (None: all), and the elements."""


def truth(job: Job) -> dict[str, torch.Tensor]:
    """Return whole model and optimizer states, joined by veScale's own descriptions of its pieces."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [*_of_model(job), *_of_optimizer(job)])
    wholes: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for name, shape, offsets, lengths, span, elements in (entry for entries in everyone for entry in entries):
        whole = wholes.setdefault(name, torch.zeros(shape, dtype=elements.dtype))
        done = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
        box = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        start, end = span or (0, elements.numel())
        flat, marks = whole[box].reshape(-1).clone(), done[box].reshape(-1).clone()
        flat[start:end], marks[start:end] = elements.reshape(-1), True
        whole[box], done[box] = flat.reshape(lengths), marks.reshape(lengths)
    assert all(bool(done.all()) for done in seen.values())
    return wholes


def _of_model(job: Job) -> list[Entry]:
    from vescale.dtensor._utils import compute_local_shape_and_global_offset

    entries: list[Entry] = []
    for name, tensor in job.model.module.state_dict().items():
        lengths, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        local = tensor.to_local().detach().clone()
        entries.append((f"model/{name}", tuple(tensor.shape), offsets, lengths, None, local))
    return entries


def _of_optimizer(job: Job) -> list[Entry]:
    entries: list[Entry] = []
    for by_name in (each for key, each in job.optimizer.state_dict().items() if key != "param_group_meta"):
        for (_, name), states in by_name.items():
            for key, state in states.items():
                called = "master" if key == "shard_casted_float16_groups" else key
                at = f"optimizer/state/{name}/{called}"
                if isinstance(state, torch.Tensor):
                    entries.append((at, (), (), (), None, state.clone()))
                    continue
                ranges = state.dp_ranks_ranges and state.dp_ranks_ranges[dist.get_rank()]
                span = (ranges.start, ranges.end) if ranges else None
                place = (tuple(state.global_shape), tuple(state.global_offset), tuple(state.local_shape))
                entries.append((at, *place, span, state.local_tensor.detach().clone()))
    return entries
