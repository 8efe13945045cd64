from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reknit.engine.commit import Destination
from reknit.engine.save import SaveJob, save
from reknit.engine.verify import verify
from reknit.monitor.phase import Recorder
from reknit.options import LoadOptions, SaveOptions
from reknit.testing.process_memory import ProcessMemory
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.shard import Holdings, Shard, TensorSpec

if TYPE_CHECKING:
    from reknit.comm.base import Group

SPEC = TensorSpec((50,), "float32")


def test_a_box_that_two_ranks_wrote_by_mistake_is_kept_once_and_the_checkpoint_is_sound() -> None:
    ProcessMemory.clear("twice")
    storage = ProcessMemory("twice")
    data = np.arange(50, dtype=np.float32)

    def rank(group: Group) -> tuple[str, ...]:
        number = group.rank
        # Each says of both that nobody else holds it, which is true of one.
        names = ("w", f"own.{number}")
        shards = tuple(Shard("model", fqn, SPEC, Box.whole(SPEC.shape), (number,), data) for fqn in names)
        to = Destination(storage, None, False, False, {}, {})
        job = SaveJob(
            lambda: Holdings(("model",), shards, ()),
            group,
            to,
            SaveOptions(timeout_s=30),
            Recorder("save", number),
        )
        return save(job).warnings

    for warnings in run_ranks(2, rank):
        assert "written by more than one rank, kept once: model/w" in warnings[0]
    report = verify(storage, "data", LoadOptions())
    assert report.ok, report.problems
