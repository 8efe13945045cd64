"""A worker process of a token loader: reads ahead, and has its state ready when a save is planned."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from typing import Any

import numpy as np

from reknit.dataloader import token_sets as say
from reknit.dataloader.reader import Reader, VersionedReader
from reknit.dataloader.token_sets import (
    Corpus,
    Recipe,
    TokenSet,
    joined,
    mapped_columns,
    next_page,
    opened_by,
    parted,
    write_columns,
)
from reknit.format.blob_codec import decode_blobs, encode_value, name_of_value
from reknit.processes.channel import Channel, map_file, nameless_file, write_at

_ROOM = 4096 + 16
"""Bytes before each encoded state, where its name in the checkpoint will stand (`types.shard.Encoded`)."""


class _Worker:
    """Answers messages first, then prepares the state for a save, and reads ahead in the rest of the time."""

    def __init__(self, channel: Channel, reader: VersionedReader, wanted: say.Open) -> None:
        self._channel, self._reader, self._depth = channel, reader, wanted.depth
        self._inline_nbytes = wanted.inline_nbytes
        self._wanted: set[int] = set()
        self._sent_end = False

    def run(self) -> None:
        """Work until the loader exits."""
        while True:
            while self._channel.wait(0.0 if self._has_work() else None):
                received = self._channel.receive()
                if received is None:
                    return
                self._receive(received.message)
            if due := sorted(given for given in self._wanted if self._reader.has(given)):
                self._wanted.discard(due[0])
                self._prepare(due[0])
            elif self._may_make():
                self._make()

    def _has_work(self) -> bool:
        return self._may_make() or any(self._reader.has(given) for given in self._wanted)

    def _may_make(self) -> bool:
        return not self._sent_end and self._reader.ahead <= self._depth

    def _receive(self, message: Any) -> None:
        if isinstance(message, say.Consumed):
            self._reader.consumed(message.given)
            # A save that was planned for an earlier batch did not come.
            self._wanted = {given for given in self._wanted if given >= message.given}
        elif isinstance(message, say.Prepare):
            self._wanted.add(message.given)

    def _make(self) -> None:
        batch = self._reader.make()
        if batch is None:
            self._sent_end = True
            self._channel.send(say.Ended())
            return
        fd, at = nameless_file("reknit-loader-batch"), 0
        try:
            for part in (batch.bounds, batch.samples, batch.tokens):
                write_at(fd, at, np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
                at += part.nbytes
            made = say.BatchMade(batch.tokens.dtype.str, len(batch.tokens), len(batch.samples))
            self._channel.send(made, fd)
        finally:
            os.close(fd)

    def _prepare(self, given: int) -> None:
        """Encode the state after so many batches into shared memory."""
        fd, at, shards = nameless_file("reknit-loader-state"), 0, []
        places: dict[int, list[say.SharedColumn]] = {}
        try:
            for shard in self._reader.shards(given):
                state, columns = parted(shard.source, shard.value, self._inline_nbytes)
                data = encode_value(state)
                write_at(fd, at + _ROOM, data)
                shards.append((shard.source, shard.left, shard.num_items, at, at + _ROOM + len(data)))
                at += _ROOM + len(data)
                if columns:
                    places[shard.source], at = write_columns(fd, at, columns)
                at = next_page(at)
            nbytes = max(at, 1)  # nothing cannot be mapped
            os.ftruncate(fd, nbytes)
            self._channel.send(say.Prepared(given, _ROOM, shards, places, nbytes=nbytes), fd)
        finally:
            os.close(fd)


def _opened(channel: Channel) -> _Worker | None:
    """Open the data that the loader asks for; None if the loader has exited already."""
    received = channel.receive()
    if received is None:
        return None
    wanted, fd = received
    assert fd is not None
    memory = memoryview(map_file(fd, wanted.end))
    os.close(fd)
    what = decode_blobs(name_of_value("") + bytes(memory[: wanted.nbytes]))[""]
    columns = mapped_columns(memory, wanted.columns)
    states = {source: joined(state, columns) for source, state in what["states"].items()}
    sets = [TokenSet(**one | {"open": opened_by(*one["open"].split(":"))}) for one in what["sets"]]
    reader = Reader(Corpus(sets), Recipe(**what["recipe"]), states, same=wanted.same)
    versioned = VersionedReader(reader)
    channel.send(say.WorkerReady(versioned.made))
    return _Worker(channel, versioned, wanted)


def main(fd: int) -> None:
    """Serve the loader at the other end of a socket until it exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the trainer, with which this process ends
    channel = Channel(socket.socket(fileno=fd), say.decode)
    try:
        worker = _opened(channel)
        if worker is not None:
            worker.run()
    except BrokenPipeError:
        return  # the loader is gone
    except Exception as error:  # any error of the data's own code; the loader raises it in its place
        text = "".join(traceback.format_exception(error))
        channel.send(say.Failed(f"{type(error).__name__}: {error}\n{text}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
