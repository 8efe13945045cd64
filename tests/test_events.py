"""The records that saves and loads send to sinks, and sinks that fail or block without effect on them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

import reknit
from reknit.events.phase import CLOCK
from reknit.events.records import PhaseRecord, Record, StorageRecord
from reknit.events.to_file import JsonLines
from reknit.monitor.operations import read_operations
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LIMIT_S = 60.0
STATE = {"model": {"w": np.arange(1 << 20, dtype=np.float32)}}


class Collected:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def take(self, records: Sequence[Record]) -> None:
        self.records += records

    def phases(self) -> list[tuple[str, str, str]]:
        """Return phase, process and outcome of each record."""
        assert reknit.sinks.flush(LIMIT_S)
        return [(r.phase, r.process, r.outcome) for r in self.records if isinstance(r, PhaseRecord)]

    def operations(self) -> list[StorageRecord]:
        assert reknit.sinks.flush(LIMIT_S)
        return [record for record in self.records if isinstance(record, StorageRecord)]


def test_events_in_a_run_folder_that_is_not_there_yet_make_it(tmp_path: Path) -> None:
    for named in ("run", "run/", "run/events.jsonl", "run/events", "run/events/"):
        folder = tmp_path / f"for {named}".replace("/", " ")
        folder.mkdir()
        for step in (1, 2):  # the second run finds the folder
            options = reknit.SaveOptions(events=f"{folder}/{named}")
            reknit.save(folder / "run" / f"step_{step}", STATE, step=step, options=options)
        assert reknit.sinks.flush(LIMIT_S), named
        lines = [line for path in (folder / "run").rglob("*.jsonl") for line in path.read_text().splitlines()]
        assert {json.loads(line)["step"] for line in lines} == {1, 2}, named
        assert reknit.latest(folder / "run") == f"{folder}/run/step_2", named


def test_a_sink_hears_of_phases_and_operations_and_of_the_end(tmp_path: Path) -> None:
    collected, called = Collected(), list[Record]()
    events: list[Any] = [collected, called.append, tmp_path / "events/", f"{tmp_path}/events.jsonl"]
    reknit.save(tmp_path / "x", STATE, step=3, options=reknit.SaveOptions(events=events))
    assert collected.phases()[-1] == ("save", "trainer", "ok")
    assert ("write", "trainer", "ok") in collected.phases()
    written = [record for record in collected.operations() if record.operation == "write"]
    assert sum(record.nbytes for record in written) > 4 << 20
    assert {(record.store, record.step, record.outcome) for record in written} == {("file", 3, "ok")}
    assert called == collected.records
    reknit.load(tmp_path / "x", dict(STATE), options=reknit.LoadOptions(events=events))
    assert collected.phases()[-1] == ("load", "trainer", "ok")
    read = [record for record in collected.operations() if record.operation == "read"]
    assert sum(record.nbytes for record in read) >= 4 << 20


def test_what_to_do_about_a_failure_is_told_with_it(tmp_path: Path) -> None:
    for wait in (True, False):
        collected, taken = Collected(), tmp_path / f"{wait}"
        taken.mkdir()
        (taken / "manifest.json").write_text("{}")
        options = reknit.SaveOptions(events=collected)
        with pytest.raises(reknit.ReknitError) as caught:
            reknit.save(taken, STATE, wait=wait, options=options).result(LIMIT_S)
        collected.phases()
        failed = [r for r in collected.records if isinstance(r, PhaseRecord) and r.outcome != "ok"]
        assert (failed[-1].phase, failed[-1].outcome) == ("save", type(caught.value).__name__), wait
        assert {record.detail for record in failed} == {caught.value.remedy}, wait
        assert caught.value.remedy, wait


@pytest.mark.parametrize("place", ["{}/x", "process://events-of-agents/x"])
def test_a_sink_of_the_trainer_hears_what_its_agent_does_and_files_hear_it_once(
    place: str, tmp_path: Path
) -> None:
    collected = Collected()
    folder = f"{tmp_path}/events/"
    options = reknit.SaveOptions(events=(collected, folder))
    reknit.save(place.format(tmp_path), STATE, step=3, wait=False, options=options).result(LIMIT_S)
    reported = collected.phases()
    assert {("write", "agent", "ok"), ("commit", "agent", "ok"), ("stage", "trainer", "ok")} <= set(reported)
    assert reported[-1] == ("save", "trainer", "ok")
    by_agent = [r for r in collected.operations() if r.process == "agent" and r.operation == "write"]
    assert sum(record.nbytes for record in by_agent) > 4 << 20
    (operation,), num_invalid, num_dropped, _ = read_operations([folder])
    assert (num_invalid, num_dropped) == (0, 0)
    assert sorted(reported) == sorted((e.phase, e.process, e.outcome) for e in operation.events)
    assert operation.storage["write", by_agent[0].store].count == len(by_agent)
    assert reknit.close(LIMIT_S)


def test_a_save_that_fails_before_its_agent_hears_of_it_says_so_in_the_end(tmp_path: Path) -> None:
    class Slow:
        def state_dict(self) -> dict[str, Any]:
            time.sleep(0.2)
            raise ValueError("no state yet")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Load nothing."""

    for wait in (True, False):
        collected = Collected()
        options = reknit.SaveOptions(events=collected)
        with pytest.raises(Exception, match="no state yet") as caught:
            reknit.save(tmp_path / f"{wait}", {"slow": Slow()}, wait=wait, options=options).result(LIMIT_S)
        assert collected.phases()[-1] == ("save", "trainer", type(caught.value).__name__), wait
        last = collected.records[-1]
        assert isinstance(last, PhaseRecord), wait
        assert last.seconds > 0.2, wait
        assert reknit.close(LIMIT_S), wait


class SkewedClock:
    """A clock that is ahead of that of this machine."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        return time.time() + self._ahead_s

    def monotonic(self) -> float:
        return time.monotonic()


def test_reports_put_the_clocks_of_hosts_in_step_with_that_of_rank_0(tmp_path: Path) -> None:
    far_s = 1e6

    def rank(group: Any) -> None:
        CLOCK.set(SkewedClock(-far_s * group.rank))
        lines = JsonLines(tmp_path / f"{group.rank}.jsonl")

        def send(record: Any) -> None:
            lines.take([replace(record, host=f"host{group.rank}")])

        options = reknit.SaveOptions(events=send)
        reknit.save(tmp_path / "x", {"r": reknit.PerRank(group.rank)}, group=group, options=options)
        assert reknit.sinks.flush(LIMIT_S)

    run_ranks(3, rank)
    (operation,), *_ = read_operations([str(tmp_path)])
    assert operation.num_ranks == 3
    # Threads of the save beside the rank's own have the clock of the machine here.
    starts = [event.started for event in operation.events if event.phase in ("collect", "assign", "commit")]
    assert len(starts) == 9
    assert max(starts) - min(starts) < far_s / 2
    assert abs(max(starts) - time.time()) < far_s / 2, "it is rank 0's clock"
    reported = [json.loads(line) for line in (tmp_path / "2.jsonl").read_text().splitlines()]
    behind = {event["phase"]: event["behind_s"] for event in reported if "phase" in event}
    assert behind["collect"] is None, "before the first round the clock is not compared"
    assert abs(behind["save"] - 2 * far_s) < far_s / 2


def test_flush_takes_seconds_only() -> None:
    for wrong in (-1, None, "1", float("nan")):
        with pytest.raises(reknit.UsageError, match="timeout_s"):
            reknit.sinks.flush(wrong)  # type: ignore[arg-type]


def test_nothing_is_recorded_of_stores_where_nobody_listens(tmp_path: Path) -> None:
    report = reknit.save(tmp_path / "x", STATE).result()
    assert all(isinstance(record, PhaseRecord) for record in report.phases)
    assert "save" not in [record.phase for record in report.phases]


def test_what_is_no_sink_is_refused(tmp_path: Path) -> None:
    cases: list[Any] = [3, "", [None], [str], {"a": 1}]
    for events in cases:
        with pytest.raises(reknit.UsageError, match="events is a path"):
            reknit.SaveOptions(events=events)
        with pytest.raises(reknit.UsageError, match="events is a path"):
            reknit.phase("x", events=events)
