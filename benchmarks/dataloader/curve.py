"""Does the mixture of samples go on as it was?  Sample lengths per batch through three restarts, as a plot.

python benchmarks/dataloader/curve.py [--steps 200] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import reknit
from benchmarks.dataloader.corpus import Varied
from benchmarks.pictures import draw_both
from reknit.dataloader import ReaderPlace, TokenLoader, TokenSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure

    from reknit.dataloader import Batch

SIZE = 2
"""Data-parallel ranks, each with two workers."""


def loaders(size: int, steps: int) -> list[TokenLoader]:
    sets = [
        TokenSet(
            name=name,
            open=Varied,
            arguments={"num_samples": 64 * steps, "mean": mean, "seed": mean},
            ratio=ratio,
            num_partitions=16,
        )
        for name, mean, ratio in (("chat", 120, 1.0), ("web", 500, 2.0), ("books", 3000, 1.0))
    ]
    return [
        TokenLoader(sets, token_budget=8192, place=ReaderPlace(rank, size), num_workers=2, epochs=None)
        for rank in range(size)
    ]


def lengths(batches: Iterable[Iterable[Batch]]) -> list[float]:
    """Return the mean length of the pieces of each step, over all ranks."""
    steps = zip(*batches, strict=True)
    return [float(np.mean(np.concatenate([np.diff(batch.bounds) for batch in step]))) for step in steps]


def run(steps: int, restarts: int, sizes: list[int]) -> list[float]:
    """Return the lengths of so many steps with some restarts, each of which loads the states of all ranks."""
    found: list[float] = []
    part = steps // (restarts + 1)
    with tempfile.TemporaryDirectory(prefix="reknit-curve-") as folder:
        for k in range(restarts + 1):
            job = loaders(sizes[k], steps)
            if k:
                _each(
                    job, lambda one, group, at=f"{folder}/{k - 1}": reknit.load(at, {"l": one}, group=group)
                )
            found += lengths([list(islice(one, part)) for one in job])
            _each(job, lambda one, group, at=f"{folder}/{k}": reknit.save(at, {"l": one}, group=group))
            for one in job:
                one.close()
    return found


def _each(job: list[TokenLoader], act: object) -> None:
    from reknit.testing.world import run_ranks

    run_ranks(len(job), lambda group: act(job[group.rank], group))  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    whole = run(args.steps, 0, [SIZE])
    broken = run(args.steps, 3, [SIZE] * 4)
    changed = run(args.steps, 3, [SIZE, 4, 3, SIZE])
    curves = {"uninterrupted": whole, "three restarts": broken, "restarts on 4, 3 and 2 ranks": changed}
    equal = sum(a == b for a, b in zip(whole, broken, strict=True))
    print(f"{equal} of {len(whole)} steps equal after three restarts")
    (args.out / "dataloader_curve.json").write_text(json.dumps(curves) + "\n")
    draw_both(lambda: figure_of(curves, args.steps), args.out / "dataloader.png", dpi=80)
    if equal != len(whole):
        raise SystemExit("the restarted run has other samples than the uninterrupted one")


def figure_of(curves: dict[str, list[float]], steps: int) -> Figure:
    """Return a figure of the lengths in each step."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), constrained_layout=True)
    styles: tuple[dict[str, Any], ...] = ({"lw": 4, "alpha": 0.35}, {"lw": 1}, {"lw": 1, "ls": ":"})
    for (name, values), style in zip(curves.items(), styles, strict=True):
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    for k in range(1, 4):
        axes.axvline(k * steps // 4 + 0.5, color="0.7", lw=0.8)
    axes.set(xlabel="step", ylabel="mean length of a sample, tokens")
    axes.set_title("samples of each step, through three restarts (grey lines)")
    axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
