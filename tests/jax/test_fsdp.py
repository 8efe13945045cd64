"""A checkpoint of FSDP loads into arrays of JAX with the same names, and theirs loads into FSDP again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tests.jax import fsdp_ranks
from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.jax.job import Job

JOBS = {"alone": (1, 4, (1, 4)), "pair": (2, 3, (2, 2))}
"""The processes of each job, the devices of each process, and the mesh that is used."""


@pytest.fixture(scope="module")
def root(jobs: Callable[[int, int], Job], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the checkpoints of all layouts by two ranks of torch, and their whole states."""
    for processes, devices, _ in JOBS.values():
        jobs(processes, devices)  # they start in the meantime
    folder = tmp_path_factory.mktemp("fsdp")
    run(2, fsdp_ranks.save_all, str(folder))
    return folder


@pytest.fixture(scope="module")
def returned(jobs: Callable[[int, int], Job], root: Path) -> dict[str, str]:
    """Load every layout's checkpoint into every job, save it again, and return the layouts by path."""
    folders = {}
    for layout in fsdp_ranks.LAYOUTS:
        for name, (processes, devices, mesh) in JOBS.items():
            into, truth = root / f"{layout}-{name}", root / f"{layout}.now.npz"
            job = jobs(processes, devices)
            answers = job.call("from_fsdp.load_and_save", root / layout, truth, *mesh, into)
            for reported in answers:
                assert reported["wrong"] == reported["lost"] == []
                # Torch has some of 9 and of 13 rows on each rank; JAX cuts the 8 columns.
                assert {"model/layers.0.up.weight", "optimizer/state/emb.weight/exp_avg"} <= {
                    *reported["sharded"]
                }
                assert "optimizer/param_groups/scale" in reported["noted"]
            folders[str(into)] = layout
    return folders


def test_what_fsdp_saved_loads_into_arrays_bit_for_bit_and_back_into_fsdp(
    root: Path, returned: dict[str, str]
) -> None:
    for differing in run(2, fsdp_ranks.load_all, str(root), returned):
        assert len(differing) == len(returned) * len(fsdp_ranks.LAYOUTS)
        assert differing == {what: [] for what in differing}
