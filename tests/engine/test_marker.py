"""What stands in a folder while a save is under way: whom it keeps out, and what becomes of it."""

from __future__ import annotations

import pytest

from reknit.engine.commit import is_committed
from reknit.engine.marker import Marker, put_up
from reknit.errors import CheckpointExistsError, CommitError, FencedError, StorageError, from_wire
from reknit.format.paths import MANIFEST_PATH
from reknit.testing.faulty_storage import Fault, FaultyStorage
from tests.engine.runs import Annals, save_as, strays, value_in

WRITE_ID = "0123456789abcdef0123456789abcdef"


def test_a_dead_runs_marker_keeps_older_runs_out_until_it_is_deleted_and_no_newer_one() -> None:
    place = Annals("dead")
    dead = Marker(5, WRITE_ID)
    put_up(place, dead)
    error = save_as(place, 1, 4)
    assert isinstance(error, FencedError)
    assert (error.rank, error.phase) == (0, "assign")
    assert error.path == f"{place.url}/{dead.path}"
    assert f"delete {place.url}/{dead.path}" in str(error.remedy)
    assert "generation 5" in str(error)
    assert "generation 4" in str(error)
    assert strays(place) == {dead.path}
    place.delete(dead.path)
    assert save_as(place, 1, 4) is None
    put_up(place, dead)
    assert save_as(place, 2, 6) is None
    assert (value_in(place), strays(place)) == (2, set())


def test_what_a_newer_run_has_committed_keeps_an_older_one_out() -> None:
    place = Annals("committed")
    assert save_as(place, 1, 5) is None
    error = save_as(place, 2, 4)
    assert isinstance(error, FencedError)
    assert error.path == f"{place.url}/manifest.json"
    assert value_in(place) == 1
    assert isinstance(save_as(place, 2, 4, overwrite=False), CheckpointExistsError)
    assert save_as(place, 3, 5) is None
    assert (value_in(place), strays(place)) == (3, set())


@pytest.mark.parametrize("damage", [b"", b"not JSON", b'{"format":"else","digest":"0000000000000000"}'])
def test_a_manifest_that_is_damaged_keeps_nobody_from_replacing_it(damage: bytes) -> None:
    place = Annals("damaged")
    assert save_as(place, 1, 5) is None
    place.put(MANIFEST_PATH, damage, if_absent=False)
    assert save_as(place, 2, 1) is None
    assert value_in(place) == 2


def test_a_save_that_may_not_overwrite_touches_nothing_where_a_checkpoint_is() -> None:
    place = Annals("exists")
    assert save_as(place, 1, 1) is None
    store = FaultyStorage(place)
    assert isinstance(save_as(store, 2, 2, overwrite=False), CheckpointExistsError)
    assert {operation.name for operation in store.operations} == {"size"}


def test_a_marker_that_cannot_be_put_or_looked_past_fails_the_save_and_is_taken_away() -> None:
    for fault in (*(Fault("error", 1, name) for name in ("put", "list", "get")), Fault("lost", 1, "put")):
        place = Annals("begin")
        error = save_as(FaultyStorage(place, plan=[fault]), 1, 1)
        assert isinstance(error, StorageError), fault
        assert list(place.list()) == []


def test_a_save_that_fails_at_any_operation_leaves_no_marker() -> None:
    k, fired = 0, [Fault("error", 1)]
    while fired:
        k += 1
        place = Annals("fails")
        store = FaultyStorage(place, plan=[Fault("error", k)])
        error, fired = save_as(store, 1, 1), store.fired
        assert strays(place) == set()
        assert (value_in(place) == 1) == (error is None)


def test_the_error_of_a_fenced_run_travels_as_what_it_is() -> None:
    error = from_wire(FencedError("a newer run", rank=0, phase="commit", remedy="end").to_wire())
    assert type(error) is FencedError
    assert isinstance(error, CommitError)
    assert (error.rank, error.phase, error.remedy) == (0, "commit", "end")


def test_a_marker_is_no_checkpoint_and_no_part_of_one() -> None:
    place = Annals("reader")
    assert save_as(place, 1, 1) is None
    put_up(place, Marker(2, WRITE_ID))
    assert value_in(place) == 1
    assert is_committed(place, WRITE_ID) is False
