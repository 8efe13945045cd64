"""Signals are noted by the run that watches for them, and do what they did before everywhere else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from reknit.errors import UsageError
from reknit.policies import on_preemption
from reknit.policies.saving import OnPreemption
from reknit.runs.preemption import Notices

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Event


def watch(*signals: signal.Signals) -> Notices:
    policy = on_preemption(*signals)
    assert isinstance(policy, OnPreemption)
    return Notices([policy])


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Return the signals SIGUSR1 that the handler before all others was called for."""
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGUSR1, before)


def test_runs_that_end_in_the_order_in_which_they_began_leave_no_handler_that_swallows_signals(
    heard: list[int],
) -> None:
    first, second = watch(signal.SIGUSR1), watch(signal.SIGUSR1)
    first.close()
    second.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert first.seen() is second.seen() is None


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
        assert notices.seen() == "SIGINT"
    finally:
        notices.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_nobody_can_watch_for_is_a_wrong_call_and_leaves_no_handler(heard: list[int]) -> None:
    mine = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(UsageError, match="SIGKILL"):
        watch(signal.SIGUSR1, signal.SIGKILL)
    assert signal.getsignal(signal.SIGUSR1) is mine
