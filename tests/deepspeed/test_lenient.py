"""A lenient load of an engine also replaces all copies of its weights, which the next step would restore."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import reknit
from reknit.integrations.deepspeed import private
from tests import ranks
from tests.deepspeed import engines
from tests.optional import needs

pytestmark = needs("deepspeed", "DeepSpeed")

run = partial(ranks.run, warm="deepspeed")

SAVE = reknit.SaveOptions(durability="process", threads=1, timeout_s=60)


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def _step(forward: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    forward(torch.ones(4, 3).bfloat16()).float().sum().backward()
    optimizer.step()


def _train(engine: Any) -> None:
    engine.backward(engine(torch.ones(4, 3).bfloat16()).float().sum())
    engine.step()


def fresh(root: str) -> list[str]:
    """Load into engines without states, with cast, take a step, and return the names that differ."""
    plain = _net(0).bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0)
    _step(plain, optimizer)
    reknit.save(f"{root}/cast", {"m": plain, "o": optimizer}, options=SAVE)
    wrong = []
    for stage in (1, 2, 3):
        engine = _engine(stage)
        state = {"m": engine, "o": engine.optimizer}
        reknit.load(f"{root}/cast", state, options=reknit.LoadOptions(cast=True))
        _train(engine)
        for states in engine.optimizer.optimizer.state.values():
            wrong += [] if states["exp_avg"].dtype == torch.float32 else [f"{stage}"]
    return wrong


def lacking(root: str) -> list[str]:
    """Load a checkpoint that has one of two parameters, and return the changes of the other's masters."""
    reknit.save(f"{root}/lacking", {"m": {"bias": torch.ones(2).bfloat16()}}, options=SAVE)
    wrong = []
    for stage in (1, 2, 3):
        engine = _engine(stage, 0.1)
        _train(engine)
        before = [group.flat.detach().clone() for group in private.flat_groups(engine.optimizer)]
        report = reknit.load(f"{root}/lacking", {"m": engine}, strict=False)
        assert report.missing == ("m/weight",)
        for group, old in zip(private.flat_groups(engine.optimizer), before, strict=True):
            assert not torch.equal(old, old.bfloat16().float())
            for member in group.members:
                here = slice(member.offset, member.offset + member.numel)
                expected = old[here] if member.shape == (2, 3) else torch.ones(2)
                wrong += [] if torch.equal(group.flat[here], expected) else [f"{stage} {member.shape}"]
    return wrong


def _engine(stage: int, lr: float = 0.0) -> Any:
    made = _net(1)
    optimizer = torch.optim.AdamW(made.parameters(), lr=lr)
    how = engines.config(stage, "bf16")
    engine, *_ = engines.deepspeed().initialize(model=made, optimizer=optimizer, config=how)
    return engine


def resume(root: str) -> list[str]:
    """Load weights without masters, step without a learning rate, and return the names that differ."""
    plain = _net(0).bfloat16()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0)
    _step(plain, optimizer)
    reknit.save(f"{root}/plain", {"m": plain, "o": optimizer}, options=SAVE)
    wrong = []
    for stage in (1, 2, 3):
        engine = _engine(stage)
        _train(engine)
        state = {"m": engine, "o": engine.optimizer}
        report = reknit.load(f"{root}/plain", state, strict=False)
        assert "m/weight" in report.mismatched  # as the source of master weights: without cast
        _train(engine)
        for name, expected in plain.state_dict().items():
            if not torch.equal(engines.whole(dict(engine.module.named_parameters())[name]), expected):
                wrong.append(f"{stage} {name}")
        for group in private.flat_groups(engine.optimizer):
            wrong += [f"{stage}"] if not torch.equal(group.flat.to(group.live.dtype), group.live) else []
    return wrong


def test_masters_that_a_lenient_load_cannot_fill_follow_their_parameters(tmp_path: object) -> None:
    assert run(1, resume, str(tmp_path), timeout=100) == [[]]


def test_states_that_are_cast_into_a_fresh_engine_have_the_precision_of_its_masters(tmp_path: object) -> None:
    assert run(1, fresh, str(tmp_path), timeout=100) == [[]]


def test_masters_of_what_a_checkpoint_lacks_keep_their_precision(tmp_path: object) -> None:
    assert run(1, lacking, str(tmp_path), timeout=100) == [[]]
