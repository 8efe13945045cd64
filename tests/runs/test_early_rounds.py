"""A notice between two planned rounds: all ranks hold a round at one call, soon, and none waits for ever."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist

from reknit import Checkpointer, latest
from reknit.comm.group import SoloGroup, turn
from reknit.comm.tree.thread_group import thread_groups
from reknit.errors import CommError, ShortageError
from reknit.policies import at, on_preemption
from reknit.runs import agreement, preemption
from reknit.runs.preemption import EarlyRounds
from reknit.testing.world import run_ranks
from tests import ranks
from tests.faults.nursery import wait_until
from tests.running.examples import thinned

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group

LIMIT_S = 60.0
STATE = {"model": {"w": np.arange(10.0)}}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LOOK_S", 0.02)


def in_step(step: int, group: Group) -> None:
    """Train a step, in which the ranks wait for each other."""
    with turn(group, f"collective {step}", LIMIT_S) as its_turn:
        its_turn.arrive()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_notice_stops_a_run_a_few_steps_later_though_the_steps_become_a_hundred_times_slower(
    size: int, tmp_path: Path
) -> None:
    collectives = thread_groups(size)

    def work(group: Group) -> tuple[int, int, str | None]:
        how, notice = at(5000) | on_preemption(file=tmp_path / "notice"), 0
        with Checkpointer(tmp_path / "run", save=how, wait=True, group=group) as run:
            for step in range(1, 2000):
                in_step(step, collectives[group.rank])
                run.save(step, STATE)
                if run.preempted:
                    break
                if step == 110:  # the next planned round is that of step 202
                    notice = step
                    if group.rank == size - 1:
                        (tmp_path / "notice").touch()
                if notice:
                    time.sleep(0.1)
            return step, notice, run.preempted

    answers = run_ranks(size, work, timeout_s=LIMIT_S)
    assert len(set(answers)) == 1
    step, notice, why = answers[0]
    assert why is not None
    assert notice < step < notice + 20


def train_until_preempted(folder: str) -> tuple[int, str | None]:
    """Train quick steps until a signal to one rank, and then slow ones; return the last step."""
    preemption.LOOK_S = 0.05
    rank = dist.get_rank()
    noticed = torch.zeros(1)
    with Checkpointer(folder, save=at(5000) | on_preemption()) as run:
        for step in range(1, 3000):
            if step == 110 and rank == 1:  # the next planned round is that of step 202
                os.kill(os.getpid(), signal.SIGTERM)
                noticed += 1
            dist.all_reduce(noticed)  # a collective of the training, in which no rank may wait for ever
            if noticed:
                time.sleep(0.1)
            run.save(step, {"model": {"w": noticed.numpy()}})
            if run.preempted:
                break
    return step, run.preempted


def test_real_ranks_in_collectives_end_at_one_step_after_a_signal_to_one_of_them(tmp_path: Path) -> None:
    answers = ranks.run(2, train_until_preempted, str(tmp_path / "run"))
    assert len(set(answers)) == 1
    step, why = answers[0]
    assert why == "SIGTERM"
    assert 110 <= step < 130
    assert latest(tmp_path / "run") == f"{tmp_path}/run/step_{step:08d}"


@pytest.mark.parametrize("seed", thinned(range(6), 2))
def test_all_ranks_hold_the_round_at_one_call_whatever_their_pace(seed: int) -> None:
    rng = random.Random(seed)
    size, calls = rng.randrange(2, 6), rng.randrange(1, 400)
    in_step_too, planned = rng.random() < 0.5, rng.randrange(1, 60)
    noticed_at = {rank: rng.randrange(calls) for rank in range(size) if rng.random() < 0.5} or {0: 0}
    sides, collectives = thread_groups(size), thread_groups(size)
    paces = [rng.choice((0.0, 0.0001, 0.002)) for _ in range(size)]

    def work(group: Group) -> list[int]:
        mine, begun = noticed_at.get(group.rank), [0]
        early = EarlyRounds(sides[group.rank], lambda: mine is not None and begun[0] >= mine, LIMIT_S)
        held = []
        for call in range(1, calls + 1):
            time.sleep(paces[group.rank])
            if in_step_too:
                in_step(call, collectives[group.rank])
            begun[0] = call
            is_early = early.begins()
            if is_early or call % planned == 0:
                in_step(call, group)
            if is_early:
                held.append(call)
        early.close()
        return held

    answers = run_ranks(size, work, timeout_s=LIMIT_S)
    assert all(held == answers[0] for held in answers)
    assert len(answers[0]) <= 1


def test_a_rank_that_ends_while_the_others_wait_lets_them_go_on() -> None:
    sides = thread_groups(3)
    waits = threading.Event()

    class Leaving(EarlyRounds):
        def meet(self) -> None:
            wait_until(waits.is_set, LIMIT_S)
            self._side.close()

    def work(group: Group) -> list[bool]:
        kind = Leaving if group.rank == 1 else EarlyRounds
        early = kind(sides[group.rank], lambda: group.rank == 2, LIMIT_S)
        if group.rank == 2:
            wait_until(lambda: early.waits, LIMIT_S)
            waits.set()
        wait_until(waits.is_set, LIMIT_S)  # a rank that closes ends the rounds of all
        found = [early.begins() for _ in range(100)]
        early.close()
        return found

    assert not any(any(found) for found in run_ranks(3, work, timeout_s=LIMIT_S))


def test_a_call_waits_for_the_answer_which_may_make_it_the_round() -> None:
    first, second = thread_groups(2)
    answers = threading.Event()

    class Late(EarlyRounds):
        def meet(self) -> None:
            answers.wait(LIMIT_S)
            super().meet()

    early, late = EarlyRounds(first, lambda: True, LIMIT_S), Late(second, lambda: False, LIMIT_S)
    wait_until(lambda: early.waits, LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(lambda: [early.begins() for _ in range(3)])
        wait([calls], 0.2)
        answers.set()
        assert calls.result(LIMIT_S) == [True, False, False]
    wait_until(lambda: late.round > 0, LIMIT_S)
    assert [late.begins() for _ in range(3)] == [True, False, False]
    early.close()
    late.close()


def test_a_rank_that_can_start_no_thread_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> threading.Thread:
        raise ShortageError("no threads")

    first, second = thread_groups(2)
    early = EarlyRounds(first, lambda: True, LIMIT_S)
    monkeypatch.setattr(preemption, "start_thread", refuse)
    with pytest.raises(ShortageError):
        EarlyRounds(second, lambda: True, LIMIT_S)
    assert not any(early.begins() for _ in range(100))
    early.close()


def test_a_process_alone_has_its_round_at_its_next_call() -> None:
    early = EarlyRounds(SoloGroup(), lambda: True, LIMIT_S)
    wait_until(lambda: early.round > 0, LIMIT_S)
    assert [early.begins() for _ in range(3)] == [True, False, False]
    early.close()


def test_ranks_that_cannot_connect_their_threads_keep_the_planned_rounds_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Group:
        raise CommError("no port is free")

    def work(group: Group) -> str | None:
        how = at(5000) | on_preemption(file=tmp_path / "notice")
        with Checkpointer(tmp_path / "run", save=how, wait=True, group=group) as run:
            for step in range(1, 1000):
                if step == 300:
                    (tmp_path / "notice").touch()
                if run.save(step, STATE) is not None:
                    break
            return run.preempted

    monkeypatch.setattr(agreement, "side_group", refuse)
    with caplog.at_level(logging.WARNING, "reknit"):
        assert None not in run_ranks(2, work)
    assert "a notice may wait for 100 steps: no port is free" in caplog.text
