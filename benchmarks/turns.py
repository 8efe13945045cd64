"""One way to pair: contestants take turns, one measurement in each round, and each round in another order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.timing import ENDS, why

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from benchmarks.timing import Bench

    Way = Callable[[int], Mapping[str, float]]
    """Measures a contestant once: it gets the number of the round, and returns figures by quantity."""


@dataclass
class Taken:
    """The figures of each contestant by quantity, a list with one figure for each round."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, quantity: str) -> dict[str, list[float]]:
        """Return the figures of one quantity by contestant."""
        return {who: each[quantity] for who, each in self.figures.items() if quantity in each}


def in_turn(
    ways: Mapping[str, Way],
    rounds: int,
    *,
    bench: Bench | None = None,
    warm_up: bool = True,
    seldom: Collection[str] = (),
) -> Taken:
    """Measure all contestants once in each round, on the ranks of a bench if there is one.

    With `warm_up` a round before that does not count.  A contestant that fails on any rank has no figures.
    Those of `seldom`, which take very long, have a turn in the first round only.
    """
    taken, names = Taken(), list(ways)
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in taken.failed or (name in seldom and number != 0):
                continue
            found, reason = _one(ways[name], number)
            if bench.slowest(float(bool(reason)))[0] if bench else reason:
                taken.failed[name] = reason or "it failed on another rank"
                taken.figures.pop(name, None)
            elif number >= 0:
                figures = taken.figures.setdefault(name, {})
                for quantity, value in found.items():
                    figures.setdefault(quantity, []).append(value)
    return taken


def _one(way: Way, number: int) -> tuple[Mapping[str, float], str]:
    """Return the figures of a way, or the reason of its failure."""
    try:
        return way(number), ""
    except ENDS:
        raise
    except BaseException as error:  # a failure is a result too
        return {}, why(error)
