"""FSDP1, three ranks and then two: the loss goes on as if nothing had happened.

Every rank takes its share of the same batches, so that two layouts differ in the order of additions only.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import reknit

if TYPE_CHECKING:
    from collections.abc import Callable

    Training = tuple[dict[str, Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
    Build = Callable[[int], Training]

STEPS, SAVED_AT, BATCH, WORDS = 30, 15, 12, 32
"""The number of steps, the step of the checkpoint, and the sizes of the data."""


def main() -> None:
    print(json.dumps(curves(Path(sys.argv[1]))))


def curves(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return the losses of an uninterrupted training, and of trainings that resume from its checkpoint."""
    return {"3 to 2 ranks": lines(folder, fully_sharded, 3, 2)}


def lines(folder: Path, build: Build, first: int, second: int) -> dict[str, list[float]]:
    """Return the losses on `first` ranks, and resumed from the middle on `first` and on `second` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, world, begin in (
        ("uninterrupted", first, 0),
        ("same layout", first, SAVED_AT),
        ("resumed", second, SAVED_AT),
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        reported = folder / f"{name}.json"
        torch.multiprocessing.spawn(rank, ((world, port), build, begin, (str(folder), str(reported))), world)  # type: ignore[attr-defined,no-untyped-call]
        found[name] = json.loads(reported.read_text())
    return found


def rank(number: int, meeting: tuple[int, int], build: Build, begin: int, files: tuple[str, str]) -> None:
    """Run one rank of a training that begins with a step: train, save in the middle, and write the losses."""
    (world, port), (folder, losses_file) = meeting, files
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=world)
    state, step = build(begin)
    if begin:
        reknit.load(f"{folder}/checkpoint", state)
    losses = []
    for count in range(begin, STEPS):
        if count == SAVED_AT and not begin:
            reknit.save(f"{folder}/checkpoint", state, step=count, overwrite=True).result()
        ids, following = (part.chunk(world)[number] for part in batch(count))
        loss = step(ids, following).detach() / world
        dist.all_reduce(loss)
        losses.append(float(loss))
    if number == 0:
        Path(losses_file).write_text(json.dumps(losses))
    dist.destroy_process_group()


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


def fully_sharded(seed: int) -> Training:
    """Return an FSDP1 training that begins with weights of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(seed)
    model = FullyShardedDataParallel(
        Reader(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
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


if __name__ == "__main__":
    main()
