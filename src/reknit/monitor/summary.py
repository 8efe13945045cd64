"""The summary of a save or load, for the page and the terminal: its cost, and advice."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.monitor.figures import COORDINATION, Limit, bytes_per_s, critical_path, event_columns
from reknit.monitor.text import SLOW_RATIO, SLOW_S, SLOW_SHARE, place_text
from reknit.plugins.events import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.monitor.figures import EventColumns, PathPart
    from reknit.monitor.operations import RecordedOperation


_LARGE_RATIO = 1.3
"""A rank has more bytes than others if it has so many times the bytes of the median rank."""
_MOST_REPEATED = 0.05
"""A store that repeats more than this share of its operations is overloaded."""
_NEAR_LIMIT = 0.8
_COPYING = ("stage", "deliver")


class Culprit(NamedTuple):
    """The part of the critical path that matters most: a rank in a phase, with the figures of the others."""

    part: PathPart
    seconds: float
    """Seconds of the rank in this phase."""
    median_s: float
    nbytes: float
    median_nbytes: float
    host_median_s: float
    """The median of the ranks of its host, itself included."""

    def is_slow(self, whole_s: float) -> bool:
        """Return whether the rank is a straggler in this phase."""
        least_s = max(SLOW_S, SLOW_SHARE * whole_s)
        return self.seconds > max(SLOW_RATIO * self.median_s, self.median_s + least_s)


def culprit(columns: EventColumns, path: Sequence[PathPart]) -> Culprit | None:
    """Return the longest work of the critical path; None if no rank works on it."""
    longest = max((part for part in path if part.lane >= 0), key=lambda part: part.seconds, default=None)
    if longest is None:
        return None
    seconds, moved = columns.seconds()[longest.lane], columns.moved()[longest.lane]
    return Culprit(
        longest,
        float(seconds[longest.rank]),
        _median(seconds),
        float(moved[longest.rank]),
        _median(moved),
        _median(seconds[columns.host_of == columns.host_of[longest.rank]]),
    )


def advice(
    operation: RecordedOperation,
    columns: EventColumns,
    path: Sequence[PathPart],
    found: Culprit | None,
    *,
    whole_s: float,
    share: float | None,
) -> Iterator[str]:
    """Yield sentences of advice, the most important first; `share` is the used share of a given limit."""
    for event in operation.failures[:1]:
        remedy = event.detail or "the error and its remedy are in the log of that rank"
        yield f"Mend the failure first: {remedy}."
    between_s = sum(part.seconds for part in path if part.lane < 0)
    if found is not None and found.is_slow(whole_s):
        yield _about_straggler(columns, found)
    elif found is not None and found.part.seconds >= between_s:
        yield from _about_all(columns, found, share)
    elif between_s > 0.2:
        yield (
            "Most of the time passes between the phases: ranks wait for messages, or for a rank that came "
            "late. Look for a rank whose bars begin late, and compare clock and network of its host."
        )
    yield from _about_stores(operation)


def _about_straggler(columns: EventColumns, found: Culprit) -> str:
    rank, host = columns.ranks[found.part.rank], columns.hosts[int(columns.host_of[found.part.rank])]
    on = f"rank {rank}" + (f" on {host}" if host else "")
    lane = columns.lanes[found.part.lane]
    alone = int((columns.host_of == columns.host_of[found.part.rank]).sum()) == 1
    if found.median_nbytes and found.nbytes > _LARGE_RATIO * found.median_nbytes:
        return (
            f"Divide the state of {on}: it moves {found.nbytes / found.median_nbytes:.1f} times the bytes of "
            "the median rank. Values of one rank, such as the buffer of a data loader, are not divided."
        )
    if columns.moves[found.part.lane]:
        if not alone and found.host_median_s > SLOW_RATIO * found.median_s:
            return f"Check disk, mount and network of {host}: all of its ranks are slow in {lane}."
        return (
            f"Check the disk, mount or path to the store of {on}: it moves as many bytes as the other ranks, "
            "and more slowly."
        )
    if lane.startswith(_COPYING):
        return (
            f"Check the device of {on}, and other work on its memory: its copies are slower than elsewhere."
        )
    return (
        f"Look for other work on the cores of {on}: it computes more slowly than the other ranks in {lane}."
    )


def _about_all(columns: EventColumns, found: Culprit, share: float | None) -> Iterator[str]:
    lane = columns.lanes[found.part.lane]
    if not columns.moves[found.part.lane]:
        yield f"All ranks take their time in {lane}, and none stands out."
    elif share is not None and share < _NEAR_LIMIT:
        yield (
            f"All ranks are alike, and {lane} uses {share:.0%} of the limit: more threads or larger requests "
            "may use the rest."
        )
    else:
        yield (
            f"All ranks are alike, and {lane} decides: the storage is the limit. Use faster storage, move "
            "fewer bytes, or save less often (reknit advise)."
        )


def _about_stores(operation: RecordedOperation) -> Iterator[str]:
    for (name, store), figures in operation.storage.items():
        if figures.count >= 20 and figures.retries > _MOST_REPEATED * figures.count:
            yield (
                f"{store} makes clients repeat {name}: {figures.retries} repetitions of {figures.count} "
                "operations. It is overloaded, or throttles this account."
            )


def _median(values: NDArray[np.float64]) -> float:
    there = values[~np.isnan(values)]
    return float(np.median(there)) if len(there) else 0.0


class MeasuredSaves(NamedTuple):
    """Medians over saves: seconds of stalled training, until the commit, and between two starts."""

    num_saves: int
    num_ranks: int
    stall_s: float
    write_s: float
    apart_s: float


class CostTable(NamedTuple):
    """The cost of the time between saves: remarks, and a table."""

    remarks: Sequence[str]
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def measured_saves(operations: Sequence[RecordedOperation]) -> MeasuredSaves | None:
    """Return the costs of saves in the order of time; None if fewer than two succeeded."""
    saves = [each for each in operations if each.action == "save" and not each.failures]
    if len(saves) < 2:
        return None
    return MeasuredSaves(
        len(saves),
        max(each.num_ranks for each in saves),
        median(map(stall_s, saves)),
        median(each.elapsed_s for each in saves),
        median(after - before for before, after in pairwise(each.started for each in saves)),
    )


def stall_s(save: RecordedOperation) -> float:
    """Return the seconds for which a save stalled training on the slowest rank.

    Training stalls until everything is staged if agents do the rest, and for the whole save otherwise.
    """
    if all(event.process == "trainer" for event in save.events):
        return save.elapsed_s
    begun: dict[int, float] = {}
    staged: dict[int, float] = {}
    for event in save.events:
        if event.process == "trainer":
            begun[event.rank] = min(event.started, begun.get(event.rank, event.started))
            if event.phase == "stage":
                staged[event.rank] = max(event.end, staged.get(event.rank, event.end))
    return max((end - begun[rank] for rank, end in staged.items()), default=save.elapsed_s)


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
    facts = [(_VERBS.get(operation.action, "moved"), amount(nbytes)), ("time", time_of(seconds))]
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


_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"
_WIDTH = 60


def summary_lines(
    figures: OperationFigures,
    limit: Limit | None,
    others: Sequence[RecordedOperation] = (),
    *,
    encoding: str | None = "utf-8",
) -> Iterator[str]:
    """Yield the summary of an operation; `others` are those of its action, itself included, oldest first.

    Sparklines use letters that `encoding` has.
    """
    found = summary(figures, limit)
    facts = ", ".join(f"{name}: {value}" for name, value in found.facts)
    yield f"{figures.operation}: {found.outcome}"
    yield f"  {facts}"
    if found.last:
        yield f"  last: {found.last}"
    if found.reason:
        yield f"  why:  {found.reason}"
    for line in found.advice:
        yield f"  do:   {line}"
    letters = letters_of(encoding)
    if len(figures.throughput) and (most := float(figures.throughput.max())) > 0:
        drawn = sparkline(figures.throughput, letters)
        yield f"  throughput    {drawn}  up to {amount(most)}/s, over {time_of(figures.operation.elapsed_s)}"
    if figures.culprit is not None and len(figures.columns.ranks) > 1:
        lane = figures.culprit.part.lane
        seconds = np.nan_to_num(figures.columns.seconds()[lane])
        drawn = sparkline(seconds, letters)
        name = figures.columns.lanes[lane]
        yield f"  ranks         {drawn}  {name}: up to {time_of(float(seconds.max()))}, by rank"
    if len(others) > 1:
        seconds = np.array([max(each.elapsed_s, 0.0) for each in others[-_WIDTH:]])
        drawn = sparkline(seconds, letters)
        name = f"{figures.operation.action}s"
        yield f"  {name:12}  {drawn}  up to {time_of(float(seconds.max()))}, by step"


def sparkline(values: NDArray[np.float64], letters: str = _BLOCKS, width: int = _WIDTH) -> str:
    """Return numbers from 0 on as a line of letters: of more than `width`, the highest of each part."""
    if len(values) > width:
        edges = np.arange(width) * len(values) // width
        values = np.maximum.reduceat(values, edges)
    most = float(values.max()) if len(values) else 0.0
    if most <= 0:
        return letters[0] * len(values)
    level = np.minimum((values / most * len(letters)).astype(np.int64), len(letters) - 1)
    return "".join(letters[each] for each in level.tolist())


def letters_of(encoding: str | None) -> str:
    """Return letters of rising height that a stream of this encoding can show."""
    try:
        _BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _BLOCKS
