"""The bytes that a load needs, computed from the index on disk and the wanted boxes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow.parquet as parquet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

BLOCK = 4 << 20
"""Bytes that share a digest: to verify one of them, a rank must read them all."""

Wanted = tuple[int, str, tuple[slice, ...]]
"""A rank, the name of a tensor, and the box that the rank wants of it."""


class Need(NamedTuple):
    """The bytes that a load must read, over all ranks.

    `nbytes` are wanted.  They lie in `runs`, in which neighbours are less than a block apart, and in digest
    blocks of `block_nbytes` together.  `unique_nbytes` counts a byte once if several ranks want it.
    """

    nbytes: int
    unique_nbytes: int
    runs: int
    block_nbytes: int


def needed(path: str, wanted: Iterable[Wanted]) -> Need:
    """Return the bytes that the boxes need of a checkpoint."""
    chunks, sizes = _chunks(path)
    per_rank: dict[int, dict[str, list[NDArray[np.int64]]]] = {}
    nbytes = 0
    for rank, fqn, box in wanted:
        for chunk in chunks.get(fqn, ()):
            spans = chunk.spans(box)
            if spans is None:
                continue
            nbytes += int((spans[:, 1] - spans[:, 0]).sum())
            per_rank.setdefault(rank, {}).setdefault(chunk.file, []).append(spans)
    runs = blocks = 0
    everyone: dict[str, list[NDArray[np.int64]]] = {}
    for files in per_rank.values():
        for file, parts in files.items():
            everyone.setdefault(file, []).extend(parts)
            runs += len(_merged(parts, BLOCK - 1))
            blocks += _block_nbytes(_merged(parts, 0), sizes[file])
    unique = sum(int((m[:, 1] - m[:, 0]).sum()) for m in (_merged(parts, 0) for parts in everyone.values()))
    return Need(nbytes, unique, runs, blocks)


class _Chunk(NamedTuple):
    """A saved box of a tensor."""

    file: str
    start: int
    nbytes: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def spans(self, box: Sequence[slice]) -> NDArray[np.int64] | None:
        """Return the start and the end of each contiguous piece of a box in the file, None if it is empty."""
        low = [max(o, s.start) - o for o, s in zip(self.offsets, box, strict=True)]
        high = [min(o + n, s.stop) - o for o, n, s in zip(self.offsets, self.lengths, box, strict=True)]
        if any(b <= a for a, b in zip(low, high, strict=True)):
            return None
        width = self.nbytes // int(np.prod(self.lengths, dtype=np.int64))
        begin, length, stride = np.zeros(1, np.int64), width, width
        for dim in reversed(range(len(low))):
            if length == stride:  # whole rows so far, so they join the outer dimension
                length = (high[dim] - low[dim]) * stride
                begin = begin + low[dim] * stride
            else:
                steps = np.arange(low[dim], high[dim]) * stride
                begin = (steps[:, None] + begin).reshape(-1)
            stride *= self.lengths[dim]
        begin = begin + self.start
        return np.stack((begin, begin + length), axis=1)


def _chunks(path: str) -> tuple[dict[str, list[_Chunk]], dict[str, int]]:
    """Return the chunks of every tensor of a checkpoint with one item, and the sizes of its files."""
    (index,) = Path(path).glob("index.*.parquet")
    chunks: dict[str, list[_Chunk]] = {}
    for row in parquet.read_table(index).to_pylist():
        chunk = _Chunk(row["file"], row["start"], row["nbytes"], tuple(row["offsets"]), tuple(row["lengths"]))
        chunks.setdefault(row["fqn"], []).append(chunk)
    files = {chunk.file for of in chunks.values() for chunk in of}
    return chunks, {file: Path(path, file).stat().st_size for file in files}


def _merged(parts: Sequence[NDArray[np.int64]], gap: int) -> NDArray[np.int64]:
    """Return ascending spans, of which those up to `gap` bytes from each other are merged."""
    spans = np.concatenate(parts)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate(([True], spans[1:, 0] > reach[:-1] + gap)))
    return np.stack((spans[first, 0], reach[np.append(first[1:], len(spans)) - 1]), axis=1)


def _block_nbytes(spans: NDArray[np.int64], nbytes: int) -> int:
    """Return the bytes of all digest blocks of a file that spans touch."""
    low, high = spans[:, 0] // BLOCK, -(-spans[:, 1] // BLOCK)
    # Spans ascend, so a block that two of them touch is the last of one and the first of the next.
    low = np.maximum(low, np.concatenate(([0], high[:-1])))
    blocks = int((high - low).clip(0).sum())
    return blocks * BLOCK - (-nbytes % BLOCK if len(high) and high[-1] * BLOCK > nbytes else 0)
