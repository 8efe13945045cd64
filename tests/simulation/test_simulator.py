"""Tests of the simulator: runs repeat, dead processes stay dead, violations are noticed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from functools import partial
from math import inf
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from reknit.comm.tree.machine import RoundMachine
from reknit.testing.faulty_storage import Fault
from tests.running.examples import is_night
from tests.simulation import clock, job, oracle
from tests.simulation.clock import TRACE_LINES, Schedule
from tests.simulation.process import Process
from tests.simulation.simulator import (
    Crash,
    Cut,
    DiskFault,
    Interrupt,
    Partition,
    Restart,
    Save,
    Stop,
    Violation,
    Weather,
    simulate,
)
from tests.simulation.storage import Disk, SimStorage, SimWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.rank_messages import Outcome
    from reknit.comm.tree.machine import Effect


def outcomes(*faults: object, number: int = 0, ranks: int = 5, **more: object) -> dict[int, str]:
    """Return the outcomes of a save of a job by rank."""
    result = simulate(3, ranks=ranks, fan_out=2, faults=faults, **more)  # type: ignore[arg-type]
    return {rank: reported for (n, rank), reported in result.outcomes().items() if n == number}


# Whole jobs.


def test_a_job_to_which_nothing_happens_commits_every_save_on_all_ranks() -> None:
    result = simulate(1, ranks=9, fan_out=2, hosts=3, saves=3)
    assert set(result.outcomes().values()) == {"ok"}
    assert [(c.run, c.number) for c in result.commits] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_hundreds_of_ranks_run_in_one_thread() -> None:
    ranks = 1024 if is_night() else 256
    result = simulate(1, ranks=ranks, fan_out=16, hosts=ranks // 8, recover=False)
    assert len(result.endings) == ranks
    assert set(result.outcomes().values()) == {"ok"}


def test_a_seed_repeats_itself_and_another_one_does_not() -> None:
    faults = (Crash(1, 20), Weather(slow=0.3, lost=0.05, doubled=0.3), Restart(0.05))
    first, again, other = (simulate(seed, ranks=6, fan_out=2, saves=2, faults=faults) for seed in (5, 5, 6))
    assert first.trace_digest == again.trace_digest != other.trace_digest
    assert [e.outcome for e in first.endings] == [e.outcome for e in again.endings]


def test_a_save_where_a_checkpoint_is_fails_on_all_ranks_unless_it_may_overwrite() -> None:
    result = simulate(1, ranks=3, saves=(Save(), Save(overwrite=False)), faults=(Weather(),), recover=False)
    assert {who: reported for who, reported in result.outcomes().items() if who[0] == 1} == {
        (1, rank): "CheckpointExistsError" for rank in range(3)
    }


# Possible faults.


def test_a_fault_is_borne_or_is_the_error_of_all_ranks() -> None:
    faults: list[tuple[object, str, set[int]]] = [
        (Crash(4, 5), "CommError", {4}),
        (Crash(4, 5, silent=True), "DeadlineError", {4}),
        (Stop(4, 5, 10.0), "ok", set()),
        (Stop(4, 5, inf), "DeadlineError", {4}),
        (DiskFault(3, Fault("full", 1, "write")), "StorageFullError", set()),
        (DiskFault(3, Fault("stall", 1, "write"), stall_s=9.0), "ok", set()),
        (Partition((1, 3), 0.0, 9.0), "ok", set()),
        (Weather(lost=1.0), "DeadlineError", set()),
    ]
    for fault, outcome, silent in faults:
        assert outcomes(fault) == dict.fromkeys(set(range(5)) - silent, outcome), fault
    for fault in (Cut(4, 2, None), Cut(4, 2, 0.1), Interrupt(2, 5)):
        reported = outcomes(fault)
        assert set(reported) == set(range(5)), fault
        assert "ok" not in reported.values(), fault
        assert (reported[2] == "KeyboardInterrupt") == isinstance(fault, Interrupt)
    assert "ok" not in outcomes(Partition((1, 3), 0.0, 9.0, kept=False)).values()
    assert set(outcomes(Weather(doubled=0.8, slow=0.5), saves=4, number=3).values()) == {"ok"}


def test_a_job_that_is_started_again_saves_too() -> None:
    result = simulate(1, ranks=4, faults=(Crash(0, 30), Restart(1.0)), recover=False)
    assert set(result.outcomes(run=1).values()) == {"ok"}
    assert result.commits[-1].run == 1


# What is noticed.


def test_a_violation_tells_how_to_repeat_it_and_what_happened_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundMachine, "next_at", inf)
    with pytest.raises(Violation) as caught:
        simulate(11, ranks=2, fan_out=2, hosts=2, faults=(Crash(1, 5, silent=True),), timeout_s=4.0)
    text = str(caught.value)
    assert "wait for ever: [(0, 0)]" in text
    assert "DIES silently" in text
    assert len(text.split("The last events:\n")[1].splitlines()) <= TRACE_LINES
    command = shlex.split(text.split("To repeat it:\n")[1].splitlines()[0])
    assert command[:2] == ["python", "-c"]
    assert "simulate(11, ranks=2, fan_out=2, hosts=2" in command[2]
    # Where nothing is broken, it runs.
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=100)


def test_a_rank_that_looks_at_the_clock_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "MAX_AT_ONCE", 10_000)
    monkeypatch.setattr(RoundMachine, "next_at", 0.5)
    monkeypatch.setattr(RoundMachine, "tick", lambda self, now: [])
    with pytest.raises(Violation, match="no end of it"):
        simulate(1, ranks=3, faults=(Crash(2, 1, silent=True),))


def test_a_rank_that_waits_beyond_its_deadline_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    late = property(lambda self: inf if self._round is None else self._round.until + 60)
    monkeypatch.setattr(RoundMachine, "next_at", late)
    with pytest.raises(Violation, match=r"a round \(assign\) of 30 s ended after 9\d"):
        simulate(1, ranks=3, faults=(Crash(2, 1, silent=True),))


def test_an_answer_of_another_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = RoundMachine.receive_outcome

    def receive_any(self: RoundMachine, outcome: Outcome, now: float) -> list[Effect]:
        held = self._round
        if held is not None:
            heading = held.heading
            outcome = replace(outcome, number=heading.number, name=heading.name, subject=heading.subject)
        return receive(self, outcome, now)

    monkeypatch.setattr(RoundMachine, "receive_outcome", receive_any)
    with pytest.raises(Violation):
        simulate(1, ranks=5, fan_out=2, saves=9, faults=(Weather(doubled=0.8, slow_s=0.05),))


def test_bytes_that_change_on_their_way_to_the_disk_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over = SimStorage.take_over

    def flip(self: SimStorage, writer: SimWriter, data: bytes) -> None:
        take_over(self, writer, bytes([data[0] ^ 1]) + data[1:])

    monkeypatch.setattr(SimStorage, "take_over", flip)
    with pytest.raises(Violation, match="has other bytes than it says"):
        simulate(1, ranks=3)


def test_a_manifest_without_a_file_that_it_lists_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over = SimStorage.take_over

    def lose(self: SimStorage, writer: SimWriter, data: bytes) -> None:
        if "index" not in writer.path:
            take_over(self, writer, data)

    monkeypatch.setattr(SimStorage, "take_over", lose)
    with pytest.raises(Violation, match="is not there in full"):
        simulate(1, ranks=3)


def test_values_of_another_save_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_own", lambda base, rank: np.zeros(job.ROW) + rank)
    monkeypatch.setattr(oracle, "tensors", lambda *about: {**job.tensors(*about), "own.1": np.ones(4) / 3})
    with pytest.raises(Violation, match=r"wrong values of own\.1"):
        simulate(1, ranks=3)


def test_a_save_that_is_said_to_be_committed_and_is_not_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("put", "commit"):
        monkeypatch.setattr(SimStorage, name, lambda self, path, data, **more: True)
    with pytest.raises(Violation):
        simulate(1, ranks=3)


def test_a_checkpoint_that_is_taken_away_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    start = job.Worker.work

    def delete_first(self: job.Worker) -> None:
        if self.group.run:
            self.storage.delete("checkpoint/manifest.json")
        start(self)

    monkeypatch.setattr(job.Worker, "work", delete_first)
    with pytest.raises(Violation, match="the only checkpoint of checkpoint is gone"):
        simulate(1, ranks=1)


def test_files_that_are_left_over_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimStorage, "delete", lambda self, path: None)
    with pytest.raises(Violation, match="files are left over in checkpoint"):
        simulate(1, ranks=2, saves=2)


# The pieces.


def schedule_and_process(plan: dict[int, list[Callable[[Process], None]]]) -> tuple[Schedule, Process]:
    schedule = Schedule()
    return schedule, Process(schedule, 0, 0, plan)


def test_a_dead_process_executes_nothing_more() -> None:
    schedule, process = schedule_and_process({2: [lambda p: p.die(silent=False)]})
    done = []

    def work() -> None:
        try:
            for number in range(3):
                process.here(f"{number}")
                done.append(number)
                process.sleep(1.0)
        finally:
            done.append(-1)
            process.here("cleanup")
            done.append(-2)

    process.start(work)
    schedule.run(until_s=100)
    assert done == [0]
    assert not process.ended
    process.unwind()
    assert done == [0, -1]  # only where it touches nothing that others see


def test_a_request_of_a_process_that_dies_meanwhile_may_still_be_done() -> None:
    done = set()
    for seed in range(20):
        schedule, process = schedule_and_process({})
        disk = Disk(Random(seed), 0.001)
        process.start(partial(SimStorage(disk, process).put, "file", b"1", if_absent=False))
        schedule.at(1e-9, lambda process=process: process.die(silent=False))  # type: ignore[misc]
        schedule.run(until_s=100)
        assert not process.ended
        process.unwind()
        done.add("file" in disk.files)
    assert done == {True, False}


def test_a_missing_greenlet_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['greenlet'] = None\n"
        "from reknit.errors import MissingExtraError\n"
        "try:\n    import tests.simulation.simulator\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install greenlet" in reported
