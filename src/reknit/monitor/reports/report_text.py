"""A report as text for a terminal."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING

from reknit.monitor.progress_text import amount
from reknit.monitor.reports.phase_summary import summaries
from reknit.types.rank_text import spelled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reknit.monitor.records import PhaseRecord
    from reknit.monitor.reports.phase_summary import PhaseSummary
    from reknit.monitor.reports.recorded_operations import RecordedOperation

_MOST_NAMED = 5
_MOST_AXES = 8
_MOST_LETTERS = 40
_LATEST = 1e11  # the time of a wrong clock may not be a date

RUN_HEADS = ("when (UTC)", "what", "step", "path", "outcome")
"""The heads of the rows of `run_rows`."""

PHASE_HEADS = ("phase", "ranks", "minimum s", "median s", "p99 s", "maximum s", "bytes")
"""The heads of the rows of `phase_rows`."""


def place_text(coordinate: Mapping[str, int]) -> str:
    """Return a coordinate of the parallel grid, such as ``(pp 0, tp 1)``, or an empty text without one."""
    shown = islice(coordinate.items(), _MOST_AXES)
    inside = ", ".join(f"{axis[:_MOST_LETTERS]} {number}" for axis, number in shown)
    more = f" and {len(coordinate) - _MOST_AXES} more axes" if len(coordinate) > _MOST_AXES else ""
    return f" ({inside}{more})" if inside else ""


def speed_text(nbytes: float, seconds: float) -> str:
    """Return a throughput, such as ``1.2 GiB/s``."""
    return f"{amount(nbytes / seconds)}/s" if seconds > 0 else "-"


def headline(operation: RecordedOperation) -> str:
    """Return one line about an operation."""
    size, seconds = operation.nbytes, operation.elapsed_s
    return (
        f"{operation}: {operation.num_ranks} ranks, {amount(size)} in {seconds:.3g} s, "
        f"{speed_text(size, seconds)}" + (", FAILED" if operation.failures else "")
    )


def phase_rows(operation: RecordedOperation) -> list[tuple[str, ...]]:
    """Return a row for each phase, with the columns of `PHASE_HEADS`."""
    return [
        (
            each.name,
            str(each.num_ranks),
            f"{each.minimum_s:.3f}",
            f"{each.median_s:.3f}",
            f"{each.p99_s:.3f}",
            f"{each.maximum_s:.3f}",
            amount(each.nbytes) if each.nbytes else "-",
        )
        for each in summaries(operation)
    ]


def run_rows(events: Iterable[PhaseRecord]) -> list[tuple[str, ...]]:
    """Return a row for each action of a run beside its saves and loads."""
    return [
        (
            f"{datetime.fromtimestamp(min(max(event.end, 0.0), _LATEST), timezone.utc):%Y-%m-%d %H:%M:%S}",
            event.action.replace("_", " "),
            "-" if event.step is None else str(event.step),
            event.path,
            (event.detail or "ok") if event.outcome == "ok" else _failed(event),
        )
        for event in events
    ]


def remarks(operation: RecordedOperation) -> Iterator[str]:
    """Yield a line for each problem: failures, and stragglers with their place in the parallel grid."""
    places = {event.rank: place_text(event.coordinate) for event in operation.events if event.coordinate}
    yield from _failures(operation, places)
    slow = [each for each in summaries(operation) if each.stragglers]
    for each in sorted(slow, key=lambda each: each.median_s - each.maximum_s):
        yield _stragglers(each, places)


def _failures(operation: RecordedOperation, places: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for all ranks with the same failure, in the order of the first failures."""
    alike: dict[tuple[str, str, str], list[PhaseRecord]] = {}
    for event in operation.failures:
        alike.setdefault((event.lane, event.outcome, event.detail), []).append(event)
    for (lane, *_), events in alike.items():
        hosts = {event.host for event in events}
        place = places.get(events[0].rank, "") if len(events) == 1 else ""
        where = spelled(event.rank for event in events) + place
        on = f" on {events[0].host}" if len(hosts) == 1 and events[0].host else ""
        yield f"{where}{on} failed in phase {lane}: {_failed(events[0])}"


def _failed(event: PhaseRecord) -> str:
    return f"{event.outcome} -> {event.detail}" if event.detail else event.outcome


def _stragglers(each: PhaseSummary, places: Mapping[int, str]) -> str:
    named = [f"rank {r}{places.get(r, '')} {s:.3f} s" for r, s in each.stragglers[:_MOST_NAMED]]
    more = len(each.stragglers) - len(named)
    return f"slow in {each.name} (median {each.median_s:.3f} s): {', '.join(named)}" + (
        f" and {more} more" if more else ""
    )
