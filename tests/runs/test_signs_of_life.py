"""The signs of life of a run are files beside its record, so that nothing is lost with a torn one."""

from __future__ import annotations

import json
import os
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

import reknit
from reknit import Checkpointer, SaveOptions, Tier
from reknit.engine.stored.heartbeat import STALE_S, Heartbeat
from reknit.engine.stored.run_record import newest_record
from reknit.errors import StorageError, StorageUnavailableError, UsageError
from reknit.format import paths
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import factories, open_storage
from tests.runs.owners import Owner, Waits
from tests.runs.pieces import resumed, state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reknit.storage.base import Listed


def held(root: Path | str) -> set[str]:
    """Return the files beside the record of a run, and the record."""
    return {each.path for each in open_storage(root).list(paths.RUN_FOLDER)}


class Killed(Exception):
    """The process ends in the middle of a request."""


class InTwoSteps(LocalStorage):
    """A store that deletes a file before it puts another content there, and whose process dies in between."""

    left: bytes | None = None
    """The part of the new content that is there by then."""

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        with suppress(StorageError):
            self.size(path)
            self.delete(path)
            if self.left is not None:
                super().put(path, self.left, if_absent=True)
            raise Killed
        return super().put(path, data, if_absent=if_absent)


def killed_in_a_beat(owner: Owner, left: bytes | None) -> None:
    """Let a process die while it replaces its beat, of which so much is left then."""

    def open_root(url: str) -> LocalStorage:
        store = InTwoSteps(url)
        store.left = left
        return store

    heart = Heartbeat(open_root)
    heart.records = owner.heart.records
    heart.beat(owner.url)
    assert owner.beats == left


@pytest.mark.parametrize("left", [None, b"1"])
def test_a_process_that_is_killed_while_it_replaces_its_beat_leaves_the_line_of_the_steps(
    tmp_path: Path, waits: Waits, left: bytes | None
) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        for step in (1, 2, 3):
            run.save(step, state(float(step)))
        run.load(state(), 1)
        run.save(2, state(-2.0))
    killed_in_a_beat(Owner(tmp_path), left)
    assert resumed(tmp_path) == (3, -2.0), "step 3 was given up"
    assert STALE_S - 2 < waits.seconds <= STALE_S + 1


@pytest.mark.parametrize("left", [None, b""])
def test_a_run_whose_beat_is_being_replaced_keeps_its_folder(
    tmp_path: Path, waits: Waits, left: bytes | None
) -> None:
    owner = Owner(tmp_path)
    killed_in_a_beat(owner, left)
    then = waits.time() - 10 * STALE_S
    os.utime(tmp_path / owner.record, (then, then))
    waits.during = lambda: owner.beat() if waits.seconds > STALE_S / 2 else None
    with pytest.raises(UsageError, match=r"belongs to a run that lives \(process 7 of elsewhere"):
        resumed(tmp_path)
    assert owner.owns()


def test_a_record_that_nobody_can_read_takes_no_folder_from_a_run_that_beats(
    tmp_path: Path, waits: Waits
) -> None:
    owner = Owner(tmp_path)
    owner.root.put(owner.record, b"{", if_absent=False)
    waits.during = owner.beat
    with pytest.raises(UsageError, match="belongs to a run that lives, so this one does not begin"):
        resumed(tmp_path)
    assert owner.owns()


def test_a_folder_that_could_not_be_listed_at_first_is_looked_at_as_long_as_any_other(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, looks = Owner(tmp_path), 0
    owner.root.delete(owner.path_of("beat"))
    listing = LocalStorage.list

    def listed(store: LocalStorage, prefix: str = "") -> Iterator[Listed]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise StorageUnavailableError("away")
        return listing(store, prefix)

    monkeypatch.setattr(LocalStorage, "list", listed)
    with pytest.raises(UsageError, match="no sign of life within 10 s, but may live"):
        resumed(tmp_path, options=SaveOptions(timeout_s=20))
    assert owner.owns()


def test_beats_of_other_runs_say_nothing_and_are_removed(tmp_path: Path, waits: Waits) -> None:
    owner, root = Owner(tmp_path), open_storage(tmp_path)
    others = [
        paths.sign_path(paths.run_path(generation, uuid.uuid4().hex[:8]), sign)
        for generation in (0, paths.run_generation(owner.record) or 0, 1 << 60)
        for sign in ("beat", "end")
    ]
    unknown = f"{paths.RUN_FOLDER}/of-a-later-version"
    for path in (*others, unknown):
        root.put(path, b"1", if_absent=False)

    def during() -> None:
        for path in others:
            root.put(path, str(waits.seconds).encode(), if_absent=False)

    waits.during = during
    resumed(tmp_path)
    assert STALE_S - 2 < waits.seconds <= STALE_S + 1
    record = newest_record(root)
    assert record is not None
    assert held(tmp_path) == {record, paths.sign_path(record, "end"), unknown}


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_record_stays_as_it_was_written_and_the_next_run_begins_at_once(
    tmp_path: Path, waits: Waits, kind: str
) -> None:
    url = str(tmp_path) if kind == "local" else f"{kind}://{uuid.uuid4().hex[:12]}/run"
    owner = Owner(url)
    before = owner.about
    owner.beat()
    assert held(url) == {owner.record, owner.path_of("beat")}
    owner.beat(ends=True)
    assert held(url) == {owner.record, owner.path_of("end")}
    assert owner.about == before
    resumed(url)
    assert waits.seconds == 0
    assert len(held(url)) == 2


def test_a_run_has_a_beat_and_then_the_mark_of_its_end_in_each_tier(tmp_path: Path, waits: Waits) -> None:
    roots = [tmp_path / name for name in "ab"]
    for _ in range(2):
        run = Checkpointer(tiers=[Tier(root) for root in roots], wait=True)
        run.resume(state())
        records = {root: newest_record(open_storage(root)) or "" for root in roots}
        assert all(held(root) == {one, paths.sign_path(one, "beat")} for root, one in records.items())
        run.close()
        assert all(held(root) == {one, paths.sign_path(one, "end")} for root, one in records.items())
    assert waits.seconds == 0


def test_a_save_without_a_run_leaves_no_signs(tmp_path: Path) -> None:
    reknit.save(tmp_path / "step_00000001", state(), step=1)
    assert held(tmp_path) == set()


def test_a_run_that_goes_back_has_one_beat(tmp_path: Path, waits: Waits) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        for step in (1, 2):
            run.save(step, state(float(step)))
        run.load(state(), 1)
        run.save(2, state(-2.0))
        record = newest_record(open_storage(tmp_path))
        assert record is not None
        assert held(tmp_path) == {record, paths.sign_path(record, "beat")}


def test_a_record_that_a_run_once_renewed_in_place_is_followed_after_a_silence(
    tmp_path: Path, waits: Waits
) -> None:
    owner = Owner(tmp_path)
    about = owner.about | {"beats": 7, "ended": True}
    owner.root.put(owner.record, json.dumps(about).encode(), if_absent=False)
    owner.root.delete(owner.path_of("beat"))
    resumed(tmp_path)
    assert waits.seconds <= STALE_S + 1


class Counting(LocalStorage):
    """A folder that notes the requests to the files of runs."""

    def __init__(self, root: str, noted: list[str]) -> None:
        super().__init__(root)
        self.noted = noted

    def _note(self, what: str, path: str) -> None:
        if path.startswith(paths.RUN_FOLDER):
            self.noted.append(f"{what} {path.removeprefix(f'{paths.RUN_FOLDER}/').partition('.')[0]}".strip())

    def list(self, prefix: str = "") -> Iterator[Listed]:
        self._note("list", prefix)
        return super().list(prefix)

    def get(self, path: str, *, limit: int) -> bytes:
        self._note("get", path)
        return super().get(path, limit=limit)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        self._note("put", path)
        return super().put(path, data, if_absent=if_absent)

    def delete(self, path: str) -> None:
        self._note("delete", path)
        super().delete(path)


def test_signs_of_life_cost_few_requests(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setitem(factories, "counted", lambda *_: Counting(str(tmp_path), noted))

    def requests(call: Callable[[], object]) -> list[str]:
        noted.clear()
        call()
        return list(noted)

    ending = ["list", "put end", "delete beat"]
    assert requests(lambda: resumed("counted://there")) == [
        *["list"] * 6,
        *["put run", "list", "list", "put beat"],
        *["list", "get run"],
        *ending,
    ]
    owner = Owner("counted://there")
    assert requests(owner.beat) == ["list", "put beat"]
    assert requests(lambda: owner.beat(ends=True)) == ending
    assert requests(lambda: resumed("counted://there")) == [
        *["list"],  # the mark of the end says all
        *["list", "get run", "list"],
        *["put run", "list", "list", "put beat", "get run", "delete run", "delete end"],
        *["list", "get run"],
        *ending,
    ]
