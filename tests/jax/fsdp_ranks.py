"""The ranks of torch in the tests of JAX: they train a model in FSDP, save it, and fill it again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import reknit
from tests.torchrun import models

LAYOUTS = ("fsdp2", "fsdp1", "fsdp1flat")
OPTIONS = "optimizer/param_groups*"


class Block(nn.Module):
    """A number of rows that two ranks cannot divide equally."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, 8, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = x + self.down(self.norm(self.up(x)).relu())
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(8, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x * self.scale)
        return out


def build(layout: str, *, steps: int, seed: int) -> models.Trained:
    """Build the model in a layout on this rank, and train it."""
    torch.manual_seed(seed)
    net: nn.Module = Net()
    if layout == "fsdp2":
        for layer in net.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(net)
    else:
        net = FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=layout == "fsdp1",
            device_id=torch.device("cpu"),
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trained = models.Trained(layout, [net], [optimizer], [], dist.get_rank())
    for number in range(steps):
        step(trained, number)
    return trained


def step(trained: models.Trained, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * trained.replica + number)
    ids = torch.randint(0, 13, (4, 5), generator=generator)
    trained.optimizers[0].zero_grad()
    out = trained.parts[0](ids)
    loss: Any = nn.functional.cross_entropy(out.reshape(-1, 13), ids.reshape(-1))
    loss.backward()
    trained.optimizers[0].step()


def state(trained: models.Trained) -> dict[str, Any]:
    return {"model": trained.parts[0], "optimizer": trained.optimizers[0]}


def save_all(root: str) -> None:
    """Save every layout after two steps, with its whole state then and a step later."""
    for number, layout in enumerate(LAYOUTS):
        trained = build(layout, steps=2, seed=number)
        reknit.save(f"{root}/{layout}", state(trained), step=2)
        for name, truth in (("now", tensors(trained)), ("later", _later(trained))):
            if dist.get_rank() == 0:
                np.savez(f"{root}/{layout}.{name}.npz", **truth)


def _later(trained: models.Trained) -> dict[str, Any]:
    step(trained, 2)
    return tensors(trained)


def tensors(trained: models.Trained) -> dict[str, Any]:
    """Return all whole tensors of a state as torch gathers them, by item and name."""
    return {
        f"{item}/{name}": tensor.numpy()
        for item, values in models.truth(trained).items()
        for name, tensor in values.items()
        if isinstance(tensor, torch.Tensor)
    }


def load_all(root: str, folders: dict[str, str]) -> dict[str, list[str]]:
    """Load each layout's checkpoint into every layout, and return the differences, now and a step later."""
    differing = {}
    for layout in LAYOUTS:
        for number, (folder, saved) in enumerate(folders.items()):
            trained = build(layout, steps=number % 2, seed=9)
            report = reknit.load(folder, state(trained), strict=[f"!{OPTIONS}"])
            wrong = [name for name in report.missing if not name.startswith("optimizer/param_groups/")]
            wrong += [*report.mismatched, *report.unexpected]
            wrong += _unlike(tensors(trained), f"{root}/{saved}.now.npz")
            if layout == saved:
                wrong += _unlike(_later(trained), f"{root}/{saved}.later.npz")
            differing[f"{folder} into {layout}"] = wrong
    return differing


def _unlike(found: dict[str, Any], file: str) -> list[str]:
    with np.load(file) as truth:
        wrong = [f"only one has {name}" for name in truth.keys() ^ found.keys()]
        return wrong + [n for n in truth.keys() & found.keys() if truth[n].tobytes() != found[n].tobytes()]
