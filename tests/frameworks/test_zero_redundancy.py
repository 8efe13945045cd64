"""ZeroRedundancyOptimizer: each rank has the states of its own parameters, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reknit.errors import StateError
from reknit.frameworks.registry import collect
from reknit.frameworks.torch import torch_private
from tests.frameworks.checkpoint import Checkpoint, assemble, load, portable
from tests.frameworks.silence import Silence
from tests.ranks import run


def build(seed: int, *, zero: bool = True) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False))
    module = DistributedDataParallel(net) if dist.is_initialized() else net
    named = list(module.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [named[0][1]]},
        {"params": [p for _, p in named[1:]], "lr": 0.5},
    ]
    if zero:
        # Not at the top: importing it warns.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return module, ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)
    return module, torch.optim.AdamW(groups, lr=0.1)


def step(module: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    module(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def save_one(zero: bool) -> tuple[Any, list[int], dict[int, int]]:
    module, optimizer = build(0, zero=zero)
    step(module, optimizer)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    with Silence():
        held = portable(collect({"m": module, "o": optimizer}, dist.get_rank(), dist.get_world_size()))
    numbers = {id(p): n for n, p in enumerate(module.parameters())}
    local = getattr(optimizer, "optim", optimizer)
    owners = torch_private.zero_owners(optimizer) if zero else {}
    mine = sorted(numbers[id(p)] for p in local.state)
    return held, mine, {numbers[id(p)]: rank for p, rank in owners.items()}


def load_one(checkpoint: Checkpoint, after: dict[str, torch.Tensor], trained: bool) -> Any:
    module, optimizer = build(1)
    if trained:
        step(module, optimizer)
    rank, world = dist.get_rank(), dist.get_world_size()
    load({"m": module, "o": optimizer}, checkpoint, rank, world)
    held = portable(collect({"m": module, "o": optimizer}, rank, world))
    step(module, optimizer)
    for name, tensor in module.module.state_dict().items():  # type: ignore[union-attr]
        assert torch.allclose(tensor, after[name], atol=1e-6), name
    return held


def saved(world: int, *, zero: bool) -> Checkpoint:
    answers = run(world, save_one, zero)
    for rank, (_, mine, owners) in enumerate(answers):
        assert mine == ([n for n, owner in sorted(owners.items()) if owner == rank] if zero else [0, 1, 2])
    return assemble([held for held, _, _ in answers])


def test_states_are_those_of_the_plain_optimizer_and_load_on_any_number_of_ranks() -> None:
    of_zero, plain = saved(2, zero=True), saved(2, zero=False)
    assert of_zero.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in of_zero.tensors.items())
    assert of_zero.shared.keys() == plain.shared.keys()
    module, optimizer = build(1, zero=False)
    load({"m": module, "o": optimizer}, of_zero)
    step(module, optimizer)
    after = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    for world, source, trained in ((2, plain, False), (3, of_zero, True)):
        again = assemble(run(world, load_one, source, after, trained))
        assert again.tensors.keys() == plain.tensors.keys()
        assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in again.tensors.items())


def refused() -> None:
    def kept(*_: Any) -> None: ...

    for inside in (False, True):
        module, optimizer = build(0)
        one = optimizer.optim if inside else optimizer
        one.register_state_dict_post_hook(kept)
        with pytest.raises(StateError, match=r"with the hook .*kept, which cannot be run"):
            collect({"m": module, "o": optimizer}, dist.get_rank(), 2)
    module, optimizer = build(0)
    optimizer._overlap_with_ddp = True
    with pytest.raises(StateError, match="overlap_with_ddp"):
        collect({"m": module, "o": optimizer}, dist.get_rank(), 2)


def test_one_with_hooks_and_one_that_ddp_steps_in_the_backward_are_refused() -> None:
    run(2, refused)
