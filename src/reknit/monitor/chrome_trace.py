"""A trace of a run in the format of Chrome's tracing, which Perfetto reads."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any

from reknit.monitor.operations import MARKS
from reknit.plugins.events import spelled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.operations import RecordedOperation
    from reknit.plugins.events import PhaseRecord

logger = logging.getLogger("reknit")

_MOST_SLICES = 100_000
_ROW = 0
"""The row of the run, with its actions beside saves and loads, and its failures."""


def trace(operations: Sequence[RecordedOperation], run: Sequence[PhaseRecord] = ()) -> dict[str, Any]:
    """Return a trace with a process for each rank, and in it a row for each phase of trainer and agent.

    One more process is the run: its saves and loads by step, the failures, and its other actions.  The trace
    has the last 100,000 phases: viewers do not open much larger ones.
    """
    operations, events = _latest(operations)
    marks = [event for event in run if event.action in MARKS]
    begin = min(event.started for event in (*events, *marks))
    rows = {lane: number for number, lane in enumerate(dict.fromkeys(event.lane for event in events))}
    of_run = max((event.rank for event in events), default=0) + 1
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            *_names(events, rows),
            *_of_run(operations, marks, of_run, begin),
            *(_slice(event, rows, begin) for event in events),
            *(
                _instant(event, event.outcome, event.rank, rows[event.lane], begin)
                for operation in operations
                for event in operation.failures
                if event.lane in rows
            ),
        ],
    }


def _latest(operations: Sequence[RecordedOperation]) -> tuple[Sequence[RecordedOperation], list[PhaseRecord]]:
    """Return the last operations that have not too many phases, and these phases."""
    first, left = len(operations), _MOST_SLICES
    while first and (left == _MOST_SLICES or len(operations[first - 1].events) <= left):
        first -= 1
        left = max(left - len(operations[first].events), 0)
    shown = operations[first:]
    if first:
        logger.warning("the trace has the last %d of %d saves and loads", len(shown), len(operations))
    return shown, list(islice((event for each in shown for event in each.events), _MOST_SLICES))


def _names(events: Sequence[PhaseRecord], rows: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the names of ranks and rows."""
    for event in {event.rank: event for event in events}.values():
        place = "".join(f", {axis} {number}" for axis, number in event.coordinate.items())
        name = f"rank {event.rank}{place}" + (f" on {event.host}" if event.host else "")
        yield _name("process", event.rank, name)
        yield {"ph": "M", "pid": event.rank, "name": "process_sort_index", "args": {"sort_index": event.rank}}
    for rank, lane in dict.fromkeys((event.rank, event.lane) for event in events):
        yield _name("thread", rank, lane, rows[lane])


def _of_run(
    operations: Sequence[RecordedOperation], marks: Sequence[PhaseRecord], pid: int, begin: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of the process of the run, which is shown above the ranks."""
    yield _name("process", pid, "run")
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": -1}}
    yield _name("thread", pid, "events", _ROW)
    for number, operation in enumerate(operations):
        step = "" if operation.step is None else f" step {operation.step}"
        # A save may begin before the last save has ended, so each has a row of its own.
        common = {"pid": pid, "tid": _ROW, "id": number, "cat": operation.action}
        common |= {"name": operation.action + step}
        facts = {"path": operation.path, "ranks": operation.num_ranks, "bytes": operation.nbytes}
        yield common | {"ph": "b", "ts": _us(operation.started - begin), "args": facts}
        yield common | {"ph": "e", "ts": _us(operation.started + operation.elapsed_s - begin)}
        alike: dict[str, list[PhaseRecord]] = {}
        for event in operation.failures:
            alike.setdefault(event.outcome, []).append(event)
        for outcome, failed in alike.items():
            text = f"{operation.action}{step} failed: {outcome} on {spelled(event.rank for event in failed)}"
            yield _instant(failed[0], text, pid, _ROW, begin)
    for event in marks:
        yield _instant(event, event.action.replace("_", " "), pid, _ROW, begin)


def _name(kind: str, pid: int, name: str, row: int | None = None) -> dict[str, Any]:
    place = {} if row is None else {"tid": row}
    return {"ph": "M", "pid": pid, "name": f"{kind}_name", "args": {"name": name}} | place


def _slice(event: PhaseRecord, rows: dict[str, int], begin: float) -> dict[str, Any]:
    return _common(event, event.phase, event.rank, rows[event.lane]) | {
        "ph": "X",
        "ts": _us(event.started - begin),
        "dur": _us(event.elapsed_s),
    }


def _instant(event: PhaseRecord, name: str, pid: int, row: int, begin: float) -> dict[str, Any]:
    """Return a mark at the end of a phase."""
    return _common(event, name, pid, row) | {"ph": "i", "s": "t", "ts": _us(event.end - begin)}


def _common(event: PhaseRecord, name: str, pid: int, row: int) -> dict[str, Any]:
    facts = {"path": event.path, "step": event.step, "bytes": event.nbytes, "outcome": event.outcome}
    if event.detail:
        facts["detail"] = event.detail
    return {"pid": pid, "tid": row, "name": name, "cat": event.action, "args": facts}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
