"""A report as text for a terminal, with the seconds of each phase over all ranks."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import islice
from math import ceil
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from reknit.plugins.events import amount, spelled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reknit.monitor.operations import RecordedOperation
    from reknit.plugins.events import PhaseRecord


SLOW_RATIO = 1.5
"""A rank is a straggler in a phase if it takes so many times as long as the median rank, ..."""

SLOW_S = 0.05
"""... and longer by so many seconds, ..."""

SLOW_SHARE = 0.02
"""... and by this share of the whole save or load; a smaller difference does not matter."""


class PhaseSummary(NamedTuple):
    """A phase over all ranks: seconds, bytes, and the stragglers as (rank, seconds), the slowest first."""

    name: str
    num_ranks: int
    minimum_s: float
    median_s: float
    p99_s: float
    maximum_s: float
    nbytes: int
    stragglers: tuple[tuple[int, float], ...]


def seconds_by_rank(operation: RecordedOperation) -> dict[str, dict[int, float]]:
    """Return the busy seconds of each rank in each phase, summed if a phase occurs twice."""
    found: dict[str, dict[int, float]] = {}
    for event in operation.events:
        ranks = found.setdefault(event.lane, {})
        ranks[event.rank] = ranks.get(event.rank, 0.0) + event.busy_s
    return found


def summaries(operation: RecordedOperation) -> list[PhaseSummary]:
    """Return the summary of each phase, in the order of their first start."""
    nbytes, begun = dict[str, int](), dict[str, float]()
    for event in operation.events:
        nbytes[event.lane] = nbytes.get(event.lane, 0) + event.nbytes
        begun[event.lane] = min(event.started, begun.get(event.lane, event.started))
    seconds = seconds_by_rank(operation)
    least_excess_s = max(SLOW_S, SLOW_SHARE * operation.elapsed_s)
    ordered = sorted(nbytes.items(), key=lambda entry: begun[entry[0]])
    return [_summary(name, seconds[name], total, least_excess_s) for name, total in ordered]


def _summary(name: str, ranks: dict[int, float], nbytes: int, least_excess_s: float) -> PhaseSummary:
    middle = median(ranks.values())
    slow = [(r, s) for r, s in ranks.items() if s > max(SLOW_RATIO * middle, middle + least_excess_s)]
    slow.sort(key=lambda entry: -entry[1])
    return PhaseSummary(
        name=name,
        num_ranks=len(ranks),
        minimum_s=min(ranks.values()),
        median_s=middle,
        p99_s=_share_below(sorted(ranks.values()), 0.99),
        maximum_s=max(ranks.values()),
        nbytes=nbytes,
        stragglers=tuple(slow),
    )


def _share_below(ordered: list[float], share: float) -> float:
    """Return the value that this share of the ranks does not exceed."""
    return ordered[min(ceil(share * len(ordered)), len(ordered)) - 1]


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
