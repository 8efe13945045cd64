"""Layouts of a really trained model: the ranks hold the whole of it; `torchrun/test_matrix.py` loads them."""

from __future__ import annotations

import hashlib
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from reknit.frameworks.registry import collect
from tests.frameworks.checkpoint import portable
from tests.frameworks.silence import Silence
from tests.ranks import run
from tests.tables import table
from tests.torchrun.models import LAYOUTS, Trained, build, state, truth

if TYPE_CHECKING:
    from reknit.types.shard import Holdings

SAVED: dict[str, tuple[list[Holdings], dict[str, dict[str, Any]]]] = {}


def fingerprint(trained: Trained) -> str:
    """Return a digest of everything live: parameters, gradients, buffers, optimizer states and their keys."""
    total = hashlib.sha256()
    for part in trained.parts:
        for name, tensor in chain(part.named_parameters(), part.named_buffers()):
            grads = getattr(tensor, "grad", None)
            for each in (tensor, grads):
                total.update(repr((name, id(each), getattr(each, "_version", None))).encode())
                if each is not None:
                    local = each.to_local() if isinstance(each, DTensor) else each
                    total.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for optimizer, scheduler in zip(trained.optimizers, trained.schedulers, strict=True):
        total.update(
            repr([(id(p), list(s), [id(v) for v in s.values()]) for p, s in optimizer.state.items()]).encode()
        )
        total.update(
            repr([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]).encode()
        )
        total.update(repr(scheduler.state_dict()).encode())
        total.update(repr(optimizer.state_dict()["state"]).encode())
    return total.hexdigest()


def save_one(layout: str) -> tuple[Holdings, dict[str, dict[str, Any]]]:
    trained = build(layout)
    # A state dict puts parameters that FSDP has gathered back into shards; this is done by FSDP itself.
    for part in trained.parts:
        if not isinstance(part, FullyShardedDataParallel):
            part.state_dict()
    before = fingerprint(trained)
    rank, size = dist.get_rank(), dist.get_world_size()
    with Silence():
        holdings = portable(collect(state(trained), rank, size))
    assert fingerprint(trained) == before
    return holdings, truth(trained)


def saved(layout: str) -> tuple[list[Holdings], dict[str, dict[str, Any]]]:
    """Save a layout, once per session."""
    if layout not in SAVED:
        answers = run(LAYOUTS[layout], save_one, layout)
        SAVED[layout] = [holdings for holdings, _ in answers], answers[0][1]
    return SAVED[layout]


@table(
    ("layout", "all_known"),
    [
        ("single", True),
        ("ddp-2", True),
        ("fsdp2-3", True),
        ("hsdp-2x2", True),
        ("pp-2xfsdp2-2", False),
        ("fsdp1gradop-3", True),
        ("fsdp1none-2", True),
    ],
)
def test_replicas_are_known_where_the_mesh_has_all_ranks(layout: str, all_known: bool) -> None:
    everyone, _ = saved(layout)
    claims = [
        shard.replicas is not None
        for holdings in everyone
        for shard in holdings.shards
        if shard.item == "optimizer" or shard.fqn.endswith("weight")
    ]
    assert claims
    assert all(claims) if all_known else not any(claims)


@table("layout", ["hsdp-2x2", "fsdp1hybrid-2x2"])
def test_hsdp_replicas_are_the_ranks_across_the_replicate_dimension(layout: str) -> None:
    everyone, _ = saved(layout)
    claims = [{s.replicas for s in holdings.shards if s.fqn == "layers.0.up.weight"} for holdings in everyone]
    assert claims == [{(0, 2)}, {(1, 3)}, {(0, 2)}, {(1, 3)}]


def test_counters_of_a_mesh_of_all_ranks_are_replicas_on_all() -> None:
    everyone, _ = saved("fsdp2-3")
    steps = {s.replicas for holdings in everyone for s in holdings.shards if s.fqn.endswith("/step")}
    assert steps == {(0, 1, 2)}


def test_only_the_first_rank_of_ddp_saves_buffers() -> None:
    everyone, _ = saved("ddp-2")
    buffers = [[s for s in holdings.shards if s.fqn.endswith("seen")] for holdings in everyone]
    assert [len(found) for found in buffers] == [4, 0]
    assert {s.replicas for s in buffers[0]} == {(0,)}


def test_a_rank_with_nothing_of_a_tensor_gives_no_shard() -> None:
    everyone, _ = saved("fsdp2-4")
    holders = [any(s.fqn == "layers.0.norm.weight" for s in holdings.shards) for holdings in everyone]
    assert holders == [True, True, True, False]
