"""Contestants take turns: one measurement of each in a round, and the next round in another order."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.load.measure import io_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.load.measure import LoadBench

    Meter = Callable[[LoadBench, Callable[[], Any]], float]

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


def seconds(bench: LoadBench, act: Callable[[], Any]) -> float:
    """Return the seconds of the slowest rank."""
    return bench.together(act)


def cpu_seconds(bench: LoadBench, act: Callable[[], Any]) -> float:
    """Return the CPU seconds of all threads of the busiest rank's process."""
    begin = time.process_time()
    bench.together(act)
    return bench.slowest(time.process_time() - begin)[0]


def read_bytes(bench: LoadBench, act: Callable[[], Any]) -> float:
    """Return the bytes that all ranks read by system calls."""
    begin = io_counts()[0]
    bench.together(act)
    return bench.total(io_counts()[0] - begin)[0]


def in_turn(
    bench: LoadBench,
    row: Row,
    contestants: Iterable[Contestant],
    repeat: int,
    meter: Meter = seconds,
    *,
    warm_up: bool = True,
) -> Row:
    """Measure all contestants `repeat` times in turn; with `warm_up` a round before that does not count."""
    taking_part = list(contestants)
    for number in range(-warm_up, repeat):
        first = number % len(taking_part) if taking_part else 0
        for each in taking_part[first:] + taking_part[:first]:
            if each.name not in row.missing:
                _one(bench, row, each, number, meter)
    for name, figures in row.figures.items():
        bench.say(f"{row.name:52s} {name:44s} {min(figures):10.4g} {row.unit}")
    return row


def _one(bench: LoadBench, row: Row, each: Contestant, number: int, meter: Meter) -> None:
    try:
        bench.together(lambda: each.before(number))
        bench.settle()
        figure = meter(bench, lambda: each.act(number))
    except Exception as error:  # the row has the reason in place of a figure
        row.fail(each.name, each.kind, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
        bench.say(f"{row.name:52s} {each.name:44s} {row.missing[each.name]}")
        return
    if number >= 0:
        row.add(each.name, each.kind, figure)
