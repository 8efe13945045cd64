"""Real checkpoints for tests, also with chunks as many ranks would write them."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import reknit
from reknit.comm.group import SoloGroup
from reknit.options import SaveOptions
from reknit.storage.registry import open_storage
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import Holdings, Shard, TensorSpec
from tests.engine.held import save_held, task_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


def save_in_boxes(
    path: Path, arrays: Mapping[str, NDArray[Any]], boxes: Mapping[str, Sequence[Box]], item: str = "model"
) -> None:
    """Save arrays of one item, each as the chunks that `boxes` names (default: whole)."""
    shards = [
        Shard(item, fqn, spec, box, (0,), np.asarray(array[box.slices()]))
        for fqn, array in arrays.items()
        for spec in [TensorSpec(array.shape, str(array.dtype))]
        for box in boxes.get(fqn, [Box.whole(array.shape)])
    ]
    storage = open_storage(path, durability="process")
    holdings = Holdings((item,), tuple(shards), ())
    save_held(
        lambda: holdings, task_at(storage, SoloGroup(0), SaveOptions(), step=1, origin={"world_size": 1})
    )
    storage.close()


def columns(shape: Sequence[int], parts: int) -> list[Box]:
    """Cut a matrix into boxes of whole columns, as tensor parallelism does."""
    rows, width = shape
    edges = [width * k // parts for k in range(parts + 1)]
    return [Box((0, a), (rows, b - a)) for a, b in pairwise(edges)]


def random_bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of any bits that its dtype allows."""
    nbytes = int(np.prod(shape)) * ITEMSIZE[dtype]
    data = torch.randint(0, 2 if dtype == "bool" else 256, (nbytes,), dtype=torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape)


def every_dtype(without: Sequence[str] = ()) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors of every dtype: a matrix, a scalar, and one without elements."""
    torch.manual_seed(0)
    shapes = {"matrix": (3, 5), "scalar": (), "none": (0, 4)}
    return {
        dtype: {name: random_bits(dtype, shape) for name, shape in shapes.items()}
        for dtype in ITEMSIZE
        if dtype not in without
    }


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with tied weights after one step of an optimizer with two groups."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    net[1].weight = net[0].weight
    groups: list[dict[str, Any]] = [
        {"params": net[:2].parameters(), "lr": 0.1},
        {"params": net[2].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return net, optimizer


def save_training(path: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Save a model, its optimizer, and values of many types; return the first two."""
    net, optimizer = trained()
    values = {"epoch": 3, "mixed": (1, 2.5), "set": {1, 2}, "text": "x", "none": None, "deep": [{"a": True}]}
    reknit.save(
        path,
        {
            "model": net,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
            "values": values,
            "rng": reknit.RngState(),
        },
        step=7,
    )
    return net, optimizer


def damage(path: Path) -> None:
    """Flip a bit of the last byte of the only data file of a checkpoint."""
    (file,) = (path / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Let the system refuse to make any file of this process larger, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
