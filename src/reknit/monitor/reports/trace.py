"""A trace of all ranks in the format of Chrome's tracing, which Perfetto reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.reports.events import Event, RecordedOperation


def trace(operations: Sequence[RecordedOperation]) -> dict[str, Any]:
    """Return a trace: a process for each rank, in it a row for each phase of the trainer and of its agent."""
    events = [event for operation in operations for event in operation.events]
    begin = min(event.started for event in events)
    rows = {lane: number for number, lane in enumerate(dict.fromkeys(event.lane for event in events))}
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*_names(events, rows), *(_slice(event, rows, begin) for event in events)],
    }


def _names(events: Sequence[Event], rows: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the names of ranks and rows."""
    for event in {event.rank: event for event in events}.values():
        place = "".join(f", {axis} {number}" for axis, number in event.coordinate.items())
        name = f"rank {event.rank}{place}" + (f" on {event.host}" if event.host else "")
        yield {"ph": "M", "pid": event.rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": event.rank, "name": "process_sort_index", "args": {"sort_index": event.rank}}
    for rank, lane in dict.fromkeys((event.rank, event.lane) for event in events):
        yield {"ph": "M", "pid": rank, "tid": rows[lane], "name": "thread_name", "args": {"name": lane}}


def _slice(event: Event, rows: dict[str, int], begin: float) -> dict[str, Any]:
    facts = {"path": event.path, "step": event.step, "bytes": event.nbytes, "outcome": event.outcome}
    return {
        "ph": "X",
        "pid": event.rank,
        "tid": rows[event.lane],
        "name": event.phase,
        "cat": event.action,
        "ts": round((event.started - begin) * 1e6, 1),
        "dur": round(event.elapsed_s * 1e6, 1),
        "args": facts,
    }
