"""What does somebody want to read first about a save or load?  The same for the page and the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.monitor.figures.critical_path import COORDINATION, critical_path
from reknit.monitor.figures.event_columns import event_columns
from reknit.monitor.figures.throughput import Limit, bytes_per_s
from reknit.monitor.progress_text import amount
from reknit.monitor.reports.advice import advice, culprit
from reknit.monitor.reports.measured_saves import stall_s
from reknit.monitor.reports.report_text import place_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.monitor.figures.critical_path import PathPart
    from reknit.monitor.figures.event_columns import EventColumns
    from reknit.monitor.reports.advice import Culprit
    from reknit.monitor.reports.recorded_operations import RecordedOperation

_VERBS = {"save": "written", "load": "read", "read": "read", "promote": "copied", "cool": "copied"}


class OperationFigures(NamedTuple):
    """The columns of an operation, and the results that page and terminal derive from them once."""

    operation: RecordedOperation
    columns: EventColumns
    path: list[PathPart]
    throughput: NDArray[np.float64]
    culprit: Culprit | None


class OperationSummary(NamedTuple):
    """Texts about an operation: outcome, pairs of name and value, the last rank, the reason, and advice."""

    outcome: str
    ok: bool
    facts: list[tuple[str, str]]
    last: str
    reason: str
    advice: list[str]


def figures_of(operation: RecordedOperation) -> OperationFigures:
    """Return the figures of an operation."""
    columns = event_columns(operation.events)
    path = critical_path(columns)
    return OperationFigures(operation, columns, path, bytes_per_s(columns), culprit(columns, path))


def blocked_s(operation: RecordedOperation) -> float | None:
    """Return the seconds for which a save or load kept training from going on, on the slowest rank."""
    if operation.action == "save":
        return max(stall_s(operation), 0.0)
    return operation.elapsed_s if operation.action == "load" else None


def summary(figures: OperationFigures, limit: Limit | None) -> OperationSummary:
    """Return the summary of an operation; `limit` is the highest throughput of its storage, if known."""
    operation, columns = figures.operation, figures.columns
    seconds, nbytes = operation.elapsed_s, operation.nbytes
    failures = operation.failures
    facts = [
        (_VERBS.get(operation.action, "moved"), amount(nbytes)),
        ("time", time_of(seconds)),
    ]
    share = None
    if nbytes and seconds > 0:
        facts.append(("throughput", f"{amount(nbytes / seconds)}/s"))
        if limit is not None and limit.bytes_per_s > 0:
            share = nbytes / seconds / limit.bytes_per_s
            facts.append((f"share of {limit.noun}", f"{share:.0%}"))
    if (blocked := blocked_s(operation)) is not None:
        facts.append(("training blocked", time_of(blocked)))
    hosts = len(columns.hosts)
    facts.append(("ranks", f"{len(columns.ranks):,} on {hosts:,} host{'s' if hosts > 1 else ''}"))
    words = advice(
        operation,
        columns,
        figures.path,
        figures.culprit,
        whole_s=seconds,
        share=share if limit is not None and limit.given else None,
    )
    return OperationSummary(
        _outcome(operation, len(failures)),
        not failures,
        facts,
        _last(columns, figures.path),
        _reason(columns, figures.path, figures.culprit),
        list(words),
    )


def time_of(seconds: float) -> str:
    """Return seconds for a reader, with three digits: ``1.25 s``, ``12 ms``, ``3.1 min``."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


def rank_text(columns: EventColumns, row: int) -> str:
    """Return a rank with its place in the grid and its host."""
    host = columns.hosts[int(columns.host_of[row])]
    return f"rank {columns.ranks[row]}{place_text(columns.places[row])}" + (f" on {host}" if host else "")


def _outcome(operation: RecordedOperation, num_failed: int) -> str:
    if num_failed:
        return f"failed on {num_failed:,} rank{'s' if num_failed > 1 else ''}"
    return {"save": "saved", "load": "loaded", "promote": "promoted", "verify": "verified"}.get(
        operation.action, "done"
    )


def _last(columns: EventColumns, path: Sequence[PathPart]) -> str:
    """Return a sentence about the rank that finished its work last."""
    final = next((part for part in reversed(path) if part.lane >= 0), None)
    if final is None or len(columns.ranks) < 2:
        return ""
    work = columns.is_work[columns.lane]
    ends = np.zeros(len(columns.ranks))
    np.maximum.at(ends, columns.rank[work], columns.stop[work])
    ends = ends[ends > 0]
    behind_s = max(float(ends.max() - np.median(ends)), 0.0) if len(ends) else 0.0
    after = f", {time_of(behind_s)} after the median rank" if behind_s >= 1e-3 else ""
    return f"{rank_text(columns, final.rank)} finished its work last{after}"


def _reason(columns: EventColumns, path: Sequence[PathPart], found: Culprit | None) -> str:
    """Return a sentence about the part of the critical path that took longest."""
    whole = sum(part.seconds for part in path)
    between_s = sum(part.seconds for part in path if part.lane < 0)
    if found is None or whole <= 0:
        return ""
    if between_s > found.part.seconds:
        return f"{between_s / whole:.0%} of the time passes {COORDINATION}, without work on any rank"
    compared = ""
    if len(columns.ranks) > 1:
        compared = f"; the median rank needs {time_of(found.median_s)}"
        if found.median_nbytes and found.nbytes > 1.05 * found.median_nbytes:
            compared += f" for {amount(found.median_nbytes)}"
    of_bytes = f" for {amount(found.nbytes)}" if found.nbytes else ""
    named = f"{columns.lanes[found.part.lane]} of rank {columns.ranks[found.part.rank]}"
    share = found.part.seconds / whole
    return f"{named} takes {time_of(found.seconds)}{of_bytes}, {share:.0%} of the critical path{compared}"
