"""The tensors of a checkpoint one after another, in pieces of bounded size."""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.arguments import open_checkpoint
from reknit.engine.loading.match import require_covered
from reknit.engine.loading.read import RangeReader
from reknit.engine.stored.opening import opened, read_opened
from reknit.monitor.phase import Recorder
from reknit.options import MIB, LoadOptions
from reknit.types.box import Box, flat_range_boxes
from reknit.types.dtype import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.transforms.names import Names
    from reknit.types.shard import TensorSpec

    Fills = Sequence[tuple[int, Box, NDArray[Any]]]

PIECE_NBYTES = 32 * MIB
"""Bytes of tensors that are read at once by default; a reader holds at most two such pieces."""

_BATCH = 4096
"""Most boxes that are read together, so that the plan for very many tiny tensors stays small too."""

OPTIONS = LoadOptions(inflight_nbytes=32 * MIB)
"""The options with which exports read."""


class StreamPiece(NamedTuple):
    """Elements of tensor `number` of the index, flat; the pieces of a tensor come in row-major order."""

    number: int
    data: NDArray[Any]


@contextmanager
def tensors_of(path: str | PathLike[str], names: Names | None = None) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint without its values: a pickled value somewhere does not prevent reading tensors.

    `names` gives the tensors other names.  Raises `CheckpointNotFoundError`, `CorruptError`, `VersionError`,
    `StorageError`.
    """
    with closing(open_checkpoint(path)) as storage:
        options = OPTIONS if names is None else replace(OPTIONS, transforms=(names,))
        yield opened(storage, read_opened(storage, (), own=names is not None), None, options)


def stream(
    checkpoint: OpenCheckpoint,
    numbers: Sequence[int],
    nbytes: int = PIECE_NBYTES,
    options: LoadOptions = OPTIONS,
) -> Iterator[StreamPiece]:
    """Yield the tensors with these numbers, in this order, reading and verifying `nbytes` at a time.

    A large tensor comes in several pieces, small ones are read together; one without elements yields nothing.
    Where the pieces end depends on the specs only.  Raises `CorruptError`, `StorageError`.
    """
    require_covered(checkpoint.index, numbers)
    recorder = Recorder("read", path=checkpoint.storage.url)
    specs = {number: checkpoint.index.tensors[number].spec for number in numbers}
    yield from stream_with(specs, lambda fills: read_boxes(checkpoint, fills, recorder, options), nbytes)


def read_boxes(
    checkpoint: OpenCheckpoint, fills: Fills, recorder: Recorder, options: LoadOptions = OPTIONS
) -> None:
    """Fill arrays with boxes of tensors, given by number.  Raises `CorruptError`, `StorageError`."""
    checkpoint.read(lambda _: RangeReader(checkpoint, fills, options).run(recorder))


def stream_with(
    specs: Mapping[int, TensorSpec], fill: Callable[[Fills], None], nbytes: int = PIECE_NBYTES
) -> Iterator[StreamPiece]:
    """Yield tensors as `stream` does; `fill` reads boxes of some of them into arrays."""
    for batch in _batches(specs, nbytes):
        fills = [
            (number, box, np.empty(box.lengths, numpy_dtype(specs[number].dtype))) for number, box in batch
        ]
        fill(fills)
        for number, _, array in fills:
            yield StreamPiece(number, array.reshape(-1))
        # The next batch must not be allocated while this one is still held.
        del array, fills


def _batches(specs: Mapping[int, TensorSpec], nbytes: int) -> Iterator[list[tuple[int, Box]]]:
    """Group the boxes to read so that a group has at most `nbytes` bytes; a box never has more."""
    batch: list[tuple[int, Box]] = []
    held = 0
    for number, spec in specs.items():
        for box in cut_boxes(spec, nbytes):
            size = box.numel * spec.itemsize
            if batch and (held + size > nbytes or len(batch) == _BATCH):
                yield batch
                batch, held = [], 0
            batch.append((number, box))
            held += size
    if batch:
        yield batch


def cut_boxes(spec: TensorSpec, nbytes: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `nbytes` bytes (or one element), each one run in row-major order.

    Cuts lie between whole rows of as many inner dimensions as fit, so that boxes are few and large.
    """
    if not spec.numel:
        return
    most = max(nbytes // spec.itemsize, 1)
    if spec.numel <= most:
        yield Box.whole(spec.shape)
        return
    rows = (prod(spec.shape[d:]) for d in range(len(spec.shape) + 1))
    row = next(row for row in rows if row <= most)
    step = most // row * row
    for start in range(0, spec.numel, step):
        yield from flat_range_boxes(spec.shape, start, min(step, spec.numel - start))
