"""Any optimizer with any hooks on several ranks: it goes on in another layout as if it had never stopped."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from reknit.frameworks.registry import collect
from tests.frameworks.checkpoint import gathered, load
from tests.frameworks.silence import Silence
from tests.frameworks.test_optimizer_protocol import HOOKS, PLAIN, register, train
from tests.ranks import run
from tests.running.examples import examples

RANKS = 2
LAYOUTS = ("whole", "ddp", "fsdp2")


class Case(NamedTuple):
    """An optimizer that was trained for `steps`, and one of another layout that was trained for `before`."""

    kind: str
    hooks: tuple[str, ...]
    source: str
    target: str
    steps: int
    before: int
    split: bool


CASES = st.builds(
    Case,
    st.sampled_from(sorted(PLAIN)),
    st.lists(st.sampled_from(HOOKS), max_size=2).map(tuple),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2),
    st.integers(0, 1),
    st.booleans(),
)


def laid_out(layout: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return model


def made(case: Case, layout: str, seed: int, ran: list[str]) -> tuple[Any, Any]:
    model = laid_out(layout, seed)
    parameters: Any = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.25}]
    optimizer = PLAIN[case.kind](groups if case.split else parameters)
    for hook in case.hooks:
        register(optimizer, hook, ran)
    return model, optimizer


def whole(model: nn.Module) -> list[Any]:
    return [getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters()]


def go_on(cases: list[Case]) -> list[Case]:
    """Return those cases in which the target does not go on as the source does."""
    return [case for case in cases if not goes_on(case)]


def goes_on(case: Case) -> bool:
    ran: list[str] = []
    rank = dist.get_rank()
    model, optimizer = made(case, case.source, 0, ran)
    target, other = made(case, case.target, 1, ran)
    train(model, optimizer, case.steps)
    train(target, other, case.before)
    with Silence():
        mine = collect({"m": model, "o": optimizer}, rank, RANKS)
    checkpoint = gathered(mine)
    with Silence():
        load({"m": target, "o": other}, checkpoint, rank, RANKS)
    train(model, optimizer)
    train(target, other)
    same = all(torch.equal(a, b) for a, b in zip(whole(model), whole(target), strict=True))
    return same and set(ran) == set(case.hooks)


@settings(max_examples=examples(2), deadline=None)
@given(st.lists(CASES, min_size=4, max_size=8))
def test_any_optimizer_with_any_hooks_goes_on_in_any_layout(cases: list[Case]) -> None:
    assert run(RANKS, go_on, cases) == [[]] * RANKS
