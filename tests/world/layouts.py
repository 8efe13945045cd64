"""Random ways to spread a tensor over ranks, and the holdings that follow."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np

from reknit.types.box import Box, flat_range_boxes
from reknit.types.shard import Holdings, Shard, TensorSpec
from reknit.types.wanted import Wanted

Part = tuple[Box, tuple[int, ...]]
"""A box, and the ranks that hold it."""

DTYPES = ("uint8", "int16", "float32", "float64", "complex128", "bool")


def chunked(length: int, parts: int) -> list[tuple[int, int]]:
    """Return (start, length) of each part of a length, cut as by torch.chunk, with empty parts at the end."""
    size = -(-length // parts) if length else 0
    return [(min(k * size, length), max(min(size, length - k * size), 0)) for k in range(parts)]


def spread(shape: tuple[int, ...], size: int, rng: random.Random) -> list[Part]:
    """Return a random layout of a tensor over `size` ranks; some rank holds each element."""
    ranks = tuple(range(size))
    groups = rng.choice([g for g in range(1, size + 1) if size % g == 0])
    teams = [ranks[k :: size // groups] for k in range(size // groups)]  # replicas share a team
    kind = rng.choice(["replicated", "dim", "strided", "flat", "flat in box"]) if shape else "replicated"
    if kind == "replicated" or not prod(shape):
        return [(Box.whole(shape), ranks)]
    if kind in ("flat", "flat in box"):
        return _flat(shape, teams, rng, boxed=kind == "flat in box")
    d = rng.randrange(len(shape))
    runs = chunked(shape[d], len(teams) * (rng.randint(2, 3) if kind == "strided" else 1))
    parts = []
    for k, (start, length) in enumerate(runs):
        offsets = tuple(start if i == d else 0 for i in range(len(shape)))
        lengths = tuple(length if i == d else n for i, n in enumerate(shape))
        parts.append((Box(offsets, lengths), teams[k % len(teams)]))
    return parts


def _flat(
    shape: tuple[int, ...], teams: list[tuple[int, ...]], rng: random.Random, *, boxed: bool
) -> list[Part]:
    """Cut each of one or two boxes into flat ranges at random elements, one for each team."""
    boxes = [Box.whole(shape)]
    if boxed and shape[0] > 1:
        k = rng.randrange(1, shape[0])
        rest = (0,) * (len(shape) - 1)
        boxes = [Box((0, *rest), (k, *shape[1:])), Box((k, *rest), (shape[0] - k, *shape[1:]))]
    parts: list[Part] = []
    for box in boxes:
        cuts = sorted(rng.randint(0, box.numel) for _ in range(len(teams) - 1))
        for team, low, high in zip(teams, [0, *cuts], [*cuts, box.numel], strict=True):
            parts += [(b.shifted(box.offsets), team) for b in flat_range_boxes(box.lengths, low, high - low)]
    return parts


def cut_with_counters(size: int, rows: int) -> tuple[Model, dict[str, list[Part]]]:
    """Return a state like that of trained models, and its layout: rows on each rank, and counters on all.

    A small tensor stands between every two large ones, of which each rank has `rows` of 1 KiB.
    """
    model, layout = Model(0, 0), dict[str, list[Part]]()
    ranks = tuple(range(size))
    for n in range(8):
        weight = np.arange(size * rows * 256, dtype=np.float32).reshape(size * rows, 256) + n
        model.arrays |= {f"{n}.weight": weight, f"{n}.step": np.float32(n) + np.zeros((), np.float32)}
        layout[f"{n}.weight"] = [(Box((rank * rows, 0), (rows, 256)), (rank,)) for rank in ranks]
        layout[f"{n}.step"] = [(Box.whole(()), ranks)]
    return model, layout


class Model:
    """Named arrays with random contents, and their spread over the ranks of a world."""

    def __init__(self, seed: int, num_tensors: int, largest: int = 12) -> None:
        rng = random.Random(seed)
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        for n in range(num_tensors):
            shape = tuple(
                rng.randint(0 if rng.random() < 0.1 else 1, largest) for _ in range(rng.randint(0, 4))
            )
            dtype = np.dtype(rng.choice(DTYPES))
            raw: np.ndarray[Any, Any] = np.frombuffer(
                rng.randbytes(int(np.prod(shape)) * dtype.itemsize), np.uint8
            )
            raw = raw & 1 if dtype == np.bool_ else raw
            self.arrays[f"layers.{n}.weight"] = raw.view(dtype).reshape(shape)

    def spread(self, seed: int, size: int) -> dict[str, list[Part]]:
        """Return a layout of every array."""
        rng = random.Random(seed)
        return {fqn: spread(array.shape, size, rng) for fqn, array in self.arrays.items()}

    def shards(self, layout: dict[str, list[Part]], rank: int, *, filled: bool, seed: int = 0) -> list[Shard]:
        """Return a rank's holdings (or, unfilled, its targets) in this layout, in memory of any order."""
        rng = random.Random(seed)
        shards = []
        for fqn, parts in layout.items():
            array = self.arrays[fqn]
            spec = TensorSpec(array.shape, array.dtype.name)
            for box, ranks in parts:
                if rank not in ranks or (box.numel == 0 and array.size):
                    continue
                data = np.empty(box.lengths, array.dtype, order=rng.choice(["C", "F"]))
                data[...] = array[box.slices()] if filled else np.zeros((), array.dtype)
                shards.append(Shard("model", fqn, spec, box, tuple(sorted(ranks)), data))
        return shards


def held(shards: list[Shard]) -> Holdings:
    """Return holdings of one item without blobs."""
    return Holdings(("model",), tuple(shards), ())


def wants(shards: list[Shard]) -> Wanted:
    """Return a `Wanted` with exactly these shards."""
    return Wanted(("model",), tuple(shards))
