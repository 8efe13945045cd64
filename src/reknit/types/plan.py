"""What a rank will do, with every byte address decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reknit.types.box import Box


class WriteEntry(NamedTuple):
    """A box that a rank writes.

    It is the `numel` elements from element `first` (row-major) of shard number `shard`, which are the global
    `box`; its bytes lie at `start` in the data part of the file, `nbytes` long.
    """

    shard: int
    first: int
    numel: int
    box: Box
    start: int
    nbytes: int


class FilePlan(NamedTuple):
    """A data file that a rank writes: entries end to end, largest elements first, then by name and place."""

    item: str
    part: int
    entries: tuple[WriteEntry, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All data files that a rank writes."""

    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        """Tensor bytes that the rank writes."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a rank reads, as columns.

    Piece `p` is the part of chunk `chunk[p]` (a row of the index) that wanted box `wanted[p]` needs: the
    rectangle of `lengths[p]` elements at `in_chunk[p]` of the chunk and at `in_wanted[p]` of the wanted box
    (padded like the index).  It lies in bytes `low[p]` up to `high[p]` of its file, with holes where it is
    narrower than the chunk.

    Read `r` is the byte range `read_start[r]`, `read_nbytes[r]` of file number `read_file[r]`; it touches the
    pieces `use_piece[use_first[r]:use_first[r + 1]]`, ordered by `low`.  Reads of one file ascend and do not
    overlap.
    """

    wanted: NDArray[np.int64]
    chunk: NDArray[np.int64]
    in_chunk: NDArray[np.int64]
    in_wanted: NDArray[np.int64]
    lengths: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]
    read_file: NDArray[np.int64]
    read_start: NDArray[np.int64]
    read_nbytes: NDArray[np.int64]
    use_first: NDArray[np.int64]
    use_piece: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return int(self.read_nbytes.sum())
