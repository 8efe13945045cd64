"""Operations of stores, summed over ranks: their numbers, bytes, latencies and errors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.monitor.progress_text import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

_LEAST_BIT = 7
"""Latencies of less than 2**7 microseconds are counted together."""


@dataclass
class StorageFigures:
    """The operations of one kind, on one store.

    `latencies` counts them by powers of two: entry `k` is the number of operations that took ``2**(k-1)`` to
    ``2**k`` microseconds.  The first entry also has shorter operations.
    """

    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    most_s: float = 0.0
    retries: int = 0
    at_once: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of failures, by error and host."""
    latencies: Counter[int] = field(default_factory=Counter)

    def add(self, columns: NDArray[Any], failure: tuple[str, str] | None) -> None:
        """Count operations with these columns, which had the same failure: an error and a host, or None.

        The columns are those of `OperationRows`.
        """
        seconds = columns["seconds"]
        self.count += len(columns)
        self.nbytes += sum(columns["nbytes"].tolist())
        self.seconds += float(seconds.sum())
        self.most_s = max(self.most_s, float(seconds.max()))
        self.retries += sum(columns["retries"].tolist())
        self.at_once = max(self.at_once, int(columns["at_once"].max()))
        bits = np.maximum(np.frexp(np.floor(seconds * 1e6))[1], _LEAST_BIT)
        found, counts = np.unique(bits, return_counts=True)
        self.latencies.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        if failure is not None:
            self.errors[failure] += len(columns)

    def below_s(self, share: float) -> float:
        """Return a time that this share of the operations did not exceed, up to a factor of two."""
        left = share * self.count
        for bit in sorted(self.latencies):
            left -= self.latencies[bit]
            if left <= 0:
                return min(self.most_s, 2.0**bit / 1e6)
        return self.most_s


class Bar(NamedTuple):
    """One bar of a histogram: operations that took up to `up_to_s`."""

    up_to_s: float
    num: int


STORAGE_HEADS = (
    "operation",
    "store",
    "number",
    "per s",
    "bytes/s",
    "median",
    "p99",
    "maximum",
    "concurrency",
    "retries",
    "errors",
)
"""The heads of the rows of `storage_rows`."""


def histogram(figures: StorageFigures) -> list[Bar]:
    """Return the bars from the fastest to the slowest operation, with empty bars between them."""
    bits = figures.latencies
    return [Bar(2.0**bit / 1e6, bits[bit]) for bit in range(min(bits), max(bits) + 1)] if bits else []


def time_text(seconds: float) -> str:
    """Return a short time, such as ``1.02 ms``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def storage_rows(
    figures: Mapping[tuple[str, str], StorageFigures], elapsed_s: float
) -> list[tuple[str, ...]]:
    """Return a row for each kind of operation, with the columns of `STORAGE_HEADS`."""
    return [
        (
            operation,
            store,
            str(one.count),
            f"{one.count / elapsed_s:.3g}" if elapsed_s > 0 else "-",
            f"{amount(one.nbytes / elapsed_s)}/s" if one.nbytes and elapsed_s > 0 else "-",
            time_text(one.below_s(0.5)),
            time_text(one.below_s(0.99)),
            time_text(one.most_s),
            str(one.at_once),
            str(one.retries),
            str(sum(one.errors.values())),
        )
        for (operation, store), one in figures.items()
    ]


def error_texts(figures: Mapping[tuple[str, str], StorageFigures]) -> Iterator[str]:
    """Yield a line for each error, store and host, the most frequent first."""
    found = Counter(
        {
            (error, operation, store, host): count
            for (operation, store), one in figures.items()
            for (error, host), count in one.errors.items()
        }
    )
    for (error, operation, store, host), count in found.most_common():
        yield f"{count} times {error} from {operation} of {store}" + (f" on {host}" if host else "")


def histogram_lines(figures: Mapping[tuple[str, str], StorageFigures], width: int = 40) -> Iterator[str]:
    """Yield the histograms of the operations that took the most time, as lines of text."""
    for (operation, store), one in sorted(figures.items(), key=lambda entry: -entry[1].seconds)[:3]:
        bars = histogram(one)
        most = max(bar.num for bar in bars)
        yield f"latencies of {operation} ({store}):"
        for bar in bars:
            drawn = "#" * round(width * bar.num / most)
            yield f"  up to {time_text(bar.up_to_s):>8} {bar.num:8} {drawn}".rstrip()
