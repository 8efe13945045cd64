"""A report as one HTML page, which needs no network."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.monitor.figures.throughput import Limit, highest
from reknit.monitor.page.page_file import content_policy, page_file, with_data
from reknit.monitor.reports.operation_detail import detail
from reknit.monitor.reports.operation_summary import blocked_s, figures_of, summary
from reknit.monitor.reports.report_text import PHASE_HEADS, RUN_HEADS, phase_rows, remarks, run_rows
from reknit.monitor.reports.storage_figures import (
    STORAGE_HEADS,
    error_texts,
    histogram,
    storage_rows,
    time_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.monitor.records import PhaseRecord
    from reknit.monitor.reports.measured_saves import CostTable
    from reknit.monitor.reports.operation_summary import OperationFigures
    from reknit.monitor.reports.recorded_operations import RecordedOperation

_MOST_LISTED = 200
_MOST_OPERATIONS = 2_000
"""The last operations that the page shows: a run may have phases of its own at each step."""
_MOST_FIGURED = 300
"""The last operations with a summary and tables."""
_MOST_ROWS = 30
"""Phases, remarks, and kinds of operations of stores, of one operation."""
_MOST_LETTERS = 400
_DETAIL_LETTERS = 3_000_000
"""The pictures of the last operations take at most so many letters; the last one always has a picture."""
_SCRIPTS = ("heat_map.js", "timeline.js", "report.js")


class PageContent(NamedTuple):
    """The data of a page: `shown` without pictures, and the figures of the operations that have some."""

    shown: dict[str, Any]
    figures: list[OperationFigures | None]


def page(
    operations: Sequence[RecordedOperation],
    costs: CostTable | None = None,
    run: Sequence[PhaseRecord] = (),
    limit_bytes_per_s: float | None = None,
) -> str:
    """Return the page: summary, timeline, heat map, throughput, steps, storage and tables."""
    found = content(operations, costs, run, limit_bytes_per_s)
    left = _DETAIL_LETTERS
    for each, figures in zip(reversed(found.shown["operations"]), reversed(found.figures), strict=True):
        if figures is None:
            break
        picture = detail(figures)
        left -= _letters(picture)
        if left < 0 and figures is not found.figures[-1]:
            break
        each["detail"] = picture
    return with_data(live_page(), found.shown)


def live_page() -> str:
    """Return the page without data, which it requests from its server whenever they change."""
    return page_file("report.html", _SCRIPTS)


def live_policy() -> str:
    """Return the content policy of the page, for the header of an answer."""
    return content_policy(_SCRIPTS)


def content(
    operations: Sequence[RecordedOperation],
    costs: CostTable | None = None,
    run: Sequence[PhaseRecord] = (),
    limit_bytes_per_s: float | None = None,
    figured: Callable[[RecordedOperation], OperationFigures] = figures_of,
) -> PageContent:
    """Return the content of the page as plain data, with a bounded number of operations, axes and phases.

    `figured` returns the figures of an operation; it may have kept them.
    """
    operations = operations[-_MOST_OPERATIONS:]
    without = max(len(operations) - _MOST_FIGURED, 0)
    figures = [None if n < without else figured(each) for n, each in enumerate(operations)]
    limit = limit_of(figures, limit_bytes_per_s)
    shown = {
        "phase_heads": PHASE_HEADS,
        "storage_heads": STORAGE_HEADS,
        "run_heads": RUN_HEADS,
        "run": [_clipped(row) for row in run_rows(run[-_MOST_LISTED:])],
        "costs": None if costs is None else costs._asdict(),
        "limit": None if limit is None else limit._asdict() | {"noun": limit.noun},
        "operations": [
            brief(each) | ({} if figured is None else facts(figured, limit))
            for each, figured in zip(operations, figures, strict=True)
        ],
    }
    return PageContent(shown, figures)


def limit_of(
    figures: Sequence[OperationFigures | None], limit_bytes_per_s: float | None = None
) -> Limit | None:
    """Return the given limit, or else the highest throughput of these operations; None without bytes."""
    if limit_bytes_per_s is not None:
        return Limit(limit_bytes_per_s, given=True)
    best = highest(each.throughput for each in figures if each is not None)
    return Limit(best, given=False) if best > 0 else None


def brief(operation: RecordedOperation) -> dict[str, Any]:
    """Return the facts on an operation that the strip of all steps needs."""
    return {
        "name": _clip(str(operation)),
        "action": operation.action,
        "step": operation.step,
        "started": operation.started,
        "seconds": operation.elapsed_s,
        "nbytes": operation.nbytes,
        "blocked": blocked_s(operation) or 0.0,
        "failed": len(operation.failures),
    }


def facts(figures: OperationFigures, limit: Limit | None) -> dict[str, Any]:
    """Return summary and tables of an operation."""
    operation = figures.operation
    found = summary(figures, limit)
    rows = phase_rows(operation)
    longest = sorted(rows, key=lambda row: -float(row[5]))[:_MOST_ROWS]
    return {
        "summary": found._asdict()
        | {"last": _clip(found.last), "reason": _clip(found.reason), "advice": _clipped(found.advice)},
        "remarks": [_clip(line) for line in islice(remarks(operation), _MOST_ROWS)],
        "phases": [_clipped(row) for row in (rows if len(rows) <= _MOST_ROWS else longest)],
        "storage": _storage(operation),
    }


def _storage(operation: RecordedOperation) -> dict[str, Any]:
    """Return the operations of stores: a table, errors, and a histogram for each row."""
    busiest = sorted(operation.storage.items(), key=lambda entry: -entry[1].seconds)[:_MOST_ROWS]
    return {
        "rows": [_clipped(row) for row in storage_rows(dict(busiest), operation.elapsed_s)],
        "errors": [_clip(line) for line in islice(error_texts(operation.storage), _MOST_ROWS)],
        "bars": [[(time_text(bar.up_to_s), bar.num) for bar in histogram(one)] for _, one in busiest],
    }


def _letters(picture: dict[str, Any]) -> int:
    """Return about how many letters a picture takes in a page."""
    bars = sum(len(each) for each in picture["bars"].values() if isinstance(each, str))
    cells = sum(len(each["of"]) for each in picture["cells"])
    places = sum(map(len, (*picture["places"], picture["ranks"], picture["host"])))
    return bars + cells + places + sum(map(len, picture["hosts"])) + 150 * len(picture["path"]) + 4_000


def _clip(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…"


def _clipped(texts: Sequence[str]) -> list[str]:
    return [_clip(text) for text in texts]
