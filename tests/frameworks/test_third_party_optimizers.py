"""Optimizers of other packages go on bit for bit; `benchmarks/optimizers` tries all of them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from benchmarks.optimizers import trial
from benchmarks.optimizers.makers import makers
from reknit.frameworks.registry import collect, wanted
from tests.frameworks.checkpoint import Checkpoint, assemble, fill, portable
from tests.optional import needs
from tests.ranks import run
from tests.running.examples import thinned

PACKAGES = {
    "torch": ("torch.optim", ["Adafactor", "LBFGS", "Muon", "SparseAdam"]),
    "bitsandbytes": ("bitsandbytes.optim", ["AdamW8bit", "AdamW32bit", "PagedLion8bit", "AdEMAMix8bit"]),
    "heavyball": ("heavyball", ["SOAP", "AdamW", "SAMWrapper", "Muon", "SplitOpt"]),
    "pytorch_optimizer": (
        "pytorch_optimizer",
        ["Lookahead", "SPAM", "ScalableShampoo", "AggMo", "LoRARite", "PAdam", "TRAC", "Conda", "AdaFactor"],
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", [pytest.param(name, marks=needs(name, name)) for name in PACKAGES])
def test_optimizers_of_a_package_go_on_bit_for_bit(package: str) -> None:
    module, names = PACKAGES[package]
    names = names if package == "torch" else thinned(names, 2)
    chosen = {one.name: one for _, _, one in makers([module]) if one.name in names}
    assert chosen.keys() == set(names)
    found = {name: trial.run(one.make, one.step).ours for name, one in chosen.items()}
    assert {name: ours.why for name, ours in found.items() if not ours.ok} == {}


def _flattened(first: int, checkpoint: Checkpoint | None, world: int) -> Any:
    """Train a model under FSDP1 with 8-bit states: from a checkpoint, or to make one."""
    bnb: Any = importlib.import_module("bitsandbytes")

    torch.manual_seed(first)
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    model: Any = FSDP(net, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=0.01, min_8bit_size=16)
    state = {"m": model, "o": optimizer}
    if checkpoint is not None:
        want = wanted(state, checkpoint.catalog(), dist.get_rank(), world)
        if refused := [*want.mismatched, *want.missing]:
            return sorted({fqn.rpartition("/")[2] for _, fqn, _ in refused})
        fill(want, checkpoint)
    saved = None
    for number in range(first, first + 3 if checkpoint else first + 6):
        if number == first + 3:
            saved = portable(collect(state, dist.get_rank(), world))
        optimizer.zero_grad()
        batch = torch.rand(4, 16, generator=torch.Generator().manual_seed(number))
        model(batch).square().mean().backward()
        optimizer.step()
    return saved, [parameter.detach().clone() for parameter in model.parameters()]


def _there_and_back() -> tuple[Checkpoint, bool]:
    """Return the checkpoint of two ranks, and whether they go on from it as they did without it."""
    saved, want = _flattened(0, None, 2)
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, saved)
    checkpoint = assemble(everyone)
    _, found = _flattened(3, checkpoint, 2)
    return checkpoint, all(map(torch.equal, found, want))


@needs("bitsandbytes", "bitsandbytes")
def test_8_bit_states_under_fsdp1_load_into_the_same_layout_and_into_no_other() -> None:
    (checkpoint, is_same), (_, is_same_too) = run(2, _there_and_back)
    assert is_same
    assert is_same_too
    (refused,) = run(1, _flattened, 3, checkpoint, 1)
    assert {"absmax1", "qmap2"} <= set(refused)
