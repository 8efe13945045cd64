"""How do ranks measure for a table?  Contestants take turns, and all ranks begin a measurement together."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.load.measure import LoadBench, fingerprint
from benchmarks.load.measure import tensors as tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Way = Callable[[int], Mapping[str, float]]


class PaperBench(LoadBench):
    """The ranks of `tests.ranks.run`, which have joined already, and their folder."""

    def __init__(self, folder: str) -> None:
        import torch.distributed as dist

        self.dist, self.folder, self.repeat = dist, folder, 1
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.least_warm, self.most_cold = 1.0, 0.0

    def say(self, text: str) -> None:
        """Print nothing, since a table prints its rows at the end."""

    def remove(self, url: str) -> None:
        """Remove a folder of this machine or of HDFS when all ranks are done with it."""
        self.on_root(lambda: remove(url))

    def forget(self, url: str) -> None:
        """Drop the files of a local folder from the page cache; those of HDFS stay there."""
        if not url.startswith("hdfs://"):
            self.cold(url)

    def timed_once(self, action: Callable[[], Any]) -> float:
        """Return the seconds of the slowest rank, after dirty pages were written back."""
        self.settle()
        return self.together(action)


class Restored:
    """Checks that loads restore the same contents: those at the beginning, or those of the first load."""

    def __init__(self, bench: PaperBench, tensors: Sequence[Any], *, known: bool) -> None:
        self._bench, self._tensors = bench, {str(n): tensor for n, tensor in enumerate(tensors)}
        self._expected = fingerprint(self._tensors) if known else ""

    def wipe(self) -> None:
        """Replace all contents by zeros."""
        import torch

        with torch.no_grad():
            for tensor in tensors_of(self._tensors):
                tensor.zero_()

    def check(self) -> None:
        """Raise `ValueError` on every rank if the contents differ on any."""
        found = fingerprint(self._tensors)
        self._expected = self._expected or found
        if self._bench.slowest(float(found != self._expected))[0]:
            raise ValueError("the loaded contents differ from the saved ones")


def remove(url: str) -> None:
    """Remove a folder of this machine or of HDFS."""
    if url.startswith("hdfs://"):
        import hdfs_native

        server, _, path = url.removeprefix("hdfs://").partition("/")
        hdfs_native.Client(f"hdfs://{server}").delete(f"/{path}", True)
    else:
        shutil.rmtree(url, ignore_errors=True)


@dataclass
class Taken:
    """The figures of each contestant by quantity, a list with one figure for each round."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, quantity: str) -> dict[str, list[float]]:
        """Return the figures of one quantity by contestant."""
        return {who: each[quantity] for who, each in self.figures.items() if quantity in each}


def in_turn(bench: PaperBench, ways: Mapping[str, Way], rounds: int, *, warm_up: bool = True) -> Taken:
    """Measure all contestants once in each round, each round in another order.

    With `warm_up` a round before that does not count.  A contestant that fails has no figures.
    """
    taken, names = Taken(), list(ways)
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if name in taken.failed:
                continue
            found, why = _one(ways[name], number)
            if bench.slowest(float(bool(why)))[0]:  # on any rank
                taken.failed[name] = why or "it failed on another rank"
                taken.figures.pop(name, None)
                continue
            if number >= 0:
                figures = taken.figures.setdefault(name, {})
                for quantity, value in found.items():
                    figures.setdefault(quantity, []).append(value)
    return taken


def _one(way: Way, number: int) -> tuple[Mapping[str, float], str]:
    """Return the figures of a way, or the reason of its failure."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        return way(number), ""
    except (Exception, CheckpointException) as error:  # the summary has the reason in place of figures
        return {}, f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
