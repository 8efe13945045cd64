"""How a loader and its worker processes talk: framed messages over a pair of sockets, and shared memory."""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import Any

import msgspec

from reknit.errors import DeadlineError, ReknitError

_HEAD = struct.Struct("<I?")


class WorkerMessage(msgspec.Struct, array_like=True, tag=True):
    """Base of everything that is said; the class name travels with it."""


class Open(WorkerMessage):
    """To the worker, with memory that holds the encoded states of sources: what to read, and from where.

    `sets` are name, opener, encoded arguments, ratio and partitions.  `sources` without a state are read from
    the beginning.  `same`: the states are those of this very reader.
    """

    sets: list[tuple[str, str, bytes, float, int]]
    recipe: dict[str, Any]
    sources: list[int]
    same: bool
    depth: int
    nbytes: int


class Consumed(WorkerMessage):
    """To the worker: training has had so many batches of it."""

    given: int


class Prepare(WorkerMessage):
    """To the worker: the state after so many batches will be asked for."""

    given: int


class WorkerReady(WorkerMessage):
    """To the loader: the worker is ready, and has given so many batches before."""

    given: int


class BatchMade(WorkerMessage):
    """To the loader, with memory that holds the columns of a batch."""

    dtype: str
    num_tokens: int
    num_samples: int


class Ended(WorkerMessage):
    """To the loader: there are no more batches."""


class Prepared(WorkerMessage):
    """To the loader, with memory that holds encoded states: those after so many batches.

    `shards` are source, work left, number of items, and where the room for its state begins and ends.
    """

    given: int
    room: int
    shards: list[tuple[int, int, int, int, int]]
    nbytes: int


class Failed(WorkerMessage):
    """To the loader: the worker met an error."""

    what: str


AnyMessage = Open | Consumed | Prepare | WorkerReady | BatchMade | Ended | Prepared | Failed
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


class WorkerChannel:
    """One end of the pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: WorkerMessage, fd: int | None = None) -> None:
        """Send a message, and close the descriptor that goes with it.  Raises `OSError`."""
        try:
            data = _encode(message)
            head = _HEAD.pack(len(data), fd is not None)
            if fd is None:
                self._socket.sendall(head + data)
            else:
                socket.send_fds(self._socket, [head], [fd])
                self._socket.sendall(data)
        finally:
            if fd is not None:
                os.close(fd)

    def ready(self, timeout_s: float | None = 0.0) -> bool:
        """Wait until something can be received, or the other end is gone; tell whether that came to be."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def receive(self, timeout_s: float | None = None) -> tuple[Any, int | None] | None:
        """Return the next message and its descriptor, or None when the other end is gone.

        Raises `DeadlineError`.
        """
        if not self.ready(timeout_s):
            raise DeadlineError(f"nothing was heard for {timeout_s:g} s")
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1)
            head += self._exactly(_HEAD.size - len(head)) if head else b""
            if not head:
                return None
            nbytes, with_fd = _HEAD.unpack(head)
            message = _decoder.decode(self._exactly(nbytes))
        except (OSError, EOFError):
            return None
        if with_fd != bool(fds):
            raise ReknitError("shared memory of a loader's worker got lost: no file descriptor is free")
        return message, fds[0] if fds else None

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            part = self._socket.recv(nbytes - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
