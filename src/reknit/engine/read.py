"""Byte ranges on their way into memory: read (into the target where that can be), checked, delivered."""

from __future__ import annotations

from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.engine.opening import corrupt_block
from reknit.engine.pipeline import run_jobs
from reknit.engine.staging import bits, contiguous_bytes, convert, deliver
from reknit.errors import ReknitError
from reknit.format.checksum import BLOCK_NBYTES, digest
from reknit.monitor.phase import Stopwatch
from reknit.options import num_threads
from reknit.planner.load import Granularity
from reknit.types.box import Box, flat_range_boxes
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.arena import Arena
    from reknit.engine.opening import OpenCheckpoint
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.types.plan import LoadPlan

PIECE_NBYTES = 2 * BLOCK_NBYTES
"""Bytes that a worker reads, checks and delivers at once."""


def granularity(options: LoadOptions, block_nbytes: int) -> Granularity:
    """Return how reads are cut: on digest blocks when these are verified."""
    size = max(PIECE_NBYTES // block_nbytes, 1) * block_nbytes
    if options.verify == "off":
        return Granularity(1, options.gap_nbytes, size)
    return Granularity(block_nbytes, 0, size)


class _Piece(NamedTuple):
    """A row of `LoadPlan` in Python numbers; `direct` is the target where both sides are one run."""

    wanted: int
    low: int
    high: int
    itemsize: int
    chunk_start: int
    chunk_lengths: tuple[int, ...]
    in_chunk: tuple[int, ...]
    in_wanted: tuple[int, ...]
    lengths: tuple[int, ...]
    direct: NDArray[np.uint8] | None

    @property
    def is_run(self) -> bool:
        """Tell whether the piece has no holes in its file."""
        return self.high - self.low == prod(self.lengths) * self.itemsize


class _Span(NamedTuple):
    """Part of a read: `buffer` receives the file's bytes from `start` on."""

    start: int
    buffer: NDArray[np.uint8]


class Reader:
    """Carries out one `LoadPlan` of one rank.

    `targets[w]` is the live array that wanted box `w` fills, `tensors[w]` the number of its tensor in the
    index, `cast` holds the numbers of the boxes that are to be converted.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        plan: LoadPlan,
        targets: Sequence[Any],
        tensors: Sequence[int],
        cast: frozenset[int],
        options: LoadOptions,
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._targets = targets
        self._tensors = tensors
        self._cast = cast
        self._options = options
        self._bits: list[Any] = [None if w in cast else bits(target) for w, target in enumerate(targets)]
        self._pieces = self._make_pieces()
        self._clocks = {name: Stopwatch() for name in ("read", "verify", "deliver")}

    def run(self, recorder: Recorder) -> None:
        """Read everything.  After an error the targets may be partly written."""
        size = granularity(self._options, self._checkpoint.manifest.block_nbytes).nbytes
        try:
            run_jobs(
                range(len(self._plan.read_file)),
                self._read,
                threads=num_threads(self._options.threads),
                arena_nbytes=size,
                budget_nbytes=self._options.inflight_nbytes,
            )
        finally:
            for name, clock in self._clocks.items():
                recorder.add(name, clock.started, clock.seconds, clock.nbytes)

    def _make_pieces(self) -> list[_Piece]:
        plan, index = self._plan, self._checkpoint.index
        itemsize = [index.tensors[t].spec.itemsize for t in self._tensors]
        ndim = [len(index.tensors[t].spec.shape) for t in self._tensors]
        rows = zip(
            plan.wanted.tolist(),
            plan.low.tolist(),
            plan.high.tolist(),
            index.start[plan.chunk].tolist(),
            index.lengths[plan.chunk].tolist(),
            plan.in_chunk.tolist(),
            plan.in_wanted.tolist(),
            plan.lengths.tolist(),
            strict=True,
        )
        pieces = []
        for w, low, high, start, *columns in rows:
            chunk, in_chunk, in_wanted, lengths = (tuple(column[: ndim[w]]) for column in columns)
            piece = _Piece(w, low, high, itemsize[w], start, chunk, in_chunk, in_wanted, lengths, None)
            if self._bits[w] is not None and piece.is_run:
                part = self._bits[w][Box(piece.in_wanted, piece.lengths).slices()]
                piece = piece._replace(direct=contiguous_bytes(part))
            pieces.append(piece)
        return pieces

    def _read(self, number: int, arena: Arena) -> None:
        plan = self._plan
        path = self._checkpoint.index.files[plan.read_file[number]]
        start, nbytes = int(plan.read_start[number]), int(plan.read_nbytes[number])
        used = plan.use_piece[plan.use_first[number] : plan.use_first[number + 1]].tolist()
        uses = [self._pieces[p] for p in used]
        scratch = arena.view(nbytes)
        spans, indirect = _spans(uses, start, scratch)
        with self._clocks["read"].lap(nbytes), self._signed("read", path):
            self._checkpoint.storage.read_into(path, start, [span.buffer.data for span in spans])
        if self._options.verify != "off":
            with self._clocks["verify"].lap(nbytes), self._signed("verify", path):
                self._verify(path, spans, uses)
        with self._clocks["deliver"].lap():
            for piece in indirect:
                self._deliver(piece, start, scratch)

    @contextmanager
    def _signed(self, phase: str, path: str) -> Iterator[None]:
        """Sign errors that pass with the place; the time is taken elsewhere."""
        try:
            yield
        except ReknitError as error:
            error.sign(phase=phase, path=f"{self._checkpoint.storage.url}/{path}")
            raise

    def _verify(self, path: str, spans: Sequence[_Span], uses: Sequence[_Piece]) -> None:
        """Check every block of a read; reads begin and end with blocks (or the file)."""
        file = self._checkpoint.files[path]
        block_nbytes = self._checkpoint.manifest.block_nbytes
        parts: dict[int, list[NDArray[np.uint8]]] = {}
        for start, buffer in spans:
            position = 0
            while position < len(buffer):
                block = (start + position) // block_nbytes
                stop = min(len(buffer), (block + 1) * block_nbytes - start)
                parts.setdefault(block, []).append(buffer[position:stop])
                position = stop
        for block, buffers in parts.items():
            if digest(*(buffer.data for buffer in buffers)) != file.digests[block]:
                low, high = block * block_nbytes, (block + 1) * block_nbytes
                names = sorted({self._name(p) for p in uses if p.low < high and p.high > low})
                raise corrupt_block(file, block, block_nbytes, names)

    def _name(self, piece: _Piece) -> str:
        entry = self._checkpoint.index.tensors[self._tensors[piece.wanted]]
        return full_name(entry.item, entry.fqn)

    def _deliver(self, piece: _Piece, start: int, scratch: NDArray[np.uint8]) -> None:
        """Copy the part of a piece that lies in `scratch`, which begins at byte `start` of the file."""
        strides = _strides(piece.chunk_lengths, piece.itemsize)
        if piece.low >= start and piece.high <= start + len(scratch):
            self._copy(piece, Box(piece.in_chunk, piece.lengths), scratch[piece.low - start :], strides)
            return
        low = max(piece.low, start)
        high = min(piece.high, start + len(scratch))
        first = (low - piece.chunk_start) // piece.itemsize
        wanted = Box(piece.in_chunk, piece.lengths)
        for run in flat_range_boxes(piece.chunk_lengths, first, (high - low) // piece.itemsize):
            if (box := run.intersect(wanted)) is not None:
                at = piece.chunk_start + sum(o * s for o, s in zip(box.offsets, strides, strict=True))
                self._copy(piece, box, scratch[at - start :], strides)

    def _copy(self, piece: _Piece, box: Box, source: NDArray[np.uint8], strides: Sequence[int]) -> None:
        """Copy a box (in the chunk's coordinates) that begins at `source` to its place in the target."""
        # With the ellipsis, what has no dimensions stays an array.
        place = (*box.relative_to(piece.in_chunk).shifted(piece.in_wanted).slices(), ...)
        if piece.wanted in self._cast:
            dtype = self._checkpoint.index.tensors[self._tensors[piece.wanted]].spec.dtype
            convert(source, dtype, box.lengths, strides, self._targets[piece.wanted][place])
        else:
            deliver(source, box.lengths, strides, self._bits[piece.wanted][place])


def _strides(lengths: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return row-major strides in bytes."""
    strides = []
    for length in reversed(lengths):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))


def _spans(
    uses: Sequence[_Piece], start: int, scratch: NDArray[np.uint8]
) -> tuple[list[_Span], list[_Piece]]:
    """Decide where each byte of a read goes, and which pieces `scratch` then has for delivery.

    Bytes of a run go straight to their target.  Where two pieces want the same bytes, everything goes to
    `scratch`.
    """
    stop = start + len(scratch)
    reach = start
    for piece in uses:
        if max(piece.low, start) < reach:
            return [_Span(start, scratch)], list(uses)
        reach = min(piece.high, stop)
    spans: list[_Span] = []
    position = start
    for piece in uses:
        if piece.direct is None:
            continue
        low, high = max(piece.low, start), min(piece.high, stop)
        if low > position:
            spans.append(_Span(position, scratch[position - start : low - start]))
        spans.append(_Span(low, piece.direct[low - piece.low : high - piece.low]))
        position = high
    if position < stop:
        spans.append(_Span(position, scratch[position - start :]))
    return spans, [piece for piece in uses if piece.direct is None]
