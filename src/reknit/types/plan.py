"""The plans of a rank, with every byte address decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

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


class SavePlan(Struct, frozen=True):
    """All data files that a rank writes."""

    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        """Tensor bytes that the rank writes."""
        return sum(file.nbytes for file in self.files)


class StridedReads(NamedTuple):
    """Reads of several runs each out of a byte range, without the bytes between the runs, as columns.

    Read `s` takes runs `first[s]` up to `first[s] + num[s]` (more than one) of piece `piece[s]` of the plan.
    They have `run_nbytes[s]` bytes each, and lie in bytes `start[s]`, `nbytes[s]` of file number `file[s]`.

    The runs of a piece are of one size: the outer dimensions, down to the last with large holes, are stepped
    through in row-major order, so that runs ascend.
    """

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    num: NDArray[np.int64]
    run_nbytes: NDArray[np.int64]
    file: NDArray[np.int64]
    start: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class LoadPlan(Struct, frozen=True):
    """The reads of a rank, as columns.

    Piece `p` is the part of chunk `chunk[p]` (a row of the index) that wanted box `wanted[p]` needs.  It is a
    rectangle of `lengths[p]` elements, at `in_chunk[p]` of the chunk and at `in_wanted[p]` of the wanted box,
    padded like the index.  It lies in bytes `low[p]` up to `high[p]` of its file, with holes where it is
    narrower than the chunk.

    Read `r` is the byte range `read_start[r]`, `read_nbytes[r]` of file number `read_file[r]`; it touches the
    pieces `use_piece[use_first[r]:use_first[r + 1]]`, ordered by `low`.  Reads of one file ascend and do not
    overlap.  The `strided` reads take runs with large holes between them; their ranges may overlap each other
    and other reads, but no byte is taken twice.
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
    strided: StridedReads

    @property
    def nbytes(self) -> int:
        """Bytes that will be read."""
        return int(self.read_nbytes.sum() + (self.strided.num * self.strided.run_nbytes).sum())

    @property
    def files(self) -> list[int]:
        """Numbers of the files that are read."""
        return sorted({*self.read_file.tolist(), *self.strided.file.tolist()})
