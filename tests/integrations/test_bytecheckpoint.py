"""Scripts of ByteCheckpoint run with one import changed, per framework, and resume after a kill."""

from __future__ import annotations

import logging
import os
import runpy
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import MismatchError, UsageError
from reknit.integrations.bytecheckpoint import script as bcp
from tests.faults.nursery import wait_until
from tests.integrations.random_death import death
from tests.ranks import Died, run
from tests.running.examples import is_night

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainers" / "bytecheckpoint.py"
STEPS = 7
KILLED = Died(-signal.SIGKILL)


def trained(folder: str, framework: str, seed: int | None = None) -> int:
    """Run the example as one rank, which dies at a random moment if there is a seed."""
    die = (lambda step: None) if seed is None else death(seed, 3, STEPS - 2)

    def reached(step: int) -> None:
        die(step)
        time.sleep(0 if seed is None else 0.05)

    first = 0
    try:
        first = runpy.run_path(str(EXAMPLE))["train"](folder, STEPS, framework, reached)
    except RuntimeError:
        if seed is None:  # otherwise the other rank died a little earlier
            raise
    if seed is not None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return first


def contents(path: str | Path) -> dict[str, torch.Tensor]:
    """Return all tensors of model and optimizer."""
    with reknit.open(path) as checkpoint:
        return {
            f"{item}/{name}": checkpoint.read(item, name, framework="torch")
            for item in ("model", "optimizer")
            for name in checkpoint.tensors[item]
        }


def newest(folder: Path) -> int:
    """Return the step of the newest committed checkpoint, after the agents of a killed run have ended."""
    assert reknit.latest(folder, pending="wait") is not None
    return max(step.step for step in reknit.steps(folder) if step.step is not None)


DEATHS = [("fsdp2", 3), ("ddp", 1), ("fsdp", 2)]


@pytest.mark.parametrize(("framework", "seed"), DEATHS if is_night() else DEATHS[:1])
def test_a_killed_run_goes_on_from_the_newest_committed_step(
    tmp_path: Path, framework: str, seed: int
) -> None:
    killed, other = tmp_path / "killed", tmp_path / "other"
    assert run(2, trained, str(killed), framework, seed, some_die=True) == [KILLED, KILLED]
    found_at_once = bcp.find_latest_ckpt_path(killed)
    step = newest(killed)
    assert found_at_once == str(killed / f"global_step_{step}")
    assert 1 <= step < STEPS
    unfinished = killed / "global_step_90"  # all but its commit
    shutil.copytree(killed / f"global_step_{step}", unfinished)
    (unfinished / "manifest.json").unlink()
    shutil.copytree(killed, other)
    assert run(2, trained, str(killed), framework) == [step, step]

    whole = tmp_path / "whole"
    assert run(2, trained, str(whole), framework) == [0, 0]
    expected, found = (contents(folder / f"global_step_{STEPS}") for folder in (whole, killed))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []

    assert run(3, trained, str(other), framework) == [step, step, step]
    for name, tensor in contents(other / f"global_step_{STEPS}").items():
        assert tensor.shape == expected[name].shape


def extra_of(folder: str, *, save: bool) -> Any:
    """Save or load values that differ between ranks."""
    model = torch.nn.Linear(2, 2)
    mine = {"rng": torch.full((4,), dist.get_rank()), "list": [dist.get_rank(), ("a", None)]}
    state: dict[str, Any] = {"model": model, "extra_state": mine if save else {}}
    if save:
        bcp.DDPCheckpointer.save(folder, state)
    else:
        bcp.DDPCheckpointer.load(folder, state)
    return state["extra_state"]


def test_each_rank_gets_its_extra_state_and_further_ranks_that_of_rank_0(tmp_path: Path) -> None:
    saved = run(2, partial(extra_of, save=True), str(tmp_path / "a"))
    for world, ranks in ((2, (0, 1)), (3, (0, 0, 0))):
        loaded = run(world, partial(extra_of, save=False), str(tmp_path / "a"))
        assert [extra["list"] for extra in loaded] == [saved[rank]["list"] for rank in ranks]
        assert [extra["rng"].tolist() for extra in loaded] == [[rank] * 4 for rank in ranks]


def test_a_callback_comes_after_the_commit_and_only_then(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    seen: list[str | None] = []

    def callback() -> None:
        seen.append(bcp.find_latest_ckpt_path(tmp_path))

    bcp.save(tmp_path, state, "ddp", global_steps=3, callback=callback)
    bcp.save(str(tmp_path), state, "ddp", True, 4, callback).result()
    wait_until(lambda: len(seen) == 2, 60)
    assert seen == [str(tmp_path / "global_step_3"), str(tmp_path / "global_step_4")]
    state["model"] = lambda: 0  # type: ignore[assignment]
    with pytest.raises(UsageError):
        bcp.save(tmp_path, state, "ddp", global_steps=5, callback=callback)
    assert len(seen) == 2


def test_a_step_is_recorded_also_without_a_folder_of_its_own(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    bcp.FSDP2Checkpointer.save(
        tmp_path / "a", state, global_steps=7, role="actor", ignore_append_global_steps_to_folder=True
    )
    with reknit.open(tmp_path / "a") as checkpoint:
        assert (checkpoint.step, dict(checkpoint.metadata)) == (7, {"framework": "fsdp2", "role": "actor"})
    assert bcp.find_latest_ckpt_path(None) is None
    assert bcp.find_latest_ckpt_path(tmp_path / "nothing") is None


def test_roles_keep_apart(tmp_path: Path) -> None:
    actor, critic = ({"model": torch.nn.Linear(2, 2)} for _ in range(2))
    bcp.save(tmp_path, actor, "fsdp", role="actor")
    with pytest.raises(UsageError, match="role 'actor', which 'critic' would replace"):
        bcp.save(tmp_path, critic, "fsdp", role="critic")
    with pytest.raises(UsageError, match="role 'actor', which 'critic' would load"):
        bcp.load(tmp_path, critic, "fsdp", role="critic")
    bcp.load(tmp_path, critic, "fsdp", role="actor")
    assert torch.equal(actor["model"].weight, critic["model"].weight)


@pytest.mark.parametrize(
    ("state", "framework", "role", "why"),
    [
        ({"model": 1}, "deepspeed", None, "one of ddp, fsdp, fsdp2, megatron, vescale"),
        ({"optimizer": 1}, "ddp", None, "a dict with a model"),
        ({"model": 1, "scheduler": 2}, "ddp", None, "put all else into extra_state"),
        ({"model": 1}, "ddp", "", "role is a text such as 'actor'"),
    ],
)
def test_wrong_calls_are_refused(
    tmp_path: Path, state: dict[str, Any], framework: str, role: str | None, why: str
) -> None:
    for call in (bcp.save, bcp.load):
        with pytest.raises(UsageError, match=why):
            call(tmp_path, state, framework, role=role)


def test_parts_that_the_state_lacks_are_named_and_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer}, "ddp")
    optimizer.param_groups[0]["lr"] = 0.1
    with caplog.at_level(logging.WARNING, "reknit"):
        bcp.load(tmp_path, {"model": model, "optimizer": None}, "ddp")
    assert "optimizer, extra_state: not in the state" in caplog.text
    assert optimizer.param_groups[0]["lr"] == 0.1
    larger = {"model": torch.nn.Sequential(model, model)}
    with pytest.raises(MismatchError):
        bcp.load(tmp_path, larger, "ddp")
