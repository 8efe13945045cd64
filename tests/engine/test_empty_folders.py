"""A save that failed leaves no folder behind that was not there before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.errors import ReknitError
from reknit.storage.local.store import LocalStorage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from tests.engine.runs import save_as
from tests.storage.killpoint import faulty_url, register_faulty

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group


@pytest.mark.parametrize("there", [False, True])
def test_a_save_that_fails_at_any_operation_leaves_the_folders_as_they_were(
    tmp_path: Path, there: bool
) -> None:
    root = tmp_path / "above" / "step"
    if there:
        root.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    k, fired = 0, [Fault("full", 1)]
    while fired:
        k += 1
        store = FaultyStorage(LocalStorage(root, durability="process"), plan=[Fault("full", k)])
        error, fired = save_as(store, 1, 1, overwrite=False), store.fired
        if error is not None:
            assert sorted(tmp_path.rglob("*")) == before, k
        elif fired:
            root.rename(tmp_path.parent / f"{tmp_path.name}.{k}")  # committed though something failed after
            (tmp_path / "above").rmdir()
            if there:
                root.mkdir(parents=True)
    assert k > 10


@pytest.mark.parametrize(("failing", "operation"), [(0, "finish:2"), (1, "create:1"), (2, "finish:2")])
def test_whichever_rank_fails_and_is_the_last_to_leave_no_folder_stays(
    tmp_path: Path, failing: int, operation: str
) -> None:
    register_faulty()
    root = tmp_path / "above" / "step"
    name, number = operation.split(":")

    def save(group: Group) -> None:
        faults = [Fault("full", int(number), name)] if group.rank == failing else []
        state = {"m": reknit.PerRank(np.zeros(10)), "x": reknit.PerRank(group.rank)}
        with pytest.raises(ReknitError, match="no space left"):
            reknit.save(faulty_url(root, *faults), state, group=group)

    run_ranks(3, save)
    assert list(tmp_path.iterdir()) == []
