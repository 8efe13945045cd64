"""A report as one HTML page, which needs no network."""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.monitor.reports.phase_summary import summaries
from reknit.monitor.reports.report_text import RUN_HEADS, headline, remarks, run_rows
from reknit.monitor.reports.storage_figures import (
    STORAGE_HEADS,
    error_texts,
    histogram,
    storage_rows,
    time_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.monitor.records import PhaseRecord
    from reknit.monitor.reports.measured_saves import CostTable
    from reknit.monitor.reports.recorded_operations import RecordedOperation

_MOST_LISTED = 200
_MOST_OPERATIONS = 2_000
"""The last operations that the page shows: a run may have phases of its own at each step."""
_MOST_AXES = 8
_MOST_LANES = 1_000
_OTHER = "other phases"
_DATA = "/*DATA*/null"
"""The text in the page that the data replace."""


def page(
    operations: Sequence[RecordedOperation], costs: CostTable | None = None, run: Sequence[PhaseRecord] = ()
) -> str:
    """Return the page: heat map over the parallel grid, stragglers, timeline, storage, failures, the run."""
    # Names come from events, and must not end the script.
    data = json.dumps(content(operations, costs, run), separators=(",", ":")).replace("<", "\\u003c")
    return live_page().replace(_DATA, data)


def live_page() -> str:
    """Return the page without data, which it requests from its server whenever they change."""
    return resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


def content(
    operations: Sequence[RecordedOperation], costs: CostTable | None = None, run: Sequence[PhaseRecord] = ()
) -> dict[str, Any]:
    """Return the content of the page, as plain data, with a bounded number of operations, axes and phases."""
    operations = operations[-_MOST_OPERATIONS:]
    events = [event for operation in operations for event in operation.events]
    lanes = list(dict.fromkeys(event.lane for event in sorted(events, key=lambda event: event.started)))
    if len(lanes) > _MOST_LANES:
        lanes = [*lanes[: _MOST_LANES - 1], _OTHER]
    coordinates = {event.rank: event.coordinate for event in events if event.coordinate}
    axes = list(dict.fromkeys(axis for coordinate in coordinates.values() for axis in coordinate))[
        :_MOST_AXES
    ]
    hosts = {event.rank: event.host for event in events}
    ranks = sorted(hosts)
    row_of = {rank: row for row, rank in enumerate(ranks)}
    return {
        "lanes": lanes,
        "storage_heads": STORAGE_HEADS,
        "run_heads": RUN_HEADS,
        "run": run_rows(run[-_MOST_LISTED:]),
        "costs": None if costs is None else costs._asdict(),
        "axes": axes,
        "ranks": ranks,
        "hosts": [hosts[rank] for rank in ranks],
        "coordinates": [[coordinates.get(rank, {}).get(axis, -1) for axis in axes] for rank in ranks],
        "operations": [
            {
                "name": str(operation),
                "action": operation.action,
                "step": operation.step,
                "headline": headline(operation),
                "remarks": list(remarks(operation)),
                "seconds": operation.elapsed_s,
                "nbytes": operation.nbytes,
                "phases": [
                    each._asdict() | {"stragglers": []} for each in summaries(operation)[:_MOST_LANES]
                ],
                "storage": _storage(operation),
                **_columns(operation.events, operation.started, lanes, row_of),
            }
            for operation in operations
        ],
    }


def _storage(operation: RecordedOperation) -> dict[str, Any]:
    """Return the operations of stores: a table, errors, and a histogram for each row."""
    seconds = [figures.seconds for figures in operation.storage.values()]
    return {
        "busiest": seconds.index(max(seconds)) if seconds else -1,
        "rows": storage_rows(operation.storage, operation.elapsed_s),
        "errors": list(error_texts(operation.storage)),
        "bars": [
            [(time_text(bar.up_to_s), bar.num) for bar in histogram(figures)]
            for figures in operation.storage.values()
        ],
    }


def _columns(
    events: Sequence[PhaseRecord], begin: float, lanes: Sequence[str], row_of: dict[int, int]
) -> dict[str, str]:
    """Return the events of an operation as columns: lanes, ranks, starts and lengths in seconds."""
    number = {lane: n for n, lane in enumerate(lanes)}
    columns = {
        "lane": np.array([number.get(event.lane, len(lanes) - 1) for event in events], "<u2"),
        "rank": np.array([row_of[event.rank] for event in events], "<u4"),
        "start": np.array([event.started - begin for event in events], "<f4"),
        "busy": np.array([event.busy_s for event in events], "<f4"),
        "length": np.array([event.elapsed_s for event in events], "<f4"),
        "failed": np.array([event.outcome != "ok" for event in events], "u1"),
    }
    return {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}
