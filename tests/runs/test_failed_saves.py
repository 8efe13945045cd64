"""A save that fails or is skipped takes no other save with it, and is neither forgotten nor measured."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

import reknit
from reknit import Checkpointer, SaveOptions
from reknit.engine.outcome import PendingSave, SaveOutcome
from reknit.engine.reports import SaveReport
from reknit.errors import StorageError, StorageFullError
from reknit.policies import every, latest, on_preemption
from reknit.runs.pending_saves import PendingSaves
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.storage.wrappers.forwarding import ForwardingStorage
from reknit.testing.world import run_ranks
from tests.runs.pieces import numbers, saving, state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.options import Durability
    from reknit.storage.base import Storage
    from reknit.storage.wrappers.forwarding import Half

T = TypeVar("T")

WELL = SaveReport("", None, "a" * 32, 1, 1, 1, (), (), 0.0)


class Gate:
    """Which commits fail, and whether any may pass."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.is_open = threading.Event()

    def reset(self) -> None:
        """Let all commits pass."""
        self.failing = set()
        self.is_open.set()


gate = Gate()


class Gated(ForwardingStorage):
    """A folder in which some commits fail, and others wait."""

    def around(self, inner: Storage, path: str) -> Gated:
        """Return a store below."""
        return Gated(inner)

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Wait before a write or a commit, or fail at the commit."""
        if name in ("write", "commit"):
            gate.is_open.wait(60.0)
        if name == "commit" and any(self.inner.url.endswith(each) for each in gate.failing):
            raise StorageFullError("the disk is full", path=path)
        return whole()


def _open(url: str, durability: Durability) -> Gated:
    return Gated(LocalStorage(url.partition("://")[2], durability=durability))


# Not found by a name, so that agents are threads of this process and meet its gate.
open_gated = partial(_open)


@pytest.fixture
def url(tmp_path: Path) -> str:
    gate.reset()
    register("gated-run", open_gated)
    return f"gated-run://{tmp_path}/run"


def test_a_save_that_raises_an_older_failure_is_itself_watched(url: str, tmp_path: Path) -> None:
    gate.failing = {"step_00000001"}
    with Checkpointer(url, keep=latest(1)) as run:
        saving(run, 1, state()).wait()
        with pytest.raises(StorageFullError):
            run.save(2, state())
        again = run.save(2, state(), force=True)  # it is there already, or under way
        assert again is not None
        assert again.result().step == 2
        run.save(3, state())
    assert numbers(tmp_path / "run") == [3]


def test_the_end_of_a_run_waits_for_all_saves_and_raises_the_first_failure() -> None:
    mine, outcomes = PendingSaves({}), [SaveOutcome(f"/run/{step}", step) for step in (1, 2, 3)]
    for step, outcome in enumerate(outcomes, start=1):
        mine.add(step, PendingSave(outcome), 0.0)
    outcomes[0].end(StorageFullError("the first"))
    outcomes[1].end(StorageError("the second"))
    threading.Timer(0.3, outcomes[2].end, [WELL]).start()
    with pytest.raises(StorageFullError, match="the first"):
        mine.wait(60.0)
    assert outcomes[2].done()


def test_a_step_that_failed_in_the_background_is_saved_before_the_next_multiple(
    url: str, tmp_path: Path
) -> None:
    gate.failing = {"step_00000010"}

    def work(group: Group) -> list[int]:
        options, saved = SaveOptions(on_error="warn"), []
        with Checkpointer(url, save=every(steps=1000), group=group, options=options) as run:
            saving(run, 10, state(), force=True).wait()
            for step in range(11, 900):
                if (pending := run.save(step, state())) is not None:
                    pending.wait()
                    saved.append(step)
        return saved

    for saved in run_ranks(2, work):
        assert len(saved) == 1, "once, and not again and again"
    assert numbers(tmp_path / "run") == saved


def test_a_disk_that_stays_full_is_not_tried_at_each_step(url: str) -> None:
    gate.failing = {f"step_{step:08d}" for step in range(100)}
    saved = []
    with Checkpointer(url, save=every(steps=50), options=SaveOptions(on_error="warn")) as run:
        for step in range(1, 99):
            if (pending := run.save(step, state())) is not None:
                pending.wait()
                saved.append(step)
        with pytest.raises(StorageFullError):
            run.wait()
        gate.failing.clear()
        run.save(99, state(), force=True)
    assert saved == [50, 51]


@pytest.mark.parametrize("why", ["force", "notice"])
def test_a_save_that_has_to_be_is_never_skipped(url: str, tmp_path: Path, why: str) -> None:
    notice = tmp_path / "notice"
    when = every(steps=1) | on_preemption(file=notice)
    with Checkpointer(url, save=when, options=SaveOptions(when_busy="skip")) as run:
        run.save(0, state())
        run.wait()
        gate.is_open.clear()  # so saves keep their memory
        skipped = [_skipped(run.save(step, state())) for step in range(1, 5)]
        assert skipped[-1]
        threading.Timer(0.5, gate.is_open.set).start()
        if why == "notice":
            notice.touch()
        last = run.save(5, state(), force=why == "force")
        assert not _skipped(last)
    assert 5 in numbers(tmp_path / "run")


def _skipped(pending: Any) -> bool:
    return bool(pending.skipped)


def test_a_wrong_metric_of_one_rank_stops_all_or_none(tmp_path: Path) -> None:
    options = SaveOptions(timeout_s=20.0)

    def work(group: Group) -> list[str]:
        said = []
        for wrong in (0, 1):
            metrics: Any = {"loss": "low" if group.rank == wrong else 1.0}
            with Checkpointer(tmp_path, wait=True, group=group, options=options) as run:
                try:
                    run.save(1, state(), metrics)
                    said.append("")
                except reknit.UsageError as error:
                    said.append(error.message)
        return said

    for first, second in run_ranks(2, work):
        assert "numbers by name" in first
        assert second == ""
