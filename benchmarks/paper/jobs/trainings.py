"""Small trainings with each framework: they go on after a load as if nothing had happened.

Each is saved in the middle, and goes on in the same layout and in another one, with other weights before the
load.  Every rank takes its share of the same batches, so that two layouts differ in the order of additions
only.  Megatron and veScale run on the CPU with the tests' replacement for CUDA; all else is their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import reknit
from tests import ranks
from tests.megatron.layouts import Layout as Megatron

if TYPE_CHECKING:
    from collections.abc import Callable

    Curves = dict[str, dict[str, list[float]]]
    """The losses of each scenario: uninterrupted, resumed in the same layout, resumed in another one."""
    Training = tuple[dict[str, Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
    """The state of a training, and its step."""

STEPS, SAVED_AT, BATCH, WORDS = 30, 15, 12, 32
"""The number of steps, the step of the checkpoint, and the sizes of the data."""
TIMEOUT_S = 300.0


class Layout(NamedTuple):
    """A number of ranks, and the function that builds a training on each of them with weights by a seed."""

    world: int
    build: Callable[[int], Training]


def curves(framework: str, folder: Path) -> Curves:
    """Return the losses of a framework's trainings."""
    folder.mkdir(parents=True)
    if framework in OTHERS:
        return OTHERS[framework](folder)
    warm = "deepspeed" if framework == "deepspeed" else "plain"
    return {
        name: _lines(partial(losses, path=f"{folder}/{number}"), first, second, warm)
        for number, (name, (first, second)) in enumerate(SHARDED[framework].items())
    }


def _lines(train: Callable[..., list[float]], first: Any, second: Any, warm: str) -> dict[str, list[float]]:
    """Return the losses in the first layout, and resumed from the middle in the same and in the second."""
    found = {}
    for name, layout, begin in (
        ("uninterrupted", first, 0),
        ("same layout", first, SAVED_AT),
        ("resumed", second, SAVED_AT),
    ):
        found[name], *_ = ranks.run(layout.world, train, layout, begin, warm=warm, timeout=TIMEOUT_S)
    return found


def losses(layout: Layout, begin: int, *, path: str) -> list[float]:
    """Train from a step on as one rank, save in the middle of a whole training, and return the losses."""
    world, number = dist.get_world_size(), dist.get_rank()
    os.environ["LOCAL_RANK"] = str(number)
    state, step = layout.build(begin)
    if begin:
        reknit.load(path, state)
    found = []
    for count in range(begin, STEPS):
        if count == SAVED_AT and not begin:
            reknit.save(path, state, step=count).result()
        ids, following = (part.chunk(world)[number] for part in batch(count))
        loss = step(ids, following).detach() / world
        dist.all_reduce(loss)
        found.append(float(loss))
    reknit.close()
    return found


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words, and the words that follow them by a simple rule, which the model can fit."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, WORDS, (BATCH, 8), generator=generator)
    return ids, (3 * ids + ids.roll(1, 1)) % WORDS


class Reader(nn.Module):
    """A small model of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 21)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(21, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        x = x + x.roll(1, 1) * 0.5
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(21)
        self.up = nn.Linear(21, 67)
        self.down = nn.Linear(67, 21)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


def cross_entropy(output: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, WORDS), following.reshape(-1))


def _stepping(model: nn.Module) -> Training:
    """Return the training of a sharded model with AdamW and a schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(ids), following)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        return loss

    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, step


def fsdp1(strategy: str, seed: int) -> Training:
    """Return an FSDP1 training."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(seed)
    return _stepping(
        FullyShardedDataParallel(
            Reader(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    )


def fsdp2(seed: int) -> Training:
    """Return an FSDP2 training."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Reader()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _stepping(model)


def zero(stage: int, seed: int) -> Training:
    """Return a training in an engine of DeepSpeed."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    torch.manual_seed(seed)
    model = Reader()
    inner = torch.optim.AdamW(model.parameters(), lr=2e-2)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=inner,
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(inner, STEPS),
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(engine(ids), following)
        engine.backward(loss)
        engine.step()
        return loss

    return {"model": engine, "optimizer": optimizer, "scheduler": scheduler}, step


def _sharded(build: Any, *how: Any) -> Callable[[int], Layout]:
    return lambda world: Layout(world, partial(build, *how))


_TWO, _THREE = _sharded(fsdp1, "SHARD_GRAD_OP"), _sharded(fsdp1, "FULL_SHARD")
_ZERO_2, _ZERO_3, _FSDP2 = _sharded(zero, 2), _sharded(zero, 3), _sharded(fsdp2)
SHARDED = {
    "fsdp1": {
        "3 to 2 ranks": (_THREE(3), _THREE(2)),
        "ZeRO-2 on 3 ranks to ZeRO-3 on 2": (_TWO(3), _THREE(2)),
        "ZeRO-3 on 2 ranks to ZeRO-2 on 3": (_THREE(2), _TWO(3)),
    },
    "fsdp2": {"2 to 3 ranks": (_FSDP2(2), _FSDP2(3))},
    "deepspeed": {
        "ZeRO-3, 2 to 3 ranks": (_ZERO_3(2), _ZERO_3(3)),
        "ZeRO-2 on 2 ranks to ZeRO-3 on 3": (_ZERO_2(2), _ZERO_3(3)),
        "ZeRO-3 on 3 ranks to ZeRO-2 on 2": (_ZERO_3(3), _ZERO_2(2)),
    },
}
"""The scenarios of each framework whose trainings have the same model: the first layout, and the second."""

MEGATRON = {
    # Equal numbers of rows, since each row of the vocabulary adds a term to every loss.
    "PP1 to PP2": (Megatron(1), Megatron(2, pp=2)),
    "TP1 to TP2": (Megatron(1, multiple=2), Megatron(2, tp=2)),
    "TP1 PP2 to TP2 PP1": (Megatron(2, pp=2, multiple=2), Megatron(2, tp=2)),
    "DP2 to DP4": (Megatron(2), Megatron(4)),
    "TP1 DP2 PP1 to TP2 DP2 PP2": (Megatron(2, multiple=2), Megatron(8, tp=2, pp=2)),
    "DP2 to DP4, twice the batch": (Megatron(2), Megatron(4)),
}


def _megatron(folder: Path) -> Curves:
    found = {}
    for number, (name, (first, second)) in enumerate(MEGATRON.items()):
        # The batches of a step after the checkpoint, in the uninterrupted training too.
        micro = 8 if name.endswith("twice the batch") else 4
        train = partial(megatron_losses, path=f"{folder}/{number}", micro=micro)
        found[name] = _lines(train, first, second, "megatron")
    return found


def megatron_losses(layout: Megatron, begin: int, *, path: str, micro: int) -> list[float]:
    """Train a GPT from a step on, or without a break, and save in the middle."""
    from tests.megatron import gpt

    trained = gpt.build(layout, steps=0, **({"seed": dist.get_world_size()} if begin else {}))
    found: list[float] = []
    if begin:
        reknit.load(path, trained.state())
    else:
        found = gpt.train(trained, SAVED_AT)
        reknit.save(path, trained.state(), step=SAVED_AT).result()
    return found + gpt.train(trained, STEPS - SAVED_AT, SAVED_AT, micro)


class VeScale(NamedTuple):
    """The data-parallel and tensor-parallel sizes of a job of veScale."""

    dp: int
    tp: int

    @property
    def world(self) -> int:
        return self.dp * self.tp


def _vescale(folder: Path) -> Curves:
    """Change tensor parallelism only, since data depends on the data-parallel rank."""
    train = partial(vescale_losses, path=f"{folder}/checkpoint")
    return {"DP2 to TP2 DP2": _lines(train, VeScale(2, 1), VeScale(2, 2), "vescale")}


def vescale_losses(layout: VeScale, begin: int, *, path: str) -> list[float]:
    """Train with veScale from a step on, or without a break, and save in the middle."""
    from tests.vescale import jobs

    job = jobs.build(layout.dp, layout.tp, seed=begin)
    found: list[float] = []
    if begin:
        reknit.load(path, job.state())
    else:
        found = jobs.train(job, SAVED_AT)
        reknit.save(path, job.state(), step=SAVED_AT).result()
    found += jobs.train(job, STEPS - SAVED_AT, SAVED_AT)
    both = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(both)
    reknit.close()
    return [float(loss) for loss in both / dist.get_world_size()]


def _jax(folder: Path) -> Curves:
    """Train on 2 devices and on 4, each in a new process, since JAX fixes their number when it starts."""
    found = {}
    for name, devices, begin in (
        ("uninterrupted", 2, 0),
        ("same layout", 2, SAVED_AT),
        ("resumed", 4, SAVED_AT),
    ):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        script = Path(__file__).with_name("jax_training.py")
        command = [sys.executable, str(script), str(folder / "checkpoint"), str(begin), str(STEPS)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return {"2 to 4 devices": found}


OTHERS = {"megatron": _megatron, "vescale": _vescale, "jax": _jax}
