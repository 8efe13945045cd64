"""Numbers of optimizers that are saved as tensors, and tensors saved as numbers: options and states."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import reknit
from reknit.errors import MismatchError, StateError
from reknit.frameworks.registry import wanted
from reknit.frameworks.torch import numbers
from reknit.frameworks.walk.walk import Place
from reknit.integrations.deepspeed import zero
from reknit.types.wanted import Terms
from tests.frameworks.checkpoint import fill, load, save
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

_TENTH = torch.tensor(0.1, dtype=torch.float64)


class Optimizer(torch.optim.Optimizer):
    """An optimizer with any options and states."""

    def __init__(self, parameter: Any, options: dict[str, Any], state: dict[str, Any] | None = None) -> None:
        super().__init__([parameter], options)
        if state is not None:
            self.state[parameter] = state


def _state(options: dict[str, Any], state: dict[str, Any] | None = None) -> dict[str, Any]:
    model = torch.nn.Linear(1, 1, bias=False)
    return {"model": model, "optimizer": Optimizer(model.weight, options, state)}


def _option(saved: Any, present: Any, *, cast: bool = False) -> tuple[Any, list[str]]:
    """Return an option after a load of the saved one, and the reasons why it did not fit."""
    target = _state({"lr": present})
    checkpoint = save(_state({"lr": saved}))
    catalog = replace(checkpoint.catalog(), terms=Terms(cast=cast))
    want = wanted(target, catalog, 0, 1)
    if not want.mismatched:
        fill(want, checkpoint)
    return target["optimizer"].param_groups[0]["lr"], [why for _, _, why in want.mismatched]


@table(
    ("saved", "present", "true"),
    [
        (0.1, torch.zeros((), dtype=torch.float64), 0.1),
        (-0.0, torch.ones(1), -0.0),
        (3, torch.zeros(()), 3.0),
        (2**40 + 1, torch.zeros((), dtype=torch.int64), 2**40 + 1),
        (_TENTH, 0.5, 0.1),
        (torch.tensor(0.1), torch.zeros(1, dtype=torch.float64), torch.tensor(0.1).item()),
        (0.5, 3, 0.5),
        (np.int64(2), 3, 2),
        (np.float32(0.5), 0.25, 0.5),
        (0.5, np.float64(1), np.float64(0.5)),
        ((0.5, torch.tensor(0.25)), (torch.zeros(()), 0.5), (0.5, 0.25)),
    ],
)
def test_an_option_keeps_all_bits_and_the_kind_that_the_target_has(
    saved: Any, present: Any, true: Any
) -> None:
    loaded, why = _option(saved, present)
    assert why == []
    if isinstance(present, torch.Tensor):
        assert loaded is present
        loaded = loaded.item()
    elif isinstance(present, tuple):
        assert loaded[0] is present[0]
        loaded = (loaded[0].item(), loaded[1])
    assert repr(loaded) == repr(true)


def test_a_tensor_inside_an_option_stays_the_one_that_is_there() -> None:
    live = torch.zeros((), dtype=torch.float64)
    loaded, why = _option({"rate": 0.1, "more": [5]}, {"rate": live, "more": [0]})
    assert why == []
    assert loaded == {"rate": live, "more": [5]}
    assert loaded["rate"] is live
    assert live.item() == 0.1
    _, why = _option({"rate": 0.1}, {"rate": torch.zeros(())})
    assert len(why) == 1


@table(
    ("saved", "present", "why"),
    [
        (0.1, torch.zeros(()), "number 0.1 in the checkpoint and float32 here, which would round it"),
        (_TENTH, torch.zeros(()), "would round it"),
        (0.5, torch.zeros((), dtype=torch.int64), "another kind of number"),
        (2**40, torch.zeros((), dtype=torch.int32), "cannot hold it"),
        (0.5, torch.zeros(2), "of shape"),
        (torch.ones(2), torch.zeros(3), "its shape is"),
        (torch.ones(2), torch.zeros(2, dtype=torch.float64), "cast=True"),
        ((0.1, 0.5), (torch.zeros(()), 0.5), "would round it"),
    ],
)
def test_an_option_that_would_lose_bits_is_mismatched_and_left(saved: Any, present: Any, why: str) -> None:
    before = repr(present)
    loaded, found = _option(saved, present)
    assert len(found) == 1
    assert found[0].startswith("its lr: ")
    assert why in found[0]
    assert repr(loaded) == before


def test_a_load_that_may_convert_rounds_an_option_as_a_tensor() -> None:
    for saved, present in ((0.1, torch.zeros(())), (_TENTH, torch.zeros(1)), (0.1, torch.zeros(()).half())):
        loaded, why = _option(saved, present, cast=True)
        assert why == []
        assert loaded.item() == _TENTH.to(present.dtype).item()


def test_a_learning_rate_that_would_be_rounded_is_refused_with_what_helps(tmp_path: Path) -> None:
    reknit.save(tmp_path / "a", _state({"lr": 0.1}))
    target = _state({"lr": torch.tensor(1.0)})
    weight = target["model"].weight.item()
    with pytest.raises(MismatchError, match=r"weight: its lr: .*LoadOptions\(cast=True\)"):
        reknit.load(tmp_path / "a", target)
    assert target["model"].weight.item() == weight
    assert target["optimizer"].param_groups[0]["lr"] == 1
    reknit.load(tmp_path / "a", target, options=reknit.LoadOptions(cast=True))
    assert target["optimizer"].param_groups[0]["lr"] == torch.tensor(0.1)


@table(("saved", "present"), [(3, 0), (3, torch.zeros(())), (torch.tensor(3.0), 0), (torch.tensor([3]), 0)])
def test_a_counter_stays_a_number_or_a_tensor(saved: Any, present: Any) -> None:
    source, target = _state({"lr": 1.0}, {"step": saved}), _state({"lr": 1.0}, {"step": copy(present)})
    source["optimizer"].state["count"], target["optimizer"].state["count"] = saved, present
    load(target, save(source))
    for found in (
        target["optimizer"].state[target["model"].weight]["step"],
        target["optimizer"].state["count"],
    ):
        assert found == 3
        assert isinstance(found, torch.Tensor) == isinstance(present, torch.Tensor)


def test_a_counter_that_a_tensor_cannot_hold_is_mismatched() -> None:
    target = _state({"lr": 1.0}, {"step": torch.zeros(())})
    catalog = save(_state({"lr": 1.0}, {"step": 2**24 + 1})).catalog()
    want = wanted(target, catalog, 0, 1)
    assert [(fqn, "would round it" in why) for _, fqn, why in want.mismatched] == [
        ("state/weight/step", True)
    ]


def test_steps_are_counted_in_as_many_bits_as_they_need() -> None:
    for step in (0, 5, 2**24 + 1, 2**53 + 1, torch.tensor([7], dtype=torch.int32), 0.5):
        counter = numbers.counter(step, "here")
        assert counter.ndim == 0
        assert counter.item() == step
    assert numbers.counter(5, "here").dtype == torch.float32
    with pytest.raises(StateError, match=r"here has taken 10+ steps"):
        numbers.counter(10**30, "here")
    with pytest.raises(StateError, match=r"here is 2.5 .* counts in integers"):
        numbers.require_whole(torch.tensor(2.5), "here")


@table("step", [0, 3, 2**24 + 1, 2**53 + 1])
def test_the_integers_in_which_deepspeed_counts_come_back(step: int) -> None:
    states = {"step": step, "exp_avg": torch.ones(1)}
    made = zero.counted_in_tensor(states, Place("o"))
    assert made["step"].item() == step
    for given in (made, {**made, "step": made["step"].item()}):
        found = zero.counted_in_number(given)["step"]
        assert (found, type(found)) == (step, int)


@table(
    ("saved", "present"),
    [
        (0.1, torch.zeros(())),
        (torch.tensor(0.1), 0.5),
        (_TENTH, 0.5),
        (0.5, torch.zeros(())),
        (2**60 + 1, torch.zeros(())),
        (0.1, None),
        (torch.tensor(0.1), None),
    ],
)
def test_a_number_among_the_states_keeps_its_value_where_it_is_a_tensor_at_times(
    saved: Any, present: Any
) -> None:
    target = _state({}, {} if present is None else {"t": present})
    load(target, save(_state({}, {"t": saved})))
    (found,) = (state["t"] for state in target["optimizer"].state.values())
    assert numbers.number_in(found) == numbers.number_in(saved)


@table(("steps", "before"), [(1, 0), (2, 1), (5, 2)])
def test_lbfgs_with_a_line_search_goes_on_whatever_form_its_step_width_has(steps: int, before: int) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
        for number in range(first, first + count):
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(batch).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]

    (model, one), (target, other) = make(0), make(1)
    train(model, one, 0, steps)
    train(target, other, 5, before)
    load({"m": target, "o": other}, save({"m": model, "o": one}))
    train(model, one, 20, 2)
    train(target, other, 20, 2)
    assert all(map(torch.equal, model.parameters(), target.parameters()))
