"""Accelerate with the real package: every prepared object is saved, and a resume is exact."""

from __future__ import annotations

import runpy
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import reknit
from reknit.frameworks.numbers import same_value
from tests import ranks
from tests.integrations import accelerate_job as jobs
from tests.optional import needs
from tests.running.examples import at_night, is_night

pytestmark = [needs("accelerate", "Accelerate"), needs("torchdata", "torchdata")]

run = partial(ranks.run, warm="accelerate", joined=False)

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"

KINDS = ("shuffled", "seedable", "stateful", "dispatched", "stream", "split", "drawing")


def resumed(folder: str, kinds: tuple[str, ...], stops: tuple[int, ...], **options: Any) -> list[str]:
    """Return the kinds of loaders with which a resume differs from a training without an end between."""
    from reknit.integrations import accelerate as checkpoints

    different = []
    for kind in kinds:
        whole = jobs.Job(kind, **options)
        checkpoints.state(whole.accelerator)
        saved: dict[int, str] = {}

        def save(step: int, job: jobs.Job = whole, kind: str = kind, saved: dict[int, str] = saved) -> None:
            if step + 1 in stops:
                saved[step + 1] = f"{folder}/{kind}-{step + 1}"
                checkpoints.save_state(job.accelerator, saved[step + 1], step=step)

        whole.train(0, 15, save)
        end = whole.end()
        for stop, path in saved.items():
            job = jobs.Job(kind, seed=9, **options)
            checkpoints.load_state(job.accelerator, path)
            job.train(stop, 15, lambda _: None)
            if not same_value(job.end(), {**end, "samples": end["samples"][stop:]}):
                different.append(f"{kind} after {stop}")
    return different


@pytest.mark.parametrize(
    ("world", "kinds", "stops"),
    [
        (1, ("drawing", "persistent"), (5, 13) if is_night() else (5,)),
        (2, KINDS, (4, 8) if is_night() else (8,)),
    ],
)
def test_a_resume_is_bitwise_equal_inside_of_an_epoch_and_between_two(
    world: int, kinds: tuple[str, ...], stops: tuple[int, ...], tmp_path: Path
) -> None:
    assert run(world, resumed, str(tmp_path), kinds, stops) == [[]] * world
    names = {path.name for path in tmp_path.rglob("*")}
    assert not names & {"optimizer.bin", "model.safetensors", "scheduler.bin", "random_states_0.pkl"}


def killed(root: str, seed: int) -> None:
    """Train until this rank, or another, is killed."""
    try:
        jobs.train(root, 17, dies=seed)
    except Exception:  # of gloo or of reknit, as the other rank is gone
        return


@at_night("runs of transformers and ByteCheckpoint die by day")
@pytest.mark.parametrize("seed", [3])
def test_a_run_that_is_killed_resumes_on_another_number_of_processes(seed: int, tmp_path: Path) -> None:
    whole = run(2, partial(jobs.train, steps=17), str(tmp_path / "whole"))[0]
    root = tmp_path / "killed"
    ends = run(2, killed, str(root), seed, some_die=True)
    assert ranks.Died(-signal.SIGKILL) in ends
    assert reknit.latest(root, pending="wait", timeout_s=60) is not None
    (root / "step_00000099").mkdir()  # as of a save that was not committed
    (root / "step_00000099" / "model.0.bin").write_bytes(b"x")
    committed = max(step.step or 0 for step in reknit.steps(root))
    (rest,) = run(1, partial(jobs.train, steps=17, batch=4, seed=9), str(root))
    assert committed < rest["first"] < 17
    assert rest["samples"] == whole["samples"][rest["first"] :]
    assert rest["seen"] == whole["seen"]
    assert reknit.steps(root)[-1].step == 16


def with_hooks(folder: str) -> list[Any]:
    """Save the first model by hooks, and the rest as usual; return the items and the missing names."""
    from reknit.integrations import accelerate as checkpoints

    def make(seed: int) -> jobs.Job:
        job = jobs.Job(seed=seed)
        job.accelerator.register_save_state_pre_hook(partial(write, job))
        job.accelerator.register_load_state_pre_hook(partial(read, job))
        return job

    def write(job: jobs.Job, models: list[Any], weights: list[Any], folder: str) -> None:
        state = weights.pop()
        if job.accelerator.is_main_process:
            Path(folder, "unet").mkdir()
            torch.save(state, Path(folder, "unet", "weights.bin"))

    def read(job: jobs.Job, models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder, "unet", "weights.bin")))

    job = make(0)
    checkpoints.state(job.accelerator)
    job.train(0, 2, lambda _: None)
    checkpoints.save_state(job.accelerator, folder, wait=False).result()
    other = make(1)
    report = checkpoints.load_state(other.accelerator, folder)
    assert same_value(job.end()["tensors"], other.end()["tensors"])
    with reknit.open(folder) as checkpoint:
        return [sorted(checkpoint.items), report.missing]


def test_hooks_take_models_over_and_their_files_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    items = ["custom", "hook_files", "loaders", "optimizer", "progress", "rng", "scaler", "scheduler"]
    assert run(2, with_hooks, str(tmp_path / "x")) == [[items, ()]] * 2


def refused(folder: str) -> list[str]:
    """Return the errors of calls that cannot be exact."""
    from reknit.integrations import accelerate as checkpoints

    found = []

    def attempt(call: Any) -> None:
        try:
            call()
        except reknit.ReknitError as error:
            found.append(f"{type(error).__name__}: {error.message}")

    job = jobs.Job()
    save = partial(checkpoints.save_state, job.accelerator, folder + "/no")
    job.train(0, 2, lambda step: attempt(save) if step == 0 else None)
    job = jobs.Job()
    save = partial(checkpoints.save_state, job.accelerator, folder + "/no")
    attempt(partial(save, items={"model": 1}))
    job.accelerator.gradient_state._set_sync_gradients(False)
    attempt(save)
    job.accelerator.gradient_state._set_sync_gradients(True)
    job = jobs.Job()
    checkpoints.state(job.accelerator)
    job.train(0, 3, lambda step: checkpoints.save_state(job.accelerator, f"{folder}/{step}") and None)
    other = jobs.Job(batch=5)
    before = other.end()["tensors"]
    attempt(partial(checkpoints.load_state, other.accelerator, f"{folder}/0"))
    assert same_value(before, other.end()["tensors"])
    return found


def test_a_call_that_cannot_be_exact_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    (found,) = run(1, refused, str(tmp_path))
    assert [text.split(":")[0] for text in found] == ["StateError", "UsageError", "StateError", "StateError"]
    assert "the prepared loader 0 is in an epoch whose batches were not counted" in found[0]
    assert "['model'] are the accelerator's own" in found[1]
    assert "between two steps of gradient accumulation" in found[2]
    assert "the position after 2 samples is inside of a batch" in found[3]


def example(folder: str, steps: int) -> float:
    loss: float = runpy.run_path(str(EXAMPLES / "accelerate_loop.py"))["train"](folder, steps)
    return loss


def test_the_example_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    run(2, example, str(tmp_path), 5)
    assert reknit.latest(tmp_path) == str(tmp_path / "step_00000004")
    (loss,) = run(1, example, str(tmp_path), 12)
    assert 0 < loss < 1
    assert reknit.latest(tmp_path) == str(tmp_path / "step_00000010")


def beside_its_folders(folder: str) -> tuple[str, int, int]:
    """Begin where Accelerate has saved: refused, anew, and after its last folder."""
    from reknit.integrations import accelerate as checkpoints

    first = jobs.Job()
    first.accelerator.save_state(f"{folder}/checkpoint_0")
    job = jobs.Job(seed=9)
    with reknit.Checkpointer(folder) as checkpointer:
        with pytest.raises(reknit.UsageError) as refused:
            checkpoints.resume(job.accelerator, checkpointer)
        anew = checkpoints.resume(job.accelerator, checkpointer, start=0)
        checkpoints.save(job.accelerator, checkpointer, 0)
    with reknit.Checkpointer(folder) as checkpointer:
        return str(refused.value), anew, checkpoints.resume(job.accelerator, checkpointer)


def test_a_run_does_not_begin_beside_folders_of_accelerate_unasked(tmp_path: Path) -> None:
    ((text, anew, again),) = run(1, beside_its_folders, str(tmp_path))
    assert f"accelerator.load_state('{tmp_path}/checkpoint_0')" in text
    assert (anew, again) == (0, 1)
