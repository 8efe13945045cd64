from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.engine.stored.verify import check_header, verify
from reknit.errors import FormatError
from reknit.format.data_file import HeaderEntry, encode_header
from reknit.options import LoadOptions, SaveOptions
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.manifest import FileEntry
from reknit.types.shard import Holdings, Shard, TensorSpec
from tests.engine.held import save_held, task_at
from tests.engine.runs import pausing, save_as
from tests.format.samples import index_of
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from reknit.comm.group import Group
    from reknit.storage.base import Storage

SPEC = TensorSpec((50,), "float32")


def test_a_box_that_two_ranks_wrote_by_mistake_is_kept_once_and_the_checkpoint_is_sound() -> None:
    ProcessMemory.clear("twice")
    storage = ProcessMemory("twice")
    data = np.arange(50, dtype=np.float32)

    def rank(group: Group) -> tuple[str, ...]:
        number = group.rank
        # Each rank claims to be the only holder of both tensors, which is true of one.
        names = ("w", f"own.{number}")
        shards = tuple(Shard("model", fqn, SPEC, Box.whole(SPEC.shape), (number,), data) for fqn in names)
        task = task_at(storage, group, SaveOptions(timeout_s=30))
        return save_held(lambda: Holdings(("model",), shards, ()), task).report().warnings

    for warnings in run_ranks(2, rank):
        assert "written by more than one rank, kept once: model/w" in warnings[0]
    report = verify(storage, "data", LoadOptions())
    assert report.ok, report.problems


def test_an_extent_that_the_header_of_its_file_does_not_have_is_found() -> None:
    ProcessMemory.clear("header")
    storage, path = ProcessMemory("header"), "m/00000.01234567.safetensors"
    head = encode_header([HeaderEntry("a", "uint8", (4,), 0, 4)], {})
    storage.put(path, head + b"abcd", if_absent=True)
    file = FileEntry(path, len(head) + 4, ())
    spec, box = TensorSpec((4,), "uint8"), Box((0,), (4,))
    check_header(storage, index_of([("m", "a", spec, box, path, len(head))]), 0, file)
    for start in (len(head) - 1, len(head) + 1):
        with pytest.raises(FormatError, match="disagree about 1 extents"):
            check_header(storage, index_of([("m", "a", spec, box, path, start)]), 0, file)


def test_what_is_replaced_while_it_is_checked_is_checked_anew() -> None:
    seen, replaced = list[int](), [True]
    while replaced:
        replaced = []
        ProcessMemory.clear("checked")
        place = ProcessMemory("checked")
        assert save_as(place, 1, 1) is None

        def replace(place: Storage = place, replaced: list[bool] = replaced) -> None:
            replaced.append(save_as(place, 2, 1) is None)

        report = verify(pausing(place, [len(seen) + 1], replace), "data", LoadOptions())
        assert report.ok, report.problems
        seen.append(len(replaced))
    assert len(seen) > 5
