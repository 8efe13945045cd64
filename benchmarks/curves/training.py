"""One small training for all kinds of sharding by torch: it goes on after a load as if nothing had happened.

Every rank takes its share of the same batches, so that two layouts differ in the order of additions only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import reknit
from tests import ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Training = tuple[dict[str, Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
    Build = Callable[[int], Training]

STEPS, SAVED_AT, BATCH, WORDS = 30, 15, 12, 32
"""The number of steps, the step of the checkpoint, and the sizes of the data."""


class Layout(NamedTuple):
    """A number of ranks, and the function that builds a training on each of them with weights by a seed."""

    world: int
    build: Build


def lines(folder: Path, first: Layout, second: Layout, warm: str = "plain") -> dict[str, list[float]]:
    """Return the losses in the first layout, and resumed from the middle in the same and in the second."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, layout, begin in (
        ("uninterrupted", first, 0),
        ("same layout", first, SAVED_AT),
        ("resumed", second, SAVED_AT),
    ):
        found[name], *_ = ranks.run(
            layout.world, losses, layout.build, begin, f"{folder}/checkpoint", warm=warm, timeout=300.0
        )
    return found


def losses(build: Build, begin: int, checkpoint: str) -> list[float]:
    """Train from a step on as one rank, save in the middle of a whole training, and return the losses."""
    world, number = dist.get_world_size(), dist.get_rank()
    os.environ["LOCAL_RANK"] = str(number)
    state, step = build(begin)
    if begin:
        reknit.load(checkpoint, state)
    found = []
    for count in range(begin, STEPS):
        if count == SAVED_AT and not begin:
            reknit.save(checkpoint, state, step=count, overwrite=True).result()
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


def stepping(model: nn.Module) -> Training:
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
