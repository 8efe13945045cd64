"""Ray Train: workers save together, one dies, and others resume from the newest committed step."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.errors import MissingExtraError, UsageError
from reknit.integrations import ray as integration
from tests.integrations.ray_cluster import PLANTED, run_all
from tests.optional import needs
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

with_ray = needs("ray", "Ray")

STEPS = 14


def moment(seed: int) -> float:
    """Return a random moment of a run after its first saves, long before its end."""
    return round(random.Random(seed).uniform(5.0, 7.2), 3)


def trained(steps: int) -> dict[str, torch.Tensor]:
    """Return the weights of the example after some steps in this process, without Ray and without saves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Dropout(0.1), torch.nn.Linear(33, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(step)
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def loaded(folder: Path, step: int) -> dict[str, Any]:
    state = {name: torch.zeros_like(value) for name, value in trained(0).items()}
    reknit.load(folder / "steps" / f"step_{step:08}", {"model": state})
    return state


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@with_ray
@pytest.mark.timeout(500)
def test_one_worker_resumes_bit_for_bit_from_the_newest_step_of_two_of_which_one_was_killed(
    tmp_path: Path,
) -> None:
    died, resumed = run_all(
        tmp_path,
        f"--steps {STEPS} --workers 2 --restarts 0 --die-at {moment(3)}",
        f"--steps {STEPS} --workers 1",
    )
    assert died.startswith("failed")
    name, first = resumed.split(":")[0], int(resumed.split("step ")[1].split(",")[0])
    assert name == f"step_{STEPS - 1:08}"
    assert 2 < first < STEPS  # the first step after a committed one, not after the planted one
    assert first % 2 == 1
    assert_same(loaded(tmp_path, STEPS - 1), trained(STEPS))
    assert [step.step for step in reknit.steps(tmp_path / "steps")] == [STEPS - 2, STEPS - 1]
    assert (tmp_path / "steps" / PLANTED).is_dir()


@with_ray
def test_ray_itself_starts_the_workers_again(tmp_path: Path) -> None:
    if not is_night():
        pytest.skip("starting six workers takes half a minute; the test above has the rest")
    for seed in range(3):
        folder = tmp_path / str(seed)
        (line,) = run_all(folder, f"--steps {STEPS} --workers 2 --die-at {moment(seed)}")
        assert line.startswith(f"step_{STEPS - 1:08}: began with step ")
        assert "began with step 0" not in line
        assert_same(loaded(folder, STEPS - 1), trained(STEPS))


def test_a_checkpoint_that_reknit_did_not_report_is_refused() -> None:
    other: Any = SimpleNamespace(get_metadata=dict)
    with pytest.raises(UsageError, match=r"was not reported by reknit\.integrations\.ray\.report"):
        integration.saved_path(other)


def test_without_ray_a_report_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        reknit.Checkpointer(tmp_path) as run,
        pytest.raises(MissingExtraError, match=r"pip install 'reknit\[ray\]'"),
    ):
        integration.report({}, run, 0, {})
    assert not any(tmp_path.iterdir())
