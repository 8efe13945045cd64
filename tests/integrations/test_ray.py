"""Ray Train: workers save together, one dies, and others resume from the newest committed step.

The processes of a cluster also import one checkpoint together.
"""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import reknit
from reknit.errors import MissingExtraError, UsageError
from reknit.integrations import ray as integration
from tests.integrations.ray_cluster import PLANTED, Output, run_all
from tests.optional import needs
from tests.running.examples import at_night

if TYPE_CHECKING:
    from pathlib import Path

with_ray = needs("ray", "Ray")

STEPS, SAVED = 14, 9


def moment(seed: int) -> float:
    """Return a random moment after the first saves: a step, and up to 0.3 s.

    The run still has seven steps by then, which take 0.1 s each, since Ray takes no more reports in a second.
    """
    chosen = random.Random(seed)
    return chosen.randint(5, 7) + round(chosen.uniform(0, 0.3), 3)


def trained(steps: int, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of the example after some steps without Ray, which may save them to a folder."""
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
    if folder is not None:
        with reknit.Checkpointer(folder) as run:
            run.save(steps - 1, {"model": model, "optimizer": optimizer}, force=True)
    return model.state_dict()


def loaded(folder: Path, step: int) -> dict[str, Any]:
    state = {name: torch.zeros_like(value) for name, value in trained(0).items()}
    reknit.load(folder / "steps" / f"step_{step:08}", {"model": state})
    return state


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def weights() -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that the processes of a cluster import."""
    return {f"w{n}": np.full(50_000, n, np.float32) for n in range(6)}


class Used(NamedTuple):
    """A cluster that has trained and imported: its folder, and its output."""

    folder: Path
    output: Output


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    """Return a cluster of which a worker went on from a step that a process without Ray had saved.

    Two processes then imported, one did so a second time, and too many of them.
    """
    folder = tmp_path_factory.mktemp("ray")
    save_file(weights(), folder / "model.safetensors")
    trained(SAVED, folder / "steps")
    imports = f"import {folder}/model.safetensors {folder}/own"
    output = run_all(
        folder,
        f"--steps {STEPS} --workers 1",
        f"{imports} --ray 2",
        f"{imports} --ray 1",
        f"{imports}-more --ray 9",
    )
    return Used(folder, output)


@with_ray
@pytest.mark.timeout(1000)
@at_night("the start of a cluster takes a minute; tests of other trainers resume by day")
def test_a_worker_resumes_bit_for_bit_from_the_newest_step_which_ray_did_not_save(used: Used) -> None:
    assert_complete(used.folder, used.output.lines[0])
    assert f"began with step {SAVED}," in used.output.lines[0]


@with_ray
@pytest.mark.timeout(1000)
@at_night("the test above has a resume, and runs of transformers and ByteCheckpoint die, by day")
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_ray_starts_again_resume_bit_for_bit_from_the_newest_step(
    tmp_path: Path, workers: int
) -> None:
    run = run_all(tmp_path, f"--steps {STEPS} --workers {workers} --die-at {moment(0)}")
    assert_complete(tmp_path, run.lines[0])


@with_ray
@pytest.mark.timeout(1000)
@at_night("the first test above has a resume by day")
@pytest.mark.parametrize("seed", range(3))
def test_one_worker_goes_on_after_two_of_which_one_was_killed(tmp_path: Path, seed: int) -> None:
    died = f"--steps {STEPS} --workers 2 --restarts 0 --die-at {moment(seed)}"
    run = run_all(tmp_path, died, f"--steps {STEPS} --workers 1")
    assert run.lines[0].startswith("failed")
    assert_complete(tmp_path, run.lines[1])


def assert_complete(folder: Path, line: str) -> None:
    assert_went_on(folder, line)
    assert [step.step for step in reknit.steps(folder / "steps")] == [STEPS - 2, STEPS - 1]
    assert (folder / "steps" / PLANTED).is_dir()


def assert_went_on(folder: Path, line: str) -> None:
    name, first = line.split(":")[0], int(line.split("step ")[1].split(",")[0])
    assert name == f"step_{STEPS - 1:08}"
    assert 2 < first < STEPS  # the first step after a committed one, not after the planted one
    assert first % 2 == 1
    assert line.endswith(f"registered by Ray: {name}")
    assert_same(loaded(folder, STEPS - 1), trained(STEPS))


@with_ray
@pytest.mark.timeout(1000)
@at_night("formats/test_import_foreign.py has ranks that import together by day")
def test_processes_of_a_cluster_import_together_and_their_error_is_that_of_the_import(used: Used) -> None:
    assert used.output.lines[1:] == ["exit code 0", "exit code 2", "exit code 2"]
    assert "there is a committed checkpoint" in used.output.errors
    assert "the Ray cluster has 3 cores for 9 ranks" in used.output.errors
    with reknit.open(used.folder / "own") as checkpoint:
        for name, array in weights().items():
            assert np.array_equal(checkpoint.read("model", name), array)


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
