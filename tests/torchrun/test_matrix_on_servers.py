"""Checkpoints on real servers: other layouts load them, readers see the old or the new one, one saver wins.

`test_matrix` is the whole matrix of layouts, on a local disk.  Here a few of them save to each server that
`scripts/servers` has up, and load from there.
"""

from __future__ import annotations

import os
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.comm.group import SoloGroup
from reknit.errors import CheckpointExistsError, FencedError, ReknitError, StorageError
from tests.ranks import run
from tests.running.examples import at_night, is_night
from tests.servers import environment, new_url, server
from tests.torchrun import models
from tests.torchrun.test_matrix import forget, scheduler_state, unlike_saved

SAVED = ("fsdp2-2", "ddp-2")
LOADING = ("single", "fsdp2-3", "tp-2") if is_night() else ("fsdp2-3",)
LIMIT_S = 60.0
OPTIONS = reknit.SaveOptions(timeout_s=LIMIT_S)
VERSIONS = 2
NBYTES = 3_000_000


class Place(NamedTuple):
    """A folder on a server, the variables by which it is reached, and where the truth is kept."""

    url: str
    variables: dict[str, str]
    truths: str


@pytest.fixture(scope="module", params=["s3", "hdfs", *["azure", "gcs"] * is_night()])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return the place of checkpoints that have been saved once."""
    name: str = request.param
    if name == "hdfs":
        pytest.importorskip("hdfs_native", reason="HDFS needs hdfs-native")
        url, variables = f"{server(name)['endpoint']}/test-{uuid.uuid4().hex[:12]}", {}
    else:
        pytest.importorskip("obstore", reason="object stores need obstore")
        url, variables = new_url(name), environment(name)
    place = Place(url, variables, str(tmp_path_factory.mktemp(name)))
    for counted in run(2, save_all, place):
        assert counted == {layout: () for layout in SAVED}
    return place


def save_all(place: Place) -> dict[str, tuple[str, ...]]:
    """Save in each layout, that of replicas in the background; return the warnings of the reports."""
    os.environ.update(place.variables)
    warnings = {}
    for layout in SAVED:
        trained, wait = models.build(layout), layout != "ddp-2"
        truth = models.truth(trained)
        if dist.get_rank() == 0:
            torch.save((truth, scheduler_state(trained), trained.progress), f"{place.truths}/{layout}.truth")
        state = models.state(trained)
        pending = reknit.save(f"{place.url}/{layout}", state, step=2, wait=wait, options=OPTIONS)
        if not wait:  # this change of the state comes too late to be saved
            models.train_step(trained, 3)
        warnings[layout] = pending.result(LIMIT_S).warnings
    assert reknit.close(LIMIT_S)
    return warnings


def load_all(layout: str, place: Place) -> dict[str, list[str]]:
    """Load each checkpoint into a target like a new one; return the names that differ."""
    os.environ.update(place.variables)
    differing = {}
    trained = models.build(layout, steps=0, seed=1)
    for source in SAVED:
        forget(trained)
        state = models.state(trained)
        options = reknit.LoadOptions(timeout_s=LIMIT_S)
        report = reknit.load(f"{place.url}/{source}", state, options=options)
        assert (report.step, report.missing, report.unexpected) == (2, (), ())
        differing[source] = unlike_saved(trained, state, f"{place.truths}/{source}.truth")
    return differing


@pytest.mark.parametrize("layout", LOADING)
def test_checkpoints_on_a_server_load_into(layout: str, place: Place) -> None:
    for differing in run(models.LAYOUTS[layout], load_all, layout, place):
        assert differing == {source: [] for source in SAVED}


def version_of(value: int) -> dict[str, Any]:
    """Return a state in which every value is the version."""
    return {"model": {"a": np.full(NBYTES, value, np.uint8), "b": np.full(77, value)}, "extra": [value] * 9}


def read_while_overwritten(place: Place) -> list[int]:
    """Overwrite on one rank, and load on the other up to the last version; return the loaded versions."""
    os.environ.update(place.variables)
    rank, url = dist.get_rank(), f"{place.url}/overwritten"
    if rank == 0:
        reknit.save(url, version_of(0), step=0, group=SoloGroup(), options=OPTIONS)
    dist.barrier()
    seen = [version_loaded(url)] if rank == 1 else []
    dist.barrier()
    if rank == 0:
        for version in range(1, VERSIONS + 1):
            reknit.save(
                url, version_of(version), step=version, overwrite=True, group=SoloGroup(), options=OPTIONS
            )
        return []
    while seen[-1:] != [VERSIONS]:
        seen.append(version_loaded(url))
        assert len(seen) < 2000
    return seen


def version_loaded(url: str) -> int:
    """Load, check that all values are of one version, and return that."""
    target = version_of(99)
    report = reknit.load(url, target, group=SoloGroup(), options=reknit.LoadOptions(timeout_s=LIMIT_S))
    version = report.step
    assert version is not None
    expected = version_of(version)
    assert np.array_equal(target["model"]["a"], expected["model"]["a"])
    assert np.array_equal(target["model"]["b"], expected["model"]["b"])
    assert target["extra"] == expected["extra"]
    return version


@at_night("tests of the contract of each store, and storage/test_object_faults.py, have such readers")
def test_a_reader_of_a_checkpoint_that_is_overwritten_sees_old_or_new(place: Place) -> None:
    _, seen = run(2, read_while_overwritten, place)
    assert (seen[0], seen[-1]) == (0, VERSIONS)
    assert seen == sorted(seen)


def save_at_once(place: Place) -> str:
    """Save to one path from both ranks, as jobs of their own; return the outcome on this rank."""
    os.environ.update(place.variables)
    rank, outcome = dist.get_rank(), "saved"
    dist.barrier()
    try:
        reknit.save(
            f"{place.url}/contended", version_of(rank), step=5, group=SoloGroup(rank), options=OPTIONS
        )
    except ReknitError as error:
        outcome = type(error).__name__
    dist.barrier()
    assert reknit.verify(f"{place.url}/contended", "data").ok
    target = version_of(99)
    reknit.load(f"{place.url}/contended", target, group=SoloGroup())
    assert (int(target["extra"][0]) == rank) == (outcome == "saved")
    return outcome


def test_of_two_that_save_one_step_one_wins_and_the_other_is_told(place: Place) -> None:
    outcomes = run(2, save_at_once, place)
    assert outcomes.count("saved") == 1, outcomes
    (other,) = [outcome for outcome in outcomes if outcome != "saved"]
    assert other in (CheckpointExistsError.__name__, FencedError.__name__, StorageError.__name__)
