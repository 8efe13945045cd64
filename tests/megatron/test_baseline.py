"""Megatron-Core 0.15.3 beside 0.16: the same adapter, the same checkpoints, and resharding of its own.

Version 0.15 is the last one that can save its distributed optimizer in the space of the model, and load it in
any layout (`fully_sharded_model_space`).  So its loads give the expected results of reknit independently.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests import ranks
from tests.megatron import baseline_jobs
from tests.optional import needs
from tests.running.examples import at_night

run = partial(ranks.run, warm="megatron")

VERSION = "0.15.3"
FOLDER = Path(__file__).parents[2] / ".venv" / "baselines" / f"megatron-core-{VERSION}"

pytestmark = [
    needs("megatron", "Megatron-Core"),
    pytest.mark.skipif(
        not FOLDER.is_dir(), reason=f"Megatron-Core {VERSION} is not installed: scripts/setup does it"
    ),
    at_night("test_matrix.py has the layouts of the newer version by day"),
]

EXACT: dict[str, list[str]] = {
    f"{name} into {into}": [] for name, layouts in baseline_jobs.LOADED.items() for into in layouts
}


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder with checkpoints of 0.15.3, saved by reknit and by Megatron itself."""
    root = str(tmp_path_factory.mktemp("older"))
    assert run(3, baseline_jobs.save_all, root, True, path=FOLDER) == [VERSION] * 3
    return root


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder with checkpoints of the environment's Megatron, saved by reknit."""
    root = str(tmp_path_factory.mktemp("newer"))
    assert VERSION not in run(3, baseline_jobs.save_all, root, False)
    return root


def test_irregular_layouts_load_into_others_with_the_older_version(older: str) -> None:
    for differing in run(2, baseline_jobs.load_all, older, False, path=FOLDER):
        assert differing == EXACT


def test_what_megatron_itself_loads_from_its_model_space_is_what_reknit_loads(older: str) -> None:
    ours = {pair: found for pair, found in EXACT.items() if not pair.startswith("mixed")}
    for differing in run(2, baseline_jobs.load_all, older, True, path=FOLDER):
        assert differing == ours


def test_what_the_older_version_saved_in_its_model_space_loads_into_live_optimizers(older: str) -> None:
    ours = {pair: found for pair, found in EXACT.items() if not pair.startswith("mixed")}
    for differing in run(2, baseline_jobs.load_megatrons, older):
        assert differing == ours


def test_a_checkpoint_of_the_older_version_loads_in_the_newer_one(older: str) -> None:
    for differing in run(2, baseline_jobs.load_all, older, False):
        assert differing == EXACT


def test_a_checkpoint_of_the_newer_version_loads_in_the_older_one(newer: str) -> None:
    for differing in run(2, baseline_jobs.load_all, newer, False, path=FOLDER):
        assert differing == EXACT
