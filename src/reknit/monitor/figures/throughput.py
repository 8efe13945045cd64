"""How many bytes moved when?  And how many could have?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from reknit.monitor.figures.event_columns import EventColumns

BINS = 120
"""The parts of a save or load of which each has a throughput of its own."""


class Limit(NamedTuple):
    """The highest throughput of the storage, in bytes per second; `given` by the user, or measured."""

    bytes_per_s: float
    given: bool

    @property
    def noun(self) -> str:
        """Return the name of this limit, for a sentence."""
        return "the limit" if self.given else "the highest throughput in these events"


def bytes_per_s(columns: EventColumns, bins: int = BINS) -> NDArray[np.float64]:
    """Return the throughput of all ranks together in equal parts of the time.

    The bytes of a phase are spread evenly over its time.
    """
    moving = columns.moves[columns.lane] & (columns.nbytes > 0)
    end = float(columns.stop.max()) if len(columns.stop) else 0.0
    if not moving.any() or end <= 0:
        return np.zeros(bins)
    width = end / bins
    start, stop = columns.start[moving], columns.stop[moving]
    stop = np.maximum(stop, start + 1e-3 * width)  # a phase of no time moves its bytes at once
    rate = columns.nbytes[moving] / (stop - start)
    edges = np.linspace(0.0, end, bins + 1)
    order_start, order_stop = np.argsort(start), np.argsort(stop)
    moved = _moved_until(edges, start[order_start], rate[order_start])
    moved -= _moved_until(edges, stop[order_stop], rate[order_stop])
    found = np.maximum(np.diff(moved), 0.0)
    # Bytes that end behind the last edge by rounding are not lost.
    total = found.sum()
    return found * (columns.nbytes[moving].sum() / total if total > 0 else 0.0) / width


def _moved_until(
    edges: NDArray[np.float64], begun: NDArray[np.float64], rate: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the bytes until each edge of flows that begin then (ascending) and never end."""
    num = np.searchsorted(begun, edges)
    rates, offsets = (np.concatenate(([0.0], np.cumsum(each)))[num] for each in (rate, rate * begun))
    moved: NDArray[np.float64] = rates * edges - offsets
    return moved


def highest(throughputs: Iterable[NDArray[np.float64]]) -> float:
    """Return the highest throughput that lasted for three parts, over several operations."""
    best = 0.0
    for each in throughputs:
        if len(each) >= 3:
            best = max(best, float(np.convolve(each, np.ones(3) / 3, "valid").max()))
    return best
