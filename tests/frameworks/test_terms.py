"""Loads with several terms at once: lenient ones leave misfits unchanged and report each."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit import transforms as t
from reknit.engine.background import snapshot
from reknit.errors import MismatchError, UsageError
from reknit.frameworks.custom import Held, Value, registered
from reknit.testing.world import run_ranks
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


def test_what_a_split_makes_and_no_rank_takes_is_unexpected(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"m": {"qkv": np.arange(6.0), "layers": np.ones((2, 3))}})
    rules = [t.split("qkv", ["q", "k", "v"]), t.unstack("layers", "layers.{i}", over="i")]
    options = reknit.LoadOptions(transforms=rules)
    state = {"m": {"q": np.zeros(2), "layers.0": np.zeros(3)}}
    with pytest.raises(MismatchError, match=r"(?s)m/k: .*m/layers\.1: .*m/v: "):
        reknit.load(tmp_path, state, options=options)
    report = reknit.load(tmp_path, state, strict=False, options=options)
    assert sorted(report.unexpected) == ["m/k", "m/layers.1", "m/v"]
    assert not reknit.load(tmp_path, {"m": {}}, strict=False, options=options).restored


def test_what_a_split_makes_may_be_taken_by_several_ranks(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"m": {"qkv": np.arange(6.0)}})
    options = reknit.LoadOptions(transforms=[t.split("qkv", ["q", "k", "v"])])

    def rank(group: Any) -> dict[str, Any]:
        mine = {"m": {"q": np.zeros(2)} if group.rank else {"k": np.zeros(2), "v": np.zeros(2)}}
        assert reknit.load(tmp_path, mine, options=options, group=group).unexpected == ()
        return mine["m"]

    (first, second) = run_ranks(2, rank)
    assert [*second["q"], *first["k"], *first["v"]] == [*range(6)]


def test_padding_of_what_a_lenient_load_leaves_is_left_too(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"m": {"a": torch.arange(2.0), "b": torch.ones(1)}})
    state = {"m": {"a": torch.ones(3, dtype=torch.float16), "b": torch.zeros(1)}}
    options = reknit.LoadOptions(transforms=[t.pad("a", 3)])
    assert "m/a" in reknit.load(tmp_path, state, strict=False, options=options).mismatched
    assert state["m"]["a"].tolist() == [1, 1, 1]
    options = reknit.LoadOptions(transforms=[t.pad("a", 3)], cast=True)
    reknit.load(tmp_path, state, options=options)
    assert state["m"]["a"].tolist() == [0, 1, 0]


def test_a_replacement_that_is_none_is_a_wrong_call() -> None:
    for replacement in (r"\2", r"\g<name>"):
        with pytest.raises(UsageError, match="with its replacement"):
            t.rewrite("(a)b", replacement)


class Copied:
    """A value that gives copies of its memory."""

    def __init__(self, values: Any) -> None:
        self.values = values


class Copies:
    """The framework of copies."""

    def matches(self, value: Any) -> bool:
        return isinstance(value, Copied)

    def holdings(self, value: Any, rank: int, size: int) -> Iterable[Held | Value]:
        shape = value.values.shape
        return [
            Held("", shape, str(value.values.dtype), (0,) * len(shape), shape, np.full_like(value.values, 9))
        ]

    def restore(self, value: Any, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        value.values = held[0].memory


@table("saved", [np.ones(2, np.complex64), np.ones((2, 1), np.float32)])
def test_a_framework_gets_no_memory_that_was_not_filled(saved: Any, tmp_path: Path) -> None:
    reknit.save(tmp_path, {"x": saved, "other": np.ones(1)})
    x = Copied(np.zeros(2, np.float32))
    options = reknit.LoadOptions(cast=True, allow_shape_mismatch=("x",))
    with registered(Copies()):
        report = reknit.load(tmp_path, {"x": x, "other": np.zeros(1)}, strict=False, options=options)
    assert "x" in report.mismatched
    assert x.values.tolist() == [0, 0]


@table("library", ["jax", "deepspeed", "vescale", "megatron.core"])
def test_a_framework_whose_import_is_blocked_is_not_asked(library: str, tmp_path: Path) -> None:
    reknit.save(tmp_path, {"x": torch.ones(2), "y": [1, "a"]})
    state: dict[str, Any] = {"x": torch.zeros(2), "y": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        patch.delitem(sys.modules, "reknit.integrations.jax.arrays", raising=False)
        reknit.load(tmp_path, state)
    assert state["x"].tolist() == [1, 1]
    assert state["y"] == [1, "a"]


@table("saved", [torch.float32, torch.bfloat16])
@table("stepped", [False, True])
def test_states_that_are_cast_follow_their_parameter_and_the_next_step_succeeds(
    saved: torch.dtype, stepped: bool, tmp_path: Path
) -> None:
    def trained(dtype: torch.dtype, steps: int) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            step(model, optimizer)
        return {"m": model, "o": optimizer}

    def step(m: Any, o: Any) -> None:
        m(torch.ones(4, 3, dtype=m.weight.dtype)).sum().backward()
        o.step()

    other = torch.bfloat16 if saved == torch.float32 else torch.float32
    reknit.save(tmp_path, trained(saved, 1))
    state = trained(other, int(stepped))
    reknit.load(tmp_path, state, options=reknit.LoadOptions(cast=True))
    states = state["o"].state[state["m"].weight]
    assert (states["exp_avg"].dtype, states["step"].dtype) == (other, torch.float32)
    step(**state)


def test_a_load_changes_nothing_before_a_lazily_staged_save_has_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = snapshot.Snapshot.settle

    def slow(self: Any, *deferred: Any) -> None:
        time.sleep(0.3)
        settle(self, *deferred)

    monkeypatch.setattr(snapshot.Snapshot, "settle", slow)
    state: dict[str, Any] = {"m": {"w": torch.nn.Parameter(torch.zeros(1 << 16))}}
    state["o"] = torch.optim.SGD([("w", state["m"]["w"])])
    lazy = reknit.SaveOptions(stage="lazy")
    reknit.prepare(tmp_path, state, options=lazy)
    state["o"].step()  # now it has proved to wait
    reknit.save(tmp_path / "old", state)
    state["m"]["w"].data.fill_(1)
    pending = reknit.save(tmp_path / "new", state, wait=False, options=lazy)
    reknit.load(tmp_path / "old", state)
    pending.result(60)
    assert reknit.close(60)
    assert not state["m"]["w"].any()
    reknit.load(tmp_path / "new", state)
    assert state["m"]["w"].all()
