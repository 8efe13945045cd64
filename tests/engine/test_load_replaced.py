"""A checkpoint that is replaced while it is read: a load returns all of the old one, or all of the new one.

A load of a checkpoint that is deleted meanwhile returns all of it, or raises that it is gone.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from reknit.engine.stored.delete import delete
from reknit.engine.stored.places import changed
from reknit.errors import CheckpointNotFoundError, CorruptError, ReknitError
from reknit.format.manifest_file import decode_manifest
from reknit.format.paths import MANIFEST_PATH
from reknit.testing.faulty_storage import FaultyStorage
from reknit.testing.world import run_ranks
from tests.engine.runs import loaded, pausing, save_as
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from reknit.comm.group import Group
    from reknit.storage.base import Storage

RANKS = 3


def test_one_process_loads_the_old_or_the_new_whatever_it_was_doing() -> None:
    seen, replaced = list[int](), [True]
    while replaced:
        replaced = []
        place = emptied("replaced")
        assert save_as(place, 1, 1) is None

        def replace(place: Storage = place, replaced: list[bool] = replaced) -> None:
            replaced.append(save_as(place, 2, 1) is None)

        seen.append(loaded(pausing(place, [len(seen) + 1], replace)))
        assert replaced in ([], [True])
    assert seen[-1] == 1  # the load was over before the operation at which it would be replaced
    assert set(seen[:-1]) <= {1, 2}
    assert len(seen) > 4


def test_all_ranks_load_the_new_one_where_one_of_them_finds_the_old_gone() -> None:
    outcomes = set()
    for at in range(1, 12):
        for victim in range(RANKS):
            place = emptied("replaced-ranks")
            assert save_as(place, 1, 1) is None
            turn = threading.Lock()

            def replace(place: Storage = place, turn: threading.Lock = turn) -> None:
                with turn:
                    assert save_as(place, 2, 1) is None

            def run(group: Group, place: Storage = place, victim: int = victim, at: int = at) -> int:
                mine = pausing(place, [at], replace) if group.rank == victim else FaultyStorage(place)
                return loaded(mine, group)

            values = set(run_ranks(RANKS, run))
            assert len(values) == 1, (at, victim, values)
            outcomes |= values
    assert outcomes == {1, 2}


def test_a_checkpoint_that_is_replaced_again_and_again_ends_in_an_error() -> None:
    place, step = emptied("replaced-always"), [1]
    assert save_as(place, 1, 1) is None

    def replace() -> None:
        step[0] += 1
        assert save_as(place, step[0], 1) is None

    class Restless(FaultyStorage):
        def size(self, path: str) -> int:
            replace()
            return super().size(path)

    with pytest.raises(CorruptError, match="missing"):
        loaded(Restless(place))
    assert 3 < step[0] < 40


def test_a_file_that_is_really_missing_is_told_at_once() -> None:
    place = emptied("missing")
    assert save_as(place, 1, 1) is None
    (path,) = [file.path for file in place.list() if file.path.endswith(".safetensors")]
    place.delete(path)
    watched = FaultyStorage(place)
    with pytest.raises(ReknitError, match="missing"):
        loaded(watched)
    assert sum(operation.path.endswith(MANIFEST_PATH) for operation in watched.operations) == 2


def test_one_process_is_told_of_a_checkpoint_that_was_deleted_whatever_it_was_doing() -> None:
    outcomes, deleted = [""], [0]
    while deleted:
        deleted = []
        place = emptied("deleted")
        assert save_as(place, 1, 1) is None

        def remove(place: Storage = place, deleted: list[int] = deleted) -> None:
            deleted.append(delete(place))

        try:
            loaded(pausing(place, [len(outcomes)], remove))
            outcomes.append("whole")
        except CheckpointNotFoundError as error:
            outcomes.append(error.message)
    assert any("was deleted while it was read" in outcome for outcome in outcomes)
    # No byte of the small target had arrived, and the error says so.
    assert any("changed no tensor of the target" in outcome for outcome in outcomes)
    assert not any("partly written" in outcome for outcome in outcomes)
    assert outcomes[-1] == "whole"  # the load was over before the operation at which it would be deleted
    assert len(outcomes) > 5


def test_all_ranks_are_told_where_one_of_them_finds_the_checkpoint_deleted() -> None:
    place = emptied("deleted-ranks")
    assert save_as(place, 1, 1) is None
    turn = threading.Lock()

    def remove() -> None:
        with turn:
            if place.list():
                delete(place)

    def run(group: Group) -> str:
        with pytest.raises(CheckpointNotFoundError, match="was deleted while it was read") as caught:
            loaded(pausing(place, [1], remove) if group.rank == RANKS - 1 else FaultyStorage(place), group)
        return caught.value.message

    assert len(set(run_ranks(RANKS, run))) == 1


def test_a_copy_that_is_still_there_is_no_deleted_checkpoint() -> None:
    place, replica = emptied("deleted-here"), emptied("kept-there")
    for each in (place, replica):
        assert save_as(each, 1, 1) is None
    manifest = decode_manifest(replica.get(MANIFEST_PATH, limit=1 << 20))
    delete(place)
    error = CorruptError("a block is damaged")
    assert changed(place, manifest, error, [replica]) is None
    delete(replica)
    with pytest.raises(CheckpointNotFoundError, match="a block is damaged"):
        changed(place, manifest, error, [replica])


def emptied(name: str) -> ProcessMemory:
    ProcessMemory.clear(name)
    return ProcessMemory(name)
