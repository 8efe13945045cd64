"""Storage that hangs when a load first uses it: all ranks get an error in time, nothing changes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.engine.sharing import shared_read
from reknit.errors import CommError, DeadlineError
from reknit.options import LoadOptions
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import load_rank
from tests.world.layouts import Model, wants
from tests.world.test_resharding import save_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.comm.group import Group

TIMEOUT_S = 1.0
SIZE = 2


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()  # threads that were left behind end


@pytest.mark.parametrize(
    ("operation", "rank", "verify"),
    [
        ("get", 0, "touched"),  # the manifest
        ("read_into", 0, "touched"),  # the index
        ("size", 1, "touched"),  # the files that are to be read
        ("read_into", 1, "touched"),  # the block by which the speed is measured
        ("read_into", 1, "full"),  # all blocks
    ],
)
def test_storage_that_hangs_before_anything_has_changed_is_the_same_error_on_all_ranks(
    operation: str, rank: int, verify: str, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_read, "WORTH_NBYTES", 1)
    ProcessMemory.clear("stalled")
    model = Model(5, 3)
    layout = model.spread(7, SIZE)
    save_on(model, layout, SIZE, ProcessMemory("stalled"))

    def attempt(group: Group) -> tuple[Exception | None, bool]:
        plan = [Fault("stall", 1, operation)] if group.rank == rank else []
        storage = FaultyStorage(ProcessMemory("stalled"), plan=plan, stall=released.wait)
        shards = model.shards(layout, group.rank, filled=False, seed=3)
        before = [np.array(shard.data) for shard in shards]
        options = LoadOptions(timeout_s=TIMEOUT_S, verify=verify)  # type: ignore[arg-type]
        try:
            load_rank(group, storage, lambda _: wants(shards), options)
        except CommError as error:
            caught: Exception | None = error
        else:
            caught = None
        same = all(
            np.array_equal(a.view(np.uint8), np.asarray(s.data).view(np.uint8))
            for a, s in zip(before, shards, strict=True)
            if a.ndim
        )
        return caught, same

    outcomes = run_ranks(SIZE, attempt, timeout_s=30)
    assert all(isinstance(error, DeadlineError) for error, _ in outcomes), outcomes
    assert outcomes[rank][0] is not None
    assert "process://stalled" in str(outcomes[rank][0])
    assert "within 1 s" in str(outcomes[rank][0])
    assert all(same for _, same in outcomes)
    ProcessMemory.clear("stalled")
