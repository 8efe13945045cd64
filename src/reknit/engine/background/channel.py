"""How a trainer and its agent talk: framed messages over a pair of sockets, and descriptors of arenas."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from typing import Any, NamedTuple

import msgspec

from reknit.engine.messages import (
    NO_COPIES,
    ArrayColumns,
    Copies,
    EncodedBlob,
    ShardClaims,
)
from reknit.errors import AgentError
from reknit.system import nameless_file

_HEAD = struct.Struct("<QI")
_PLAIN, _WITH_FD, _IN_FILE = range(3)
"""What the head says: the message follows, alone or with a descriptor; or it lies in a file in memory."""
_LARGE_NBYTES = 32 << 10
"""What is larger is handed over as a file: a socket is soon full, and an agent that stopped empties none."""
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of everything that is said; the class name travels with it."""


class Join(Message):
    """To the agent: open a server for the agents below, as a rank of this group of agents.

    `hosts` and `fan_out` are those of the trainers' tree, which is the agents' too, and so is `generation`;
    it is None for a process that is alone and was given none.
    """

    job: str
    rank: int
    hosts: list[int]
    fan_out: int
    generation: int | None
    comm: dict[str, Any]
    low_priority: bool


class Climb(Message):
    """To the agent: join the agent above, at the address that it gave as its own."""

    above: str


class GiveArena(Message):
    """To the agent, with a descriptor: the memory of an arena."""

    number: int
    nbytes: int


class DropArenas(Message):
    """To the agent: these arenas are used no more."""

    numbers: tuple[int, ...]


class Lend(Message):
    """To the agent, with a descriptor, before `Begin`: values of this save that lie in shared memory.

    `blobs` are the numbers of those values among the save's, and where each begins and ends.
    """

    number: int
    nbytes: int
    blobs: list[tuple[int, int, int]]


class Variables(Message):
    """To the agent, before `Begin`: the variables by which stores are reached, where some have changed.

    They are the secrets of this user, on their way to another process of this user; nothing may log them.
    """

    values: dict[str, str]

    def __repr__(self) -> str:
        return f"Variables({sorted(self.values)})"


class Begin(Message):
    """To the agent: a save begins.

    `factory` is ``module:function`` of a store that only the trainer's program registered.  `claims` is None
    where the root knows those of this plan.  `extra` is what only the root's manifest needs, as JSON.
    A `rehearsal` is no save: it ends with `Ready` instead of `Planned`, and nothing is written.  `promote_to`
    are URL and factory of the store that is to have the checkpoint too.
    """

    number: int
    write_id: str
    url: str
    factory: str | None
    step: int | None
    overwrite: bool
    options: dict[str, Any]
    extra: bytes
    plan: bytes
    claims: ShardClaims | None
    blobs: list[EncodedBlob]
    rehearsal: bool = False
    promote_to: tuple[str, str | None] | None = None
    copies: Copies = NO_COPIES


class Planned(Message):
    """To the agent: the files of a save, which the arena will hold.

    `files` are item, part and size; `ring` is the capacity that the arena is used with.  `columns` is None
    where the root knows those of this plan.
    """

    number: int
    items: list[str]
    files: list[tuple[str, int, int]]
    columns: ArrayColumns | None
    arena: int
    ring: int


class Filled(Message):
    """To the agent: a span of the arena holds its bytes."""

    number: int
    span: int


class Ready(Message):
    """To the agent: the trainer has made ready for later saves what a rehearsal is about."""

    number: int


class Abandon(Message):
    """To the agent: the trainer gave up this save; `unbegun` when that was before `Begin`."""

    number: int
    unbegun: bool
    error: dict[str, Any]
    timeout_s: float


class Quit(Message):
    """To the agent: finish what was begun, and end."""


class Seated(Message):
    """To the trainer: the agent's own address, and the rank of the agent above it."""

    address: str
    above: int | None


class Joined(Message):
    """To the trainer: the agent is part of the tree; or why it is not."""

    error: dict[str, Any] | None


class Assigned(Message):
    """To the trainer: who writes the shards that it claimed."""

    number: int
    shard_owners: bytes


class Freed(Message):
    """To the trainer: a span of the arena is written and may be filled anew."""

    number: int
    span: int


class ArenaFree(Message):
    """To the trainer: nothing of this save is read from the arena any more, whatever became of the save."""

    number: int


class SaveDone(Message):
    """To the trainer: a save ended; `records` are the phases that the agent took part in."""

    number: int
    error: dict[str, Any] | None
    nbytes: int
    num_files: int
    total_nbytes: int
    warnings: list[str]
    records: list[dict[str, Any]]


class Promoted(Message):
    """To the trainer: the promotion of a save that ended well is over, too."""

    number: int
    error: dict[str, Any] | None
    path: str
    nbytes: int
    num_files: int
    records: list[dict[str, Any]]


class Broken(Message):
    """To the trainer: the tree of agents is broken, and no later save can end well in it.

    `on_purpose`: another rank's agent has left, since its trainer ended or closed it.
    """

    on_purpose: bool


class Fell(Message):
    """To the trainer: the agent met what it cannot go on with, and ends when what was staged is written."""

    error: dict[str, Any]


AnyMessage = (
    Join
    | Climb
    | GiveArena
    | DropArenas
    | Lend
    | Variables
    | Begin
    | Planned
    | Filled
    | Ready
    | Abandon
    | Quit
    | Seated
    | Joined
    | Assigned
    | Freed
    | ArenaFree
    | SaveDone
    | Promoted
    | Broken
    | Fell
)
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


class ReceivedMessage(NamedTuple):
    """A message, and the descriptor that came with it."""

    message: Any
    fd: int | None


class Channel:
    """One end of the pair.  Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, *, send_timeout_s: float | None = None) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        if send_timeout_s is not None:
            seconds = min(int(send_timeout_s) + 1, 1 << 30)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, 0))

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message.  Raises `AgentError` when the other end is gone, or reads nothing for too long."""
        data = _encode(message)
        with self._sending:
            try:
                if fd is None and len(data) > _LARGE_NBYTES:
                    self._send_file(data)
                elif fd is None:
                    self._socket.sendall(_HEAD.pack(len(data), _PLAIN) + data)
                else:
                    socket.send_fds(self._socket, [_HEAD.pack(len(data), _WITH_FD)], [fd])
                    self._socket.sendall(data)
            except OSError as error:
                self.shut()  # what was sent in part would make nonsense of everything after it
                raise AgentError(f"the other end of the agent's socket is gone: {error}") from error
            except BaseException:  # Ctrl-C in the middle of a message
                self.shut()
                raise

    def _send_file(self, data: bytes) -> None:
        """Send a message in a file, of which only the descriptor goes through the socket."""
        fd = nameless_file("reknit-message")
        try:
            with memoryview(data) as rest:
                at = 0
                while at < len(data):
                    at += os.pwrite(fd, rest[at:], at)
            socket.send_fds(self._socket, [_HEAD.pack(len(data), _IN_FILE)], [fd])
        finally:
            os.close(fd)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something can be received, or the other end is gone; tell whether that came to be."""
        poll = select.poll()  # select.select knows no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def receive(self) -> ReceivedMessage | None:
        """Return the next message, or None when the other end is gone."""
        head, fds = bytearray(), []
        while len(head) < _HEAD.size:
            try:
                part, new, _, _ = socket.recv_fds(self._socket, _HEAD.size - len(head), 1, _CLOEXEC)
            except OSError:
                return None
            if not part:
                return None
            head += part
            fds += new
        nbytes, how = _HEAD.unpack(head)
        if how == _IN_FILE:
            return ReceivedMessage(_decoder.decode(_content(fds, nbytes)), None)
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError:
                return None
            if not count:
                return None
            view = view[count:]
        return ReceivedMessage(_decoder.decode(data), fds[0] if fds else None)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def shut(self) -> None:
        """Let both ends find the channel closed, also threads that wait for something to receive."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _content(fds: list[int], nbytes: int) -> bytearray:
    """Return what is in a file that came with a message, and close it."""
    if not fds:
        raise OSError(errno.EMFILE, "a message came without its file: too many files are open")
    data, at = bytearray(nbytes), 0
    try:
        while at < nbytes:
            count = os.preadv(fds[0], [memoryview(data)[at:]], at)
            if not count:
                raise OSError(errno.EIO, "the file of a message is too short")
            at += count
    finally:
        os.close(fds[0])
    return data
