"""The loader's end of a worker process: takes batches from it, and its state as of the last one taken."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.dataloader import token_sets as say
from reknit.dataloader.reader import COLUMNS, Batch
from reknit.dataloader.token_sets import mapped_columns, parted, write_columns
from reknit.errors import DeadlineError, ReknitError, shortage
from reknit.format.blob_codec import encode_value
from reknit.plugins.framework import LoaderShard
from reknit.processes import start_child
from reknit.processes.channel import Channel, Message, map_file, nameless_file, write_at
from reknit.system import output_of_child, socket_pair
from reknit.types.shard import INLINE_NBYTES, Encoded, SharedFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.dataloader.token_sets import Recipe, TokenSet

_REAP_S = 10.0


class ProcessWorker:
    """Starts a process that reads the sources in `states`; it ends when its loader ends."""

    def __init__(
        self,
        sets: Sequence[TokenSet],
        recipe: Recipe,
        states: Mapping[int, Any],
        *,
        same: bool,
        depth: int,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._made: deque[Batch | None] = deque()
        self._prepared: dict[int, list[LoaderShard]] = {}
        self._asked: set[int] = set()
        self._given: int | None = None
        entries = [{**vars(one), "open": one.opener, "arguments": dict(one.arguments)} for one in sets]
        inside, columns = dict[int, Any](), dict[str, Any]()
        for source, state in states.items():
            inside[source], large = parted(source, state, INLINE_NBYTES)
            columns |= large
        data = encode_value({"sets": entries, "recipe": asdict(recipe), "states": inside})
        ours, theirs = socket_pair()
        self._channel = Channel(ours, say.decode)
        fd = nameless_file("reknit-loader-states")
        try:
            write_at(fd, 0, data)
            places, end = write_columns(fd, len(data), columns)
            self._process = start_child(
                "reknit.dataloader.worker", theirs.fileno(), stdout=output_of_child(1)
            )
            opening = say.Open(same, depth, len(data), columns=places, end=end, inline_nbytes=INLINE_NBYTES)
            self._send(opening, fd)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(fd)

    @property
    def given(self) -> int:
        """How many batches were taken from this reader, before it was saved or since."""
        while self._given is None:
            self._receive()
        return self._given

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def take(self) -> Batch | None:
        """Return the next batch, or None at the end of the data."""
        given = self.given
        while not self._made:
            self._receive()
        batch = self._made.popleft()
        if batch is not None:
            self._given = given + 1
            self._prepared = {count: kept for count, kept in self._prepared.items() if count > given}
            self._send(say.Consumed(given + 1))
        return batch

    def prepare(self, given: int) -> None:
        """Ask the process to prepare the state after so many batches."""
        if given not in self._asked:
            self._asked = {count for count in self._asked if count >= self.given} | {given}
            self._send(say.Prepare(given))

    def shards(self) -> list[LoaderShard]:
        """Return the state as of the last batch that was taken, encoded; at once if it was prepared."""
        given = self.given
        self.prepare(given)
        while given not in self._prepared:
            self._receive()
        return self._prepared[given]

    def leave(self) -> None:
        """Close the channel, whereupon the process ends."""
        self._channel.close()

    def close(self) -> None:
        """Wait for the end of the process, or kill it."""
        self._channel.close()
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # stuck in the data's own code, perhaps
            self._process.kill()
            self._process.wait()

    def _send(self, message: Message, fd: int | None = None) -> None:
        with contextlib.suppress(OSError):  # a worker that is gone has sent why, or `_receive` will notice
            self._channel.send(message, fd)

    def _receive(self) -> None:
        """Take the next message.  Raises the worker's error."""
        if not self._channel.wait(self._timeout_s):
            raise DeadlineError(
                f"a worker of the data loader gave nothing for {self._timeout_s:g} s",
                remedy="find out why reading the data takes so long, or raise timeout_s",
            )
        try:
            received = self._channel.receive()
        except OSError as error:
            failure = ReknitError(f"a message of a data-loader worker was lost: {error}")
            raise shortage(error) or failure from error
        if received is None:
            raise ReknitError(
                f"a worker of the data loader ended with status {self._process.wait()}",
                remedy="see its output; a negative status is the signal that killed it",
            )
        message, fd = received
        if isinstance(message, say.WorkerReady):
            self._given = message.given
        elif isinstance(message, say.BatchMade):
            assert fd is not None
            self._made.append(_batch(message, fd))
        elif isinstance(message, say.Ended):
            self._made.append(None)
        elif isinstance(message, say.Prepared):
            assert fd is not None
            self._prepared[message.given] = _shards(message, SharedFile(fd, message.nbytes))
        elif isinstance(message, say.Failed):
            raise ReknitError(f"a worker of the data loader failed: {message.what}")


def _batch(made: say.BatchMade, fd: int) -> Batch:
    """Return a batch whose arrays are the memory that the worker filled."""
    samples = made.num_samples * len(COLUMNS)
    tokens_at = 8 * (made.num_samples + 1 + samples)
    memory = memoryview(map_file(fd, tokens_at + made.num_tokens * np.dtype(made.dtype).itemsize))
    os.close(fd)
    numbers = np.frombuffer(memory[:tokens_at], np.int64)
    tokens = np.frombuffer(memory[tokens_at:], made.dtype)
    bounds = numbers[: made.num_samples + 1]
    return Batch(tokens, bounds, numbers[made.num_samples + 1 :].reshape(-1, len(COLUMNS)))


def _shards(prepared: say.Prepared, file: SharedFile) -> list[LoaderShard]:
    """Return shards whose values are the memory in which the worker encoded them."""
    memory = memoryview(map_file(file.fd, prepared.nbytes))
    shards = []
    for source, left, num_items, begin, end in prepared.shards:
        arrays = mapped_columns(memory, prepared.columns.get(source, []))
        state = Encoded(memory[begin:end], prepared.room, file, begin, arrays)
        shards.append(LoaderShard(source, 0, 0, left, num_items, state))
    return shards
