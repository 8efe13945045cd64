"""The rows of the table: the figures of contestants that took turns."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from benchmarks import turns
from benchmarks.timing import PeakMemory, io_counts, own_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from benchmarks.timing import Bench

    Meter = Callable[[Bench, Callable[[], Any]], float]

Kind = Literal["ours", "rival", "beside", "limit"]
"""The role in a comparison; figures of "beside" are listed but not compared, since it promises less."""


@dataclass(frozen=True)
class Contestant:
    """A contestant of a row: `act` is measured, `before` is not; both get the number of the round."""

    name: str
    kind: Kind
    act: Callable[[int], Any]
    before: Callable[[int], Any] = lambda number: None


@dataclass
class Row:
    """A row of the table: the figures of each contestant by round, or the reason of its failure."""

    name: str
    unit: str
    figures: dict[str, list[float]] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, kind: Kind, *figures: float) -> None:
        self.kinds[name] = kind
        self.figures.setdefault(name, []).extend(round(figure, 6) for figure in figures)

    def fail(self, name: str, kind: Kind, why: str) -> None:
        """Record the reason why a contestant has no figures in this row."""
        self.kinds[name], self.missing[name] = kind, why
        self.figures.pop(name, None)


def seconds(bench: Bench, act: Callable[[], Any]) -> float:
    """Return the seconds of the slowest rank."""
    return bench.together(act)


def cpu_seconds(bench: Bench, act: Callable[[], Any]) -> float:
    """Return the CPU seconds of all threads of the busiest rank's process."""
    begin = time.process_time()
    bench.together(act)
    return bench.slowest(time.process_time() - begin)[0]


def read_bytes(bench: Bench, act: Callable[[], Any]) -> float:
    """Return the bytes that all ranks read by system calls."""
    begin = io_counts()[0]
    bench.together(act)
    return bench.total(io_counts()[0] - begin)[0]


def python_calls(bench: Bench, act: Callable[[], Any]) -> float:
    """Return the calls of Python functions of the busiest rank, in this thread and in new ones."""
    counted = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    threading.setprofile(seen)
    sys.setprofile(seen)
    try:
        bench.together(act)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return bench.slowest(counted)[0]


def peak_memory(bench: Bench, act: Callable[[], Any]) -> float:
    """Return the most bytes that a rank holds above those before."""
    with PeakMemory(own_memory, 0.002) as memory:
        bench.together(act)
    return bench.slowest(memory.extra[0])[0]


def in_turn(
    bench: Bench,
    row: Row,
    contestants: Iterable[Contestant],
    repeat: int,
    meter: Meter = seconds,
    *,
    seldom: str | None = None,
) -> Row:
    """Measure all contestants `repeat` times in turn, after a round that does not count.

    Contestants whose names begin with `seldom` take part once.
    """
    taking_part = {each.name: each for each in contestants if each.name not in row.missing}

    def measured(each: Contestant, number: int) -> dict[str, float]:
        bench.together(lambda: each.before(number))
        bench.settle()
        return {row.unit: meter(bench, lambda: each.act(number))}

    ways = {name: partial(measured, each) for name, each in taking_part.items()}
    slow = [name for name in ways if seldom and name.startswith(seldom)]
    taken = turns.in_turn(ways, repeat, bench=bench, seldom=slow)
    for name, each in taking_part.items():
        if name in taken.failed:
            row.fail(name, each.kind, taken.failed[name])
        else:
            row.add(name, each.kind, *taken.figures[name][row.unit])
            bench.say(f"{row.name:52s} {name:44s} {min(row.figures[name]):10.4g} {row.unit}")
    return row


def taken_row(row: Row, taken: turns.Taken, quantity: str, ours: Collection[str] = ("reknit",)) -> Row:
    """Fill a row with one quantity of contestants that took turns; `ours` are those of reknit in this row."""
    for name, figures in taken.of(quantity).items():
        if name in ours or not name.startswith("reknit"):
            row.add(name, _kind(name), *figures)
    for name, reason in taken.failed.items():
        row.fail(name, _kind(name), reason)
    return row


def _kind(name: str) -> Kind:
    return "ours" if name.startswith("reknit") else "limit" if name == "memcpy" else "rival"
