"""A save that is promoted to several places, and how fast."""

from __future__ import annotations

import io
import itertools
import logging
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine import outcome
from reknit.engine.memory.workers import Pace
from reknit.engine.stored import promote
from reknit.engine.stored.agents import at_work
from reknit.errors import StorageFullError, UsageError
from reknit.options import PromotionTarget
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault
from reknit.testing.world import run_ranks
from reknit.types.small import spelled
from tests.at_operation import AtOperation
from tests.faults.nursery import wait_until
from tests.storage.killpoint import faulty_url, register_faulty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reknit.comm.group import Group

LIMIT_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    register_faulty()
    yield
    assert reknit.close(LIMIT_S)


def state() -> dict[str, Any]:
    return {"model": {"w": np.arange(5000, dtype=np.float32)}}


def save(path: Path, *to: object, wait: bool = False, **more: Any) -> reknit.PendingSave:
    options = reknit.SaveOptions(promote_to=to or None, durability="process", timeout_s=LIMIT_S)  # type: ignore[arg-type]
    return reknit.save(path, state(), wait=wait, options=options, **more)


def test_a_checkpoint_gets_to_each_place_and_the_report_is_of_the_last(tmp_path: Path) -> None:
    for wait in (True, False):
        folder = tmp_path / f"{wait}"
        folder.mkdir()
        places = [folder / "b", PromotionTarget(folder / "c", 1e9)]
        pending = save(folder / "a", *places, wait=wait)
        report, reported = pending.result(LIMIT_S), pending.promoted(LIMIT_S)
        assert (reported.path, reported.nbytes) == (str(folder / "c"), 2 * report.total_nbytes), wait
        for name in "bc":
            assert reknit.verify(folder / name, "data").ok, wait


def test_a_place_that_fails_does_not_keep_a_checkpoint_from_the_others(tmp_path: Path) -> None:
    for wait in (True, False):
        folder = tmp_path / f"{wait}"
        folder.mkdir()
        full = faulty_url(folder / "b", Fault("full", 1, "create"))
        if wait:
            with pytest.raises(StorageFullError):
                save(folder / "a", full, folder / "c", wait=True)
        else:
            pending = save(folder / "a", full, folder / "c")
            with pytest.raises(StorageFullError):
                pending.promoted(LIMIT_S)
        assert reknit.verify(folder / "c", "data").ok, wait
        with pytest.raises(reknit.CheckpointNotFoundError):
            reknit.verify(folder / "b")


class Handler(logging.Handler):
    """Passes each line of the log to a function, without the lock that handlers hold for `emit`."""

    def __init__(self, take: Callable[[str], object]) -> None:
        super().__init__()
        self._take = take

    def handle(self, record: logging.LogRecord) -> bool:
        self._take(record.getMessage())
        return True


@pytest.fixture
def handled(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[Callable[[str], object]], None]]:
    """Takes a function to which each line of the log is passed until the end of the test."""
    caplog.set_level(logging.INFO, "reknit")
    logger, handlers = logging.getLogger("reknit"), []

    def add(take: Callable[[str], object]) -> None:
        handlers.append(Handler(take))
        logger.addHandler(handlers[-1])

    yield add
    for handler in handlers:
        logger.removeHandler(handler)


OUTCOMES = {"committed": ["saved "], "failed": ["save to"], "not promoted": ["saved ", "promotion of"]}


def begin(tmp_path: Path, case: str) -> reknit.PendingSave:
    """Begin a save with one of the `OUTCOMES`."""
    full = [faulty_url(tmp_path / "b", Fault("full", 1, "create"))] if case == "not promoted" else ()
    return save(tmp_path / ("taken" if case == "failed" else "a"), *full)


def ask(pending: reknit.PendingSave) -> None:
    """Wait for all outcomes of a save, and request them, so that the next save raises none of them."""
    pending.wait_promoted(LIMIT_S)
    for request, error in ((pending.result, pending.error), (pending.promoted, pending.promotion_error)):
        if error is not None:
            with pytest.raises(type(error)):
                request()


@pytest.mark.parametrize("case", OUTCOMES)
def test_the_log_has_an_outcome_before_a_thread_that_waits_continues(
    tmp_path: Path,
    case: str,
    handled: Callable[[Callable[[str], object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []

    def late(line: str) -> None:
        time.sleep(0.1)
        lines.append(line)

    monkeypatch.setattr(outcome, "LOG_S", LIMIT_S)
    save(tmp_path / "taken").result(LIMIT_S)
    handled(late)
    ask(begin(tmp_path, case))
    assert [line.startswith(word) for line, word in zip(lines, OUTCOMES[case], strict=True)]


@pytest.mark.parametrize("case", OUTCOMES)
@pytest.mark.parametrize("how", ["raises", "raises, and stderr is closed", "waits for the save"])
def test_a_handler_of_the_log_keeps_nobody_waiting(
    tmp_path: Path,
    case: str,
    how: str,
    handled: Callable[[Callable[[str], object]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    met: list[BaseException] = []
    has_begun = threading.Event()

    def take(line: str) -> None:
        if how.startswith("raises"):
            raise OSError(line)
        if threading.current_thread() is threading.main_thread():
            return
        assert has_begun.wait(LIMIT_S)
        try:
            pending.wait_promoted(LIMIT_S) if line.startswith("promotion") else pending.wait(LIMIT_S)
        except BaseException as error:
            met.append(error)

    monkeypatch.setattr(outcome, "LOG_S", LIMIT_S if how.startswith("raises") else 0.01)
    if how.endswith("closed"):
        monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
        closed.close()
    save(tmp_path / "taken").result(LIMIT_S)
    handled(take)
    pending = begin(tmp_path, case)
    has_begun.set()
    ask(pending)
    assert met == []
    assert ("OSError" in capsys.readouterr().err) == (how == "raises")


def test_a_slow_place_does_not_delay_another_and_each_gets_the_steps_in_order(tmp_path: Path) -> None:
    gate, disk = tmp_path / "gate", tmp_path / "disk"
    pending = []
    for step in range(3):
        slow = faulty_url(tmp_path / "slow" / str(step), Fault("stall", 1, "finish"), gate=gate)
        pending.append(save(tmp_path / "a" / str(step), slow, disk / str(step), step=step))
    wait_until(lambda: all(one.promotion_done(1) for one in pending), LIMIT_S)
    assert [reknit.verify(disk / str(step), "data").ok for step in range(3)] == [True] * 3
    assert not any(one.promotion_done(0) or one.promotion_done() for one in pending)
    wait_until(lambda: not at_work(str(disk)), LIMIT_S)
    gate.touch()
    for one in pending:
        assert one.promoted(LIMIT_S).path == str(disk / str(one.step))
    for places in (disk, tmp_path / "slow"):
        written = [(places / str(step) / "manifest.json").stat().st_mtime_ns for step in range(3)]
        assert written == sorted(written)


def test_the_source_stays_while_agents_of_any_host_copy_it(tmp_path: Path) -> None:
    refused: list[str] = []

    def remove() -> None:
        with pytest.raises(UsageError, match="reads it"):
            reknit.delete(tmp_path / "a")
        refused.append("a")

    register("leased", lambda url, durability: AtOperation(LocalStorage(url[len("leased://") :]), 5, remove))
    save(tmp_path / "a", f"leased://{tmp_path}/b", wait=True)
    assert refused == ["a"]
    assert reknit.verify(tmp_path / "b", "data").ok
    reknit.delete(tmp_path / "a")


def test_the_rate_is_that_of_all_ranks_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paces: list[tuple[float | None, list[int]]] = []

    class Noted(Pace):
        def __init__(self, bytes_per_s: float | None = None) -> None:
            super().__init__(bytes_per_s)
            self.taken: list[int] = []
            paces.append((bytes_per_s, self.taken))

        def take(self, nbytes: int) -> None:
            self.taken.append(nbytes)

    def work(group: Group) -> int:
        target = PromotionTarget(tmp_path / "b", bytes_per_s=400_000)
        options = reknit.SaveOptions(promote_to=target, durability="process")
        mine = {"model": {f"w{group.rank}": np.zeros(100_000, np.float32)}}
        return reknit.save(tmp_path / "a", mine, options=options, group=group).promoted(LIMIT_S).nbytes

    monkeypatch.setattr(promote, "Pace", Noted)
    copied = run_ranks(2, work)
    assert [rate for rate, _ in paces] == [200_000, 200_000]
    assert sorted(sum(taken) for _, taken in paces) == sorted(copied)
    assert reknit.verify(tmp_path / "b", "data").ok


def test_ranks_may_call_the_stores_by_names_of_their_own(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        for step in range(3):
            path = tmp_path / "b" / str(step)
            if group.rank:
                (tmp_path / f"link-{step}").symlink_to(path.parent)
                path = tmp_path / f"link-{step}" / str(step)
            options = reknit.SaveOptions(promote_to=path, durability="process")
            saved = reknit.save(tmp_path / "a" / str(step), state(), options=options, wait=False, group=group)
            saved.promoted(LIMIT_S)

    (tmp_path / "b").mkdir()
    run_ranks(2, work)
    assert all(reknit.verify(tmp_path / "b" / str(step), "data").ok for step in range(3))


def test_ranks_that_promote_to_different_numbers_of_places_are_told_at_once(tmp_path: Path) -> None:
    def work(group: Group, places: tuple[int, ...], wait: bool) -> str:
        mine = tuple(tmp_path / f"to{place}" for place in range(places[group.rank]))
        options = reknit.SaveOptions(promote_to=mine or None, durability="process", timeout_s=600)
        with pytest.raises(UsageError, match="different numbers of places") as caught:
            reknit.save(tmp_path / "a", state(), options=options, wait=wait, group=group).result(LIMIT_S)
        return caught.value.message

    for places, wait in itertools.product([(0, 1, 1), (1, 0, 1), (2, 2, 1)], [True, False]):
        others = [rank for rank in range(3) if places[rank] != places[0]]
        for message in run_ranks(3, partial(work, places=places, wait=wait)):
            assert f"rank 0 to {places[0]}, {spelled(others)} to" in message
        assert reknit.latest(tmp_path) is None, places


def test_what_is_no_place_is_refused() -> None:
    cases: list[Any] = ["", 7, b"x", ("a", ""), ("a", 3), (), PromotionTarget]
    for wrong in cases:
        with pytest.raises(UsageError, match="promote_to"):
            reknit.SaveOptions(promote_to=wrong)
