"""The marker in a folder while a save is under way: it excludes other saves, and is removed at the end."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs

import reknit
from reknit.comm import group as comm
from reknit.engine.stored import leftovers, marker
from reknit.engine.stored.commit import put_manifest
from reknit.engine.stored.leftovers import fence_off
from reknit.engine.stored.marker import Marker, begun_in, fenced_off, is_last, put_marker, take_marker
from reknit.errors import CheckpointExistsError, CommitError, FencedError, StorageError
from reknit.format.manifest_file import decode_manifest
from reknit.format.paths import MANIFEST_PATH
from reknit.storage.registry import open_storage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from tests.engine.runs import Annals, pausing, save_as, strays, value_in
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from pathlib import Path

WRITE_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let saves without a marker look for others only briefly."""
    monkeypatch.setattr(marker, "_ALONE_S", 0.01)


def test_a_dead_runs_marker_keeps_older_runs_out_until_it_is_deleted_and_no_newer_one() -> None:
    place = Annals("dead")
    dead = Marker(5, WRITE_ID)
    put_marker(place, dead)
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
    put_marker(place, dead)
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


def test_a_manifest_that_is_damaged_keeps_nobody_from_replacing_it() -> None:
    cases: list[bytes] = [b"", b"not JSON", b"{}", b'{"format":"reknit","digest":"0000000000000000"}']
    for damage in one_by_one(cases):
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
    assert {operation.name for operation in store.operations} == {"size", "get"}


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


def test_a_save_whose_marker_another_has_removed_that_lost_its_own_puts_it_again() -> None:
    place, mine = Annals("again"), Marker(2, WRITE_ID)
    place.put(Marker(2, "1" * 32).path, b"", if_absent=True)
    removed: list[str] = []

    def remove() -> None:
        removed.append(mine.path)
        place.delete(mine.path)

    looks = [Fault("stall", 1, "size"), Fault("stall", 2, "size")]
    found = put_marker(FaultyStorage(place, plan=looks, stall=remove), mine)
    assert removed == [mine.path], "no other marker was there the second time, and it did not look again"
    assert found == structs.replace(mine, met=("1" * 8,))
    assert strays(place) == {mine.path}


def test_a_marker_that_a_beginning_save_puts_again_is_fenced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root, later = open_storage("mem://fenced_again"), [Marker(3, WRITE_ID), Marker(4, "1" * 32)]
    folder = root.sub("step_00000001")
    folder.put(Marker(2, WRITE_ID).path, b"", if_absent=True)

    def put_again(_: float) -> None:
        for each in later:
            folder.put(each.path, b"", if_absent=True)
        later.clear()

    monkeypatch.setattr(leftovers, "time", SimpleNamespace(sleep=put_again))
    fence_off(root)
    assert [each.path for each in begun_in(folder)] == [Marker(4, "1" * 32).path], "it has begun since"


def save_whose_marker_is_gone_at_its_beginning(rival: str) -> None:
    place, mine, other = Annals("rival"), Marker(2, WRITE_ID), Marker(2, "1" * 32)
    assert save_as(place, 1, 2) is None
    place.put(other.path, b"", if_absent=True)

    def remove() -> None:
        place.delete(mine.path)
        if rival == "goes on":
            place.put(other.path, b"", if_absent=True)
        else:
            assert save_as(place, 2, 2) is None

    store = FaultyStorage(place, plan=[Fault("stall", 1, "size")], stall=remove)
    with pytest.raises(FencedError, match="another save to this path began"):
        put_marker(store, mine)
    assert strays(place) == ({other.path} if rival == "goes on" else set())


def test_a_save_whose_marker_is_gone_when_it_begins_leaves_the_path_to_the_other() -> None:
    for rival in one_by_one(["goes on", "has committed"]):
        save_whose_marker_is_gone_at_its_beginning(rival)


def save_whose_marker_is_removed(by: str, operation: str, overwrite: bool) -> None:
    place = Annals("removed")
    if overwrite:
        assert save_as(place, 1, 1) is None

    def remove() -> None:
        for listed in list(place.list()):
            if overwrite is False or by == "manifest" or listed.path != MANIFEST_PATH:
                place.delete(listed.path)
        if by == "marker":
            put_marker(place, Marker(3, WRITE_ID))
        elif by == "manifest":
            assert save_as(place, 3, 2) is None

    # The index is created after one data file and one file of values.
    at = Fault("stall", 3 if operation == "create" else 1, operation)
    error = save_as(FaultyStorage(place, plan=[at], stall=remove), 2, 2, overwrite=overwrite)
    assert type(error) is (CommitError if by == "nobody" else FencedError)
    assert ("no other save is here now" in str(error)) == (by == "nobody")
    assert [commit.value for commit in place.commits[overwrite:]] == ([3] if by == "manifest" else [])


def test_whose_marker_is_gone_is_told_of_another_save_only_where_there_is_one() -> None:
    for by, operation, overwrite in one_by_one(
        product(["nobody", "marker", "manifest"], ["create", "commit"], [False, True])
    ):
        save_whose_marker_is_removed(by, operation, overwrite)


def test_a_save_is_the_last_while_no_other_has_begun_that_may_commit_and_its_manifest_stays() -> None:
    place = Annals("last")
    assert save_as(place, 1, 5) is None
    manifest = place.get(MANIFEST_PATH, limit=1 << 20)
    mine = Marker(5, decode_manifest(manifest).write_id)
    assert is_last(place, mine, manifest)
    assert not is_last(place, mine, manifest + b" ")
    for generation in (4, 5, 6):
        other = Marker(generation, WRITE_ID)
        place.put(other.path, b"", if_absent=True)
        assert is_last(place, mine, manifest) == (generation < 5)
        place.delete(other.path)


def test_a_manifest_that_another_save_has_put_meanwhile_stays() -> None:
    place = Annals("meanwhile")
    assert save_as(place, 1, 1) is None
    mine = Marker(1, WRITE_ID)
    place.put(mine.path, b"", if_absent=True)
    with pytest.raises(CheckpointExistsError, match="meanwhile"):
        put_manifest(place, mine, b"another", overwrite=False)
    assert value_in(place) == 1


def test_a_checkpoint_that_is_committed_while_the_marker_is_put_up_is_seen() -> None:
    place = Annals("late")
    store = pausing(place, [2], lambda: save_as(place, 1, 1))
    with pytest.raises(CheckpointExistsError):
        take_marker(store, Marker(1, WRITE_ID), overwrite=False)
    assert (value_in(place), strays(place)) == (1, set())


def test_whose_marker_is_put_up_takes_away_those_of_others_that_began_before() -> None:
    place = Annals("others")
    for generation in (1, 2):
        put_marker(place, Marker(generation, f"{generation}" * 32))
    put_marker(place, Marker(2, WRITE_ID))
    assert strays(place) == {Marker(2, WRITE_ID).path}


def set_clock(monkeypatch: pytest.MonkeyPatch, moment: float) -> None:
    """Set the clock by which a process that is alone counts its saves."""
    monkeypatch.setattr(comm, "now", lambda: moment)


def saved_alone(path: Path, value: int, **comm_options: Any) -> None:
    options = reknit.SaveOptions(durability="process", threads=1, comm=reknit.CommOptions(**comm_options))
    reknit.save(path, {"x": np.full(9, value)}, step=value, overwrite=True, options=options)


def generation_at(path: Path) -> int | None:
    return decode_manifest((path / MANIFEST_PATH).read_bytes()).generation


def test_a_process_that_is_alone_replaces_its_own_checkpoint_though_its_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, 1_000.0)
    saved_alone(tmp_path, 1)
    set_clock(monkeypatch, 998.0)
    saved_alone(tmp_path, 2)
    with reknit.open(tmp_path) as checkpoint:
        assert checkpoint.step == 2
        assert checkpoint.read("x", "").tolist() == [2] * 9
    assert generation_at(tmp_path) == 1_000_000, "it never falls"
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 3
    set_clock(monkeypatch, 1_001.0)
    saved_alone(tmp_path, 3)
    assert generation_at(tmp_path) == 1_001_000


def test_a_process_that_is_alone_takes_the_place_of_a_save_that_its_clock_knows_nothing_of_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock(monkeypatch, 1.0)
    late = Marker(5_000, WRITE_ID)
    (tmp_path / late.path).touch()
    saved_alone(tmp_path, 1)
    assert generation_at(tmp_path) == 5_000
    assert not (tmp_path / late.path).exists()


def test_an_agent_counts_the_saves_of_a_process_that_is_alone_as_the_folder_does(tmp_path: Path) -> None:
    saved_alone(tmp_path, 1)
    ahead = 1 << 60  # a clock that is far ahead, since set back
    saved_alone(tmp_path, 2, generation=ahead)
    options = reknit.SaveOptions(durability="process", threads=1)
    state = {"x": np.full(9, 3)}
    reknit.save(tmp_path, state, step=3, overwrite=True, options=options, wait=False).result(60)
    assert generation_at(tmp_path) == ahead
    assert reknit.verify(tmp_path, "data").ok
    assert reknit.close()


def test_a_process_that_is_alone_has_the_generation_that_it_is_given(tmp_path: Path) -> None:
    saved_alone(tmp_path, 1, generation=5)
    assert generation_at(tmp_path) == 5
    with pytest.raises(FencedError, match="generation 5"):
        saved_alone(tmp_path, 2, generation=4)
    saved_alone(tmp_path, 3, generation=5)
    assert generation_at(tmp_path) == 5


def test_nobody_is_told_to_delete_a_manifest() -> None:
    place = Annals("advice")
    assert save_as(place, 1, 5) is None
    error = save_as(place, 2, 4)
    assert isinstance(error, FencedError)
    assert error.path == f"{place.url}/manifest.json"
    assert "delete" not in str(error)
    assert "CommOptions(generation=6)" in str(error.remedy)
    assert save_as(place, 2, 6) is None


def test_both_of_two_saves_that_take_each_others_marker_away_are_fenced() -> None:
    place, other = Annals("both"), Marker(2, "1" * 32)
    place.put(other.path, b"", if_absent=True)  # the other save lists the markers only after the next line
    mine = put_marker(place, Marker(2, WRITE_ID))
    assert strays(place) == {mine.path}
    place.delete(mine.path)
    assert type(fenced_off(place, mine)) is FencedError
