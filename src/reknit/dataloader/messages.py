"""All messages between a loader and its worker processes."""

from __future__ import annotations

import msgspec

from reknit.processes.channel import Message
from reknit.types.decoding import decoder


class SharedColumn(msgspec.Struct, array_like=True, frozen=True):
    """The place of a large column in the memory of a message: its path in the state, dtype, length, start."""

    path: str
    dtype: str
    length: int
    begin: int


class Open(Message):
    """To the worker, with memory that holds token sets, the recipe, and the states of sources.

    A state of None is the beginning.  `same`: the states are those of this very reader.  The memory has
    `nbytes` encoded bytes, and large `columns` of the states up to byte `end`.  The worker sends the columns
    of a source apart from its state if they have more than `inline_nbytes` bytes.
    """

    same: bool
    depth: int
    nbytes: int
    columns: list[SharedColumn]
    end: int
    inline_nbytes: int


class Consumed(Message):
    """To the worker: training has consumed so many of its batches."""

    given: int


class Prepare(Message):
    """To the worker: prepare the state after so many batches."""

    given: int


class WorkerReady(Message):
    """To the loader: the worker is ready, and has given so many batches before."""

    given: int


class BatchMade(Message):
    """To the loader, with memory that holds the columns of a batch."""

    dtype: str
    num_tokens: int
    num_samples: int


class Ended(Message):
    """To the loader: there are no more batches."""


class Prepared(Message):
    """To the loader, with memory that holds encoded states: those after so many batches.

    `shards` are source, work left, number of items, and where the room for its state begins and ends.
    `columns` are large columns that are apart from the states, by source.
    """

    given: int
    room: int
    shards: list[tuple[int, int, int, int, int]]
    columns: dict[int, list[SharedColumn]]
    nbytes: int


class Failed(Message):
    """To the loader: the worker met an error."""

    what: str


AnyMessage = Open | Consumed | Prepare | WorkerReady | BatchMade | Ended | Prepared | Failed
decode = decoder(AnyMessage)
