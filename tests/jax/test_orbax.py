"""The calls of Orbax, beside the real Orbax in one process, and in jobs that are killed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.jax.job import Job, checks
from tests.optional import needs
from tests.running.examples import at_night

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("orbax", "Orbax")

STEPS = 9
MODULES = ("orbax_folders", "orbax_manager", "orbax_remedies", "orbax_trees")


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module in MODULES for name in checks(module)]
)
def test_orbax_of_one_process(alone: Job, tmp_path: Path, module: str, name: str) -> None:
    alone.call(f"{module}.check_{name}", tmp_path / "run")


def test_positions_of_iterators_are_restored_on_as_many_processes_as_saved_them(
    alone: Job, pair: Job, tmp_path: Path
) -> None:
    pair.call("orbax_remedies.save_positions", tmp_path)
    pair.call("orbax_remedies.restore_positions", tmp_path, True)
    alone.call("orbax_remedies.restore_positions", tmp_path, False)


@at_night("runs of transformers and ByteCheckpoint die by day")
def test_a_killed_loop_goes_on_from_the_newest_committed_step(alone: Job, pair: Job, tmp_path: Path) -> None:
    whole, killed, other = tmp_path / "whole", tmp_path / "killed", tmp_path / "other"
    victims = Job(2, 3)
    assert pair.call("orbax_runs.train", whole, STEPS) == [0, 0]
    with pytest.raises(AssertionError, match="said nothing"):
        victims.call("orbax_runs.train", killed, STEPS, 5)
    victims.end()
    steps = alone.call("orbax_runs.settled", killed)[0]
    unfinished = killed / "step_00000090"  # all but its commit
    shutil.copytree(killed / f"step_{steps[-1]:08d}", unfinished)
    (unfinished / "manifest.json").unlink()
    shutil.copytree(killed, other)

    first = steps[-1] + 1
    assert 1 <= first < STEPS
    assert pair.call("orbax_runs.train", killed, STEPS) == [first, first]
    last = f"step_{STEPS - 1:08d}"
    assert alone.call("orbax_runs.differing", whole / last, killed / last) == [[]]
    assert alone.call("orbax_runs.train", other, STEPS) == [first]
    assert (other / last / "manifest.json").exists()
