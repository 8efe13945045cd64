"""Another run owns the folder: while it lives, nobody takes the folder from it unless that is asked for."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
import warnings
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit import Checkpointer, Tier
from reknit.engine.stored import heartbeat, run_record
from reknit.engine.stored.heartbeat import EVERY_S, STALE_S, Heartbeat
from reknit.engine.stored.run_record import newest_if_ended, newest_record
from reknit.errors import (
    FencedError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
    UsageError,
)
from reknit.format import paths
from reknit.runs import folder
from reknit.runs.folder import refuse_living
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import factories, open_storage
from reknit.storage.wrappers.retrying import with_retries
from tests.runs.owners import LONG_S, Owner, Waits, has_ended
from tests.runs.pieces import numbers, resumed, state

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_that_has_ended_is_followed_at_once(
    tmp_path: Path, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path)
    owner.beat(ends=True)
    with caplog.at_level(logging.INFO, "reknit"):
        resumed(tmp_path)
    assert waits.seconds == 0
    (line,) = [each for each in caplog.records if "this run takes" in each.message]
    assert line.levelno == logging.INFO


def test_a_checkpointer_marks_its_end_also_when_an_error_or_a_notice_ends_it(
    tmp_path: Path, waits: Waits
) -> None:
    for ends in ("closed", "left by an error", "preempted"):
        run = Checkpointer(tmp_path, wait=True, save=reknit.policies.on_preemption(signal.SIGUSR2))
        run.resume(state())
        record = newest_record(open_storage(tmp_path))
        assert record is not None
        assert not has_ended(open_storage(tmp_path), record)
        if ends == "left by an error":
            with pytest.raises(KeyError), run:
                raise KeyError
        else:
            if ends == "preempted":
                signal.raise_signal(signal.SIGUSR2)
                assert run.should_save(1)
                assert run.preempted
            run.close()
        assert has_ended(open_storage(tmp_path), record), ends


def test_a_dead_process_of_this_host_is_followed_at_once(tmp_path: Path, waits: Waits) -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    Owner(tmp_path, socket.gethostname(), ended.pid)
    resumed(tmp_path)
    assert waits.seconds == 0


def test_a_process_may_begin_several_runs_in_a_folder(tmp_path: Path, waits: Waits) -> None:
    first = Checkpointer(tmp_path, wait=True)
    first.save(1, state(1.0))
    assert resumed(tmp_path)[0] == 2
    assert waits.seconds == 0
    with pytest.raises(FencedError):
        first.save(2, state(2.0))


def test_a_run_of_an_earlier_version_has_no_heartbeat_and_is_followed_at_once(
    tmp_path: Path, waits: Waits
) -> None:
    owner = Owner(tmp_path)
    about = owner.about
    del about["beats"]
    owner.root.put(owner.record, json.dumps(about).encode(), if_absent=False)
    resumed(tmp_path)
    assert waits.seconds == 0


def test_a_record_that_nobody_can_read_keeps_nobody_out_for_longer_than_a_silence(
    tmp_path: Path, waits: Waits
) -> None:
    for text in (b"{", b"[]", b'{"host": 1}', b'{"host": "a", "pid": 1, "opened": 1e300}'):
        for silent_s in (0.0, STALE_S + 1):
            owner = Owner(tmp_path)
            owner.root.put(owner.record, text, if_absent=False)
            owner.age(silent_s)
            waits.seconds = 0
            resumed(tmp_path)
            # Its run may be about to write the rest.
            assert max(0, STALE_S - silent_s - 2) <= waits.seconds <= max(0, STALE_S - silent_s + 1), text


def test_a_look_without_an_answer_takes_no_folder_from_a_run_that_lives(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, trouble, first = 0, "", 0

    def look(root: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            owner.beat()
        if trouble == "list" and first <= looks < 4:
            raise StorageUnavailableError("away")
        return newest_if_ended(root)

    def get(store: LocalStorage, path: str, *, limit: int) -> bytes:
        if trouble == "get" and first <= looks < 4:
            raise StorageUnavailableError("away")
        return read(store, path, limit=limit)

    read = LocalStorage.get
    monkeypatch.setattr(LocalStorage, "get", get)
    monkeypatch.setattr(heartbeat, "newest_if_ended", look)
    for now_trouble, now_first in (("list", 1), ("list", 2), ("get", 1), ("get", 2)):
        trouble = ""
        owner = Owner(tmp_path / f"{now_trouble}-{now_first}")
        looks, trouble, first = 0, now_trouble, now_first
        with pytest.raises(UsageError, match="belongs to a run that lives"):
            resumed(owner.url)
        assert owner.owns()


def test_the_door_of_a_trainer_waits_for_the_whole_silence_of_a_run_that_it_sees_late(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    Owner(url)

    def look(root: Any) -> Any:
        if waits.seconds < 10:
            raise StorageUnavailableError("away")
        return newest_if_ended(root)

    monkeypatch.setattr(heartbeat, "newest_if_ended", look)
    refuse_living(url)
    assert STALE_S + 8 < waits.seconds <= STALE_S + 12


def test_only_the_clock_of_the_store_says_how_old_a_beat_is(tmp_path: Path, waits: Waits) -> None:
    for ahead_s in (0.0, 7200.0, -7200.0):
        for silent_s, least_s, most_s in ((STALE_S + 1, 0, 0), (10, STALE_S - 12, STALE_S - 9)):
            waits.ahead_s, waits.seconds = ahead_s, 0
            Owner(tmp_path).age(silent_s)
            resumed(tmp_path)
            assert least_s <= waits.seconds <= most_s, (ahead_s, silent_s)


def test_a_process_that_was_killed_elsewhere_is_followed_once_its_beats_are_missing(
    waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    Owner(url)
    with caplog.at_level(logging.WARNING, "reknit"):
        resumed(url)
    assert STALE_S - 2 < waits.seconds <= STALE_S + 1
    assert "waiting up to 30 s for a sign of life of the run that opened" in caplog.text
    assert "process 7 of elsewhere, at 20" in caplog.text
    assert "this run takes" in caplog.text


def test_a_process_that_may_live_is_followed_once_its_beats_are_missing(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def followed(pid: int) -> None:
        waits.seconds = 0
        Owner(tmp_path, socket.gethostname(), pid)
        resumed(tmp_path)
        assert waits.seconds > STALE_S - 2

    followed(1)  # of this host
    followed(1 << 80)  # a number that no process can have
    monkeypatch.setattr("reknit.engine.stored.run_record._pids", lambda: None)
    followed(1 << 22)  # a process whose numbers are unknown is not called dead


def test_a_container_with_the_name_of_its_host_has_numbers_of_its_own(tmp_path: Path, waits: Waits) -> None:
    for pid in (os.getpid(), 1 << 22):  # of none
        owner = Owner(tmp_path / str(pid), socket.gethostname(), pid, in_container=True)
        waits.during = owner.beat
        with pytest.raises(UsageError, match="belongs to a run that lives"):
            resumed(owner.url)
        assert owner.owns()


def test_a_forked_process_is_another_one(tmp_path: Path, waits: Waits) -> None:
    mine = run_record.open_run(open_storage(tmp_path), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # since other threads may run
        child = os.fork()
    if not child:
        found = run_record.owner_of(open_storage(tmp_path), mine)
        os._exit(0 if found is not None and not found.is_this and not found.is_gone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def begun(root: Path, how: str) -> Checkpointer:
    """Begin a run in one of the ways in which a run can begin."""
    run = Checkpointer(root, wait=True, later_steps="replace" if how == "save, replacing" else "refuse")
    if how == "resume":
        run.resume(state())
    elif how == "should_save":
        run.should_save(5)
    else:
        run.save(5, state(5.0))
    return run


def test_a_run_that_lives_keeps_its_folder_however_another_begins(tmp_path: Path, waits: Waits) -> None:
    for host, how in (
        *((socket.gethostname(), how) for how in ("resume", "save, replacing")),
        *(("elsewhere", how) for how in ("resume", "should_save", "save", "save, replacing")),
    ):
        root, waits.seconds = tmp_path / f"{host}, {how}", 0
        owner = Owner(root, host, 1)
        waits.during = lambda owner=owner: owner.beat() if waits.seconds > EVERY_S / 2 else None  # type: ignore[misc]
        before = sorted(each.name for each in root.iterdir())
        match = r"belongs to a run that lives \(process 1 of .*not begin"
        with pytest.raises(UsageError, match=match) as caught:
            begun(root, how)
        assert "other_run='take_over'" in (caught.value.remedy or "")
        assert waits.seconds < EVERY_S
        assert owner.owns()
        assert sorted(each.name for each in root.iterdir()) == before


def test_a_run_that_opens_the_folder_during_the_wait_keeps_it(tmp_path: Path, waits: Waits) -> None:
    Owner(tmp_path)
    others: list[Owner] = []
    waits.during = lambda: others.append(Owner(tmp_path, "a third host")) if not others else None
    with pytest.raises(UsageError, match=r"lives .*a third host"):
        resumed(tmp_path)


@pytest.mark.parametrize("place", ["root", "promote_to"])
def test_a_run_that_may_not_write_to_a_folder_leaves_its_owner_alone(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    with Checkpointer(root, wait=True) as run:
        run.save(3, state(3.0))
    owners = [Owner(root), Owner(other)] if place == "root" else [Owner(other)]

    def during() -> None:
        for each in owners:
            each.beat()

    waits.during = during
    put, denied = LocalStorage.put, str(owners[0].url)

    def refuse(store: LocalStorage, path: str, data: bytes, *, if_absent: bool) -> bool:
        if store.url == denied and path != owners[0].path_of("beat"):
            raise StoragePermissionError("read-only file system")
        return put(store, path, data, if_absent=if_absent)

    monkeypatch.setattr(LocalStorage, "put", refuse)
    into = state()
    assert Checkpointer(root, wait=True, options=reknit.SaveOptions(promote_to=other)).resume(into) == 4
    assert into["model"]["w"].max() == 3.0
    assert waits.seconds == 0
    assert all(each.owns() for each in owners)


def test_a_run_that_ends_during_the_wait_is_followed_then(tmp_path: Path, waits: Waits) -> None:
    owner = Owner(tmp_path)
    waits.during = lambda: owner.beat(ends=True)
    resumed(tmp_path)
    assert waits.seconds < 1


def test_a_wait_that_may_take_less_time_than_it_needs_leaves_the_folder_to_its_owner(
    tmp_path: Path, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path)
    with pytest.raises(
        UsageError, match=r"elsewhere, .* no sign of life within 10 s, but may live"
    ) as caught:
        resumed(tmp_path, options=reknit.SaveOptions(timeout_s=20))
    assert "a timeout_s of over 60 s" in (caught.value.remedy or "")
    assert "waiting up to 10 s for a sign of life" in caplog.text
    assert waits.seconds < 12
    assert owner.owns()


def test_a_place_of_promotions_that_cannot_be_reached_is_looked_at_without_retries_and_refuses_nobody(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> Any:
        raise StorageUnavailableError("away")

    def factory(url: str, durability: Any) -> LocalStorage:
        far = LocalStorage(tmp_path / "far", durability=durability)
        monkeypatch.setattr(far, "list", away)
        return far

    looked: list[Any] = []

    def look(root: Any) -> Any:
        looked.append(root)
        return newest_if_ended(root)

    monkeypatch.setattr(heartbeat, "newest_if_ended", look)
    monkeypatch.setitem(factories, "far", with_retries(resumes=True)(factory))
    options = reknit.SaveOptions(promote_to="far://there?retry_s=0.01", timeout_s=20)
    assert resumed(tmp_path / "near", options=options)[0] == 0
    assert len(looked) > 2
    assert all(isinstance(each, LocalStorage) for each in looked)


@pytest.mark.parametrize("place", ["tier", "promote_to"])
def test_a_run_that_lives_keeps_the_places_that_two_hosts_share(
    tmp_path: Path, waits: Waits, place: str
) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    owner = Owner(cold)
    waits.during = owner.beat
    if place == "tier":
        run = Checkpointer(tiers=[Tier(hot), Tier(cold)], wait=True)
    else:
        run = Checkpointer(hot, wait=True, options=reknit.SaveOptions(promote_to=cold))
    with pytest.raises(UsageError, match="cold belongs to a run that lives"):
        run.save(1, state(1.0))
    assert owner.owns()
    assert not hot.exists()


def test_a_run_that_is_told_to_takes_the_folder_from_one_that_lives(
    tmp_path: Path, waits: Waits, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(tmp_path)
    with Checkpointer(tmp_path, wait=True, other_run="take_over") as run:
        with caplog.at_level(logging.WARNING, "reknit"):
            run.save(1, state(1.0))
        assert waits.seconds == 0
        assert "over from the run that opened it in process 7 of elsewhere" in caplog.text
        caplog.clear()
        owner.beat()
        owner.beat()
        (line,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        assert "a newer run (generation" in line, "its log has it before its next save fails"
        assert not (tmp_path / owner.path_of("beat")).exists(), "a run without its folder beats no more"
    assert numbers(tmp_path) == [1]


def test_a_run_that_was_overtaken_does_not_take_the_folder_back_from_one_that_lives(
    tmp_path: Path, waits: Waits
) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        run.resume(state())
        owner = Owner(tmp_path)
        waits.during = owner.beat
        with pytest.raises(UsageError, match="belongs to a run that lives"):
            run.resume(state())
        assert owner.owns()


def test_a_run_whose_record_somebody_has_removed_beats_no_more(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.beat()
    before = owner.beats
    owner.root.delete(owner.record)
    owner.beat()
    owner.beat(ends=True)
    assert before == owner.beats
    assert not owner.has_ended


def test_a_store_that_fails_ends_no_heartbeat(tmp_path: Path) -> None:
    owner = Owner(tmp_path)

    def fail(url: str) -> Any:
        raise OSError("away")

    good, owner.heart.open_root, before = owner.heart.open_root, fail, owner.beats
    owner.beat()
    assert owner.beats == before
    owner.heart.open_root = good
    owner.beat()
    assert owner.beats != before


def test_a_beat_that_is_missing_is_warned_of_once_in_time(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> bool:
        raise StorageFullError("no space left")

    owner = Owner(tmp_path)
    owner.beat()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put", full)
        for seconds in (0, 10, 10, 10):
            waits.seconds += seconds
            assert bool(caplog.text) == (waits.seconds > STALE_S / 2 + 10)
            owner.beat()
    (line,) = [each.message for each in caplog.records if "could not give a sign of life" in each.message]
    assert line.endswith("for 20 s, and another run may take a folder after 30 s: no space left")
    before = owner.beats
    owner.beat()
    assert owner.beats != before


def test_a_store_that_hangs_holds_up_no_beat_and_no_end_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.001)
    monkeypatch.setattr(heartbeat, "_END_S", 0.5)
    owner, hung, hangs, beats = Owner(tmp_path), threading.Event(), threading.Event(), threading.Semaphore(0)

    def open_root(url: str) -> Any:
        if url == "far":
            hung.set()
            hangs.wait(LONG_S)
            raise OSError("away")
        return open_storage(url)

    heart = Heartbeat(open_root)

    def sign(*given: Any, **more: Any) -> None:
        Heartbeat.sign(heart, *given, **more)
        beats.release()

    monkeypatch.setattr(heart, "sign", sign)
    heart.records = {"far": owner.record, str(tmp_path): owner.record}
    heart.begin()
    try:
        assert hung.wait(LONG_S)
        for _ in range(3):
            assert beats.acquire(timeout=LONG_S)
        heart.end()
        assert owner.has_ended
    finally:
        hangs.set()


def test_beats_are_neither_repeated_nor_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str]] = []

    def factory(url: str, durability: Any) -> LocalStorage:
        opened.append((url, durability))
        return LocalStorage(tmp_path, durability=durability)

    monkeypatch.setitem(factories, "far", with_retries(resumes=True)(factory))
    assert isinstance(folder.open_for_beats("far://there"), LocalStorage)
    assert opened == [("far://there", "process")]


def beating() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "reknit-heartbeat"]


def test_a_run_beats_until_it_ends_or_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.001)
    before, beats = set(beating()), threading.Semaphore(0)
    beat = Heartbeat.beat

    def counted(heart: Heartbeat, url: str, *, ends: bool = False) -> None:
        beat(heart, url, ends=ends)
        beats.release()

    monkeypatch.setattr(Heartbeat, "beat", counted)
    run = Checkpointer(tmp_path, wait=True)
    run.resume(state())
    run.save(1, state(1.0))
    (thread,) = set(beating()) - before
    for _ in range(3):
        assert beats.acquire(timeout=LONG_S)
    record = newest_record(open_storage(tmp_path))
    assert record is not None
    assert int((tmp_path / paths.sign_path(record, "beat")).read_text()) >= 2
    run.load(state(), 1)
    run.save(1, state(2.0))  # opens the folder again, with another record
    newer = newest_record(open_storage(tmp_path))
    del run
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert newer is not None
    assert has_ended(open_storage(tmp_path), newer)


def test_other_run_is_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="other_run is 'refuse' or 'take_over', not 'wait'"):
        Checkpointer(tmp_path, other_run="wait")  # type: ignore[arg-type]
