"""Signals are noted by the run that watches for them, and have their former effect everywhere else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit import Checkpointer
from reknit.errors import UsageError
from reknit.policies import at, on_preemption
from reknit.policies.save_policies import OnPreemption
from reknit.runs.preemption import Notices
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from reknit.comm.group import Group


def watch(*signals: signal.Signals) -> Notices:
    policy = on_preemption(*signals)
    assert isinstance(policy, OnPreemption)
    return Notices([policy])


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """Yield the SIGUSR1 signals that reach the handler from before the test."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_runs_that_end_in_the_order_in_which_they_began_leave_no_handler_that_swallows_signals(
    signals: list[int],
) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    first, second = watch(signal.SIGUSR1), watch(signal.SIGUSR1)
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals == [signal.SIGUSR1]
    assert first.seen() is second.seen() is None


def test_a_run_that_another_thread_ends_leaves_a_handler_that_does_what_the_one_before_it_does(
    signals: list[int],
) -> None:
    notices = watch(signal.SIGUSR1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(notices.close).result()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals == [signal.SIGUSR1]
    assert notices.seen() is None


def wait_to_be_ended(ready: Event) -> None:
    ready.set()
    time.sleep(60)


def test_a_forked_process_ends_at_sigterm_as_it_would_without() -> None:
    notices = watch(signal.SIGTERM)
    try:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        child = context.Process(target=wait_to_be_ended, args=(ready,))
        child.start()
        assert ready.wait(20)  # Python forgets signals that come while it forks
        child.terminate()
        child.join(20)
        ended = child.exitcode
        child.kill()
        child.join()
        assert ended == -signal.SIGTERM
        assert notices.seen() is None
    finally:
        notices.close()


def test_ctrl_c_can_be_watched_for_and_is_pythons_again_afterwards() -> None:
    notices = watch(signal.SIGINT)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert notices.seen() == ("SIGINT", None)
    finally:
        notices.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_nobody_can_watch_for_is_a_wrong_call_and_leaves_no_handler(signals: list[int]) -> None:
    mine = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(UsageError, match="SIGKILL"):
        watch(signal.SIGUSR1, signal.SIGKILL)
    assert signal.getsignal(signal.SIGUSR1) is mine


@pytest.mark.parametrize(
    ("graces", "saves"), [((3600, None), True), ((3600, 0.001), False), ((0.001, None), False)]
)
def test_ranks_that_end_before_a_save_can_be_committed_save_nothing_and_the_log_says_so(
    graces: tuple[float, float | None], saves: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: Group) -> tuple[list[int], str | None]:
        saved, grace_s = [], graces[group.rank != 1]
        how = at(1) | on_preemption(file=tmp_path / "notice", grace_s=grace_s)
        with Checkpointer(tmp_path / "run", save=how, wait=True, group=group) as run:
            held = {"model": {"w": np.arange(10.0)}}
            for step in range(1, 1000):
                if step == 5:
                    (tmp_path / "notice").touch()
                if run.save(step, held) is not None:
                    saved.append(step)
                if run.preempted:
                    break
            return saved, run.preempted

    answers = run_ranks(3, work)
    assert len({(tuple(saved), why) for saved, why in answers}) == 1
    assert (len(answers[0][0]) > 1) == saves
    assert answers[0][1] is not None
    warned = [record.getMessage() for record in caplog.records if "is not saved" in record.getMessage()]
    assert len(warned) == (not saves)
    assert all("the last save took" in text and "notice" in text for text in warned)


def test_a_time_without_a_length_is_a_wrong_call() -> None:
    for wrong in (0, -1, float("nan"), "60"):
        with pytest.raises(UsageError, match="grace_s"):
            on_preemption(grace_s=wrong)  # type: ignore[arg-type]
