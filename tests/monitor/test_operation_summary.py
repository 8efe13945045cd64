"""The summary of a save or load: the critical path, the last rank, the reason, and advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec.structs import replace

from reknit.monitor.figures import OTHER, Limit, bytes_per_s, critical_path, event_columns, highest
from reknit.monitor.summary import figures_of, letters_of, sparkline, summary, summary_lines
from tests.monitor.records import of_rank as record
from tests.monitor.records import operation as storage_record
from tests.monitor.records import recorded

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reknit.events.records import PhaseRecord
    from reknit.monitor.operations import RecordedOperation

GIB = 1 << 30


def of_ranks(
    slow: dict[int, float] | None = None, nbytes: dict[int, int] | None = None, phase: str = "write"
) -> RecordedOperation:
    """Return a save by sixteen ranks on two hosts: a second of a phase, and for `slow` ranks more."""
    events = []
    for rank in range(16):
        seconds = (slow or {}).get(rank, 1.0)
        events += [record("collect", rank, 0.0, 0.1), record("commit", rank, 0.1, 5.0)]
        events += [record(phase, rank, 0.1, seconds, nbytes=(nbytes or {}).get(rank, GIB))]
    return recorded(*events)


def path_of(events: Iterable[PhaseRecord]) -> list[tuple[int, str, float, float]]:
    columns = event_columns(events)
    return [
        (
            columns.ranks[part.rank] if part.rank >= 0 else -1,
            columns.lanes[part.lane] if part.lane >= 0 else "between",
            round(part.start, 3),
            round(part.stop, 3),
        )
        for part in critical_path(columns)
    ]


def advice_of(operation: RecordedOperation, limit: Limit | None = None) -> list[str]:
    return summary(figures_of(operation), limit).advice


def test_the_critical_path_goes_from_rank_to_rank_where_one_waits_for_another() -> None:
    events = [
        record("collect", 0, 0.0, 0.2),
        record("collect", 1, 0.0, 1.0),
        record("assign", 0, 0.0, 1.0),
        record("assign", 1, 0.0, 1.0),
        record("write", 0, 1.0, 3.0),
        record("write", 1, 1.0, 0.5),
        record("commit", 0, 1.0, 4.0),
        record("commit", 1, 1.0, 4.0),
    ]
    assert path_of(events) == [(1, "collect", 0.0, 1.0), (0, "write", 1.0, 4.0), (-1, "between", 4.0, 5.0)]


def test_the_path_stays_on_its_rank_while_that_rank_works() -> None:
    events = [record("stage", rank, 0.0, 1.0 + 0.001 * rank) for rank in range(4)]
    events += [record("write", 1, 1.0, 2.0), record("write", 3, 1.003, 1.0)]
    assert [part[:2] for part in path_of(events)] == [(1, "stage"), (1, "write")]


def test_a_path_without_work_or_time_has_no_rank() -> None:
    for event in (record("commit", 0, 0, 1), record("write", 0, 0, 0)):
        assert all(rank == -1 for rank, *_ in path_of([event]))


def test_of_phases_side_by_side_the_busiest_is_on_the_path() -> None:
    digest = replace(record("digest", 0, 0.0, 4.001), seconds=0.01)
    assert path_of([digest, record("write", 0, 0.0, 4.0)]) == [(0, "write", 0.0, 4.001)]


def test_a_path_of_very_many_phases_ends() -> None:
    events = [record("write", n % 7, 0.01 * n, 0.01) for n in range(3_000)]
    assert len(path_of(events)) <= 64


def test_phases_beyond_the_most_are_one_lane_of_others() -> None:
    events = [record(f"own {n}", 0, n, 1 + n) for n in range(30)]
    columns = event_columns(events, most_lanes=4)
    assert len(columns.lanes) == 4
    assert OTHER in columns.lanes
    assert "own 29" in columns.lanes
    assert len(columns.lane) == 30


def test_the_last_rank_and_the_reason_are_named() -> None:
    found = summary(figures_of(of_ranks({13: 4.0})), None)
    assert found.ok
    assert found.last == "rank 13 (dp 3, tp 1) on host1 finished its work last, 3 s after the median rank"
    assert found.reason.startswith("write of rank 13 takes 4 s for 1.0 GiB, ")
    assert found.reason.endswith("of the critical path; the median rank needs 1 s")
    assert ("ranks", "16 on 2 hosts") in found.facts


def test_the_advice_suits_what_is_slow() -> None:
    host_1 = {rank: 4.0 + 0.01 * rank for rank in range(8, 16)} | {0: 0.5, 1: 0.5}
    more = "Divide the state of rank 14 on host1: it moves 4.0 times the bytes"
    for slow, words in [
        (of_ranks({14: 4.0}, {14: 4 * GIB}), more),
        (of_ranks({5: 4.0}), "Check the disk, mount or path to the store of rank 5 on host0"),
        (of_ranks(host_1), "Check disk, mount and network of host1: all of its ranks are slow in write"),
        (of_ranks({5: 4.0}, phase="stage"), "Check the device of rank 5"),
        (of_ranks({5: 4.0}, phase="digest"), "Look for other work on the cores"),
    ]:
        assert advice_of(slow)[0].startswith(words)


def test_ranks_that_are_all_alike_have_a_storage_at_its_limit_or_below() -> None:
    at_limit = Limit(3.5 * GIB, given=True)
    assert "the storage is the limit" in advice_of(of_ranks({rank: 4.0 for rank in range(16)}), at_limit)[0]
    far_below = Limit(100 * GIB, given=True)
    assert "3% of the limit" in advice_of(of_ranks({rank: 4.0 for rank in range(16)}), far_below)[0]


def test_time_between_phases_is_the_reason_if_no_rank_works() -> None:
    events = [
        record(name, rank, 0.0, s) for rank in range(2) for name, s in (("write", 0.1), ("commit", 3.0))
    ]
    found = summary(figures_of(recorded(*events)), None)
    assert found.reason == "97% of the time passes between phases, without work on any rank"
    assert found.advice[0].startswith("Most of the time passes between the phases")


def test_a_failure_comes_first_and_an_overloaded_store_last() -> None:
    repeated = [storage_record("write", retries=1)] * 20
    failed = record("write", 0, 0, 1, outcome="StorageFullError", detail="make room")
    said = advice_of(recorded(failed, *repeated))
    assert said[0] == "Mend the failure first: make room."
    assert said[-1].startswith("s3://bucket makes clients repeat write: 20 repetitions of 20 operations")


def test_throughput_adds_up_to_the_bytes_and_is_where_they_moved() -> None:
    events = [
        record("write", 0, 0.0, 1.0, nbytes=100),
        record("write", 1, 0.0, 4.0, nbytes=400),
        record("stage", 1, 0.0, 4.0, nbytes=999),
    ]
    found = bytes_per_s(event_columns(events), bins=4)
    assert found == pytest.approx([200, 100, 100, 100])
    at_once = bytes_per_s(event_columns([record("read", 0, 2, 0, nbytes=7), record("plan", 0, 0, 4)]), 4)
    assert at_once.sum() == pytest.approx(7)
    assert bytes_per_s(event_columns([record("plan", 0, 0, 1)])).sum() == 0
    assert highest([found, np.zeros(0)]) == pytest.approx(400 / 3)


def test_a_limit_that_nobody_gave_is_the_highest_throughput() -> None:
    figures = figures_of(of_ranks())
    shares = [name for name, _ in summary(figures, Limit(GIB, given=False)).facts if "share" in name]
    assert shares == ["share of the highest throughput in these events"]


def test_sparklines_show_the_highest_of_each_part_in_letters_that_the_terminal_has() -> None:
    assert sparkline(np.array([0.0, 4.0, 8.0])) == "▁▅█"
    assert sparkline(np.zeros(3)) == "▁▁▁"
    assert sparkline(np.zeros(0)) == ""
    long = sparkline(np.arange(600) == 300, width=60)
    assert (len(long), long[30]) == (60, "█")
    assert letters_of("ascii") == letters_of(None) == "_.-=+*%#"
    lines = list(summary_lines(figures_of(of_ranks({5: 4.0})), None, encoding="ascii"))
    assert "\n".join(lines).isascii()
    assert [line.split(":")[0].strip() for line in lines[2:5]] == ["last", "why", "do"]
