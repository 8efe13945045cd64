"""JAX jobs of several processes: layouts load checkpoints of others, and a process collects alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.jax.job import Job

    Jobs = Callable[[int, int], Job]

OTHERS = [(1, 4), (4, 1), (1, 1)] if is_night() else [(1, 4), (1, 1)]


def started(jobs: Jobs, layout: tuple[int, int]) -> Job:
    """Return the job of a layout; a job of two processes has one device more than the layout needs."""
    return jobs(1, 4) if layout == (1, 1) else jobs(2, 3) if layout == (2, 2) else jobs(*layout)


def loaded(jobs: Jobs, layout: tuple[int, int], folder: Path, truth: Path, into: Path | None) -> Any:
    answers = started(jobs, layout).call("layouts.load_and_save", folder, truth, *layout, into)
    assert [answer["wrong"] for answer in answers] == [[]] * len(answers)
    return answers[0]["losses"]


@pytest.fixture(scope="module")
def saved(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[float]]:
    """Return the checkpoint of two processes with two devices each, its state, and the losses after it."""
    for layout in OTHERS:
        started(jobs, layout)  # they start in the meantime
    folder = tmp_path_factory.mktemp("layouts") / "two by two"
    losses = started(jobs, (2, 2)).call("layouts.train_and_save", folder, 2, 2)[0]
    return folder, folder.with_name(f"{folder.name}.npz"), losses


@pytest.mark.parametrize("layout", [(2, 2), *OTHERS])
def test_what_two_by_two_saved_loads_bit_for_bit_and_back(
    jobs: Jobs, saved: tuple[Path, Path, list[float]], layout: tuple[int, int], tmp_path: Path
) -> None:
    folder, truth, losses = saved
    again = tmp_path / "again"
    resumed = loaded(jobs, layout, folder, truth, again)
    assert resumed == pytest.approx(losses, rel=1e-5)
    assert loaded(jobs, (2, 2), again, truth, None) == losses


def test_arrays_on_some_of_the_devices_or_in_another_order_come_back(pair: Job, tmp_path: Path) -> None:
    pair.call("layouts.save_odd_meshes", tmp_path / "a")


def test_a_process_that_collects_and_wants_needs_no_other(pair: Job) -> None:
    assert pair.call_one(0, "layouts.look_without_others", 2, 2) > 0


def test_arrays_of_a_mesh_of_all_processes_come_back_whether_that_mesh_is_set_or_not(
    pair: Job, tmp_path: Path
) -> None:
    assert pair.call("layouts.load_under_a_mesh", tmp_path / "a") == [[], []]


def test_processes_read_the_data_once_together_without_being_given_a_place(pair: Job) -> None:
    parts = pair.call("layouts.read_without_a_place")
    assert sorted(number for part in parts for number in part) == list(range(5))
    assert all(parts)


def test_what_one_process_cannot_save_is_told_to_all(pair: Job, tmp_path: Path) -> None:
    reported = pair.call("layouts.refuse_on_one", tmp_path / "a")
    assert all("donated" in text for text in reported)


def test_torch_and_jax_act_as_one_job_or_are_told_that_they_are_not(pair: Job, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for rank, reported in enumerate(pair.call("layouts.beside_torch", tmp_path / "a")):
        assert f"rank 0 of 1 for torch.distributed and process {rank} of 2 for jax" in reported[0]
        assert f"rank {1 - rank} of 2 for torch.distributed and process {rank} of 2 for jax" in reported[1]
