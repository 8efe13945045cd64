"""The lengths of the samples of a token loader, step by step, through restarts on as many ranks or others."""

from __future__ import annotations

import tempfile
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

import reknit
from benchmarks.corpus import Varied
from reknit.dataloader import ReaderPlace, TokenLoader, TokenSet
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group


def lengths(steps: int, sizes: Sequence[int]) -> list[float]:
    """Return the mean length of the samples of each step, over all ranks.

    Each of `sizes` is the number of ranks of a part of the steps, which begins by a load.
    """
    found: list[float] = []
    with tempfile.TemporaryDirectory(prefix="reknit-samples-") as folder:
        for part, size in enumerate(sizes):
            job = _loaders(size, steps)

            def load(group: Group, at: str = f"{folder}/{part - 1}", job: list[TokenLoader] = job) -> None:
                reknit.load(at, {"l": job[group.rank]}, group=group)

            def save(group: Group, at: str = f"{folder}/{part}", job: list[TokenLoader] = job) -> None:
                reknit.save(at, {"l": job[group.rank]}, group=group)

            if part:
                run_ranks(size, load)
            batches = [list(islice(one, steps // len(sizes))) for one in job]
            for step in zip(*batches, strict=True):
                found.append(float(np.mean(np.concatenate([np.diff(batch.bounds) for batch in step]))))
            run_ranks(size, save)
            for one in job:
                one.close()
    return found


def _loaders(size: int, steps: int) -> list[TokenLoader]:
    """Return the loaders of all ranks, each with two workers."""
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
