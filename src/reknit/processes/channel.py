"""Messages between two processes: framed msgpack over a pair of sockets, with files in memory."""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import struct
import tempfile
import threading
from array import array
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from reknit.errors import ShortageError, UsageError
from reknit.system import aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


SHARED_FOLDER = "/dev/shm"

# Errors of the kernel when less memory might do.
_TOO_LARGE = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EOVERFLOW}


def nameless_file(name: str) -> int:
    """Return the descriptor of an empty file in memory, or else on disk, that has no name in any folder.

    A sandbox may refuse the one call that is meant for this.  Raises `ShortageError`.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            return aside(os.memfd_create(name, os.MFD_CLOEXEC))
    for folder in (SHARED_FOLDER, None):
        with suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return aside(os.dup(file.fileno()))
    raise ShortageError(
        "there is no memory that processes can share: memfd_create is refused, "
        f"and files in {SHARED_FOLDER}, and temporary files",
        remedy="allow one of them, or point TMPDIR to a folder where files can be made",
    )


def write_at(fd: int, start: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a file, which grows if it has to.

    Missing memory is an `OSError` here; in a mapping the kernel would answer with a signal.
    """
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, start)
        rest, start = rest[count:], start + count


def map_file(fd: int, nbytes: int) -> mmap.mmap:
    """Map the first bytes of a file, which need not stay open.

    Raises `UsageError` if it has fewer than `nbytes`, since touching missing bytes would kill this process,
    and `MemoryError` if it cannot be mapped.
    """
    require_size(fd, nbytes)
    with memory_errors(nbytes):
        return mmap.mmap(fd, nbytes)


def require_size(fd: int, nbytes: int) -> None:
    """Raise `UsageError` if a file has fewer bytes than are to be mapped."""
    found = os.fstat(fd).st_size
    if not 0 < nbytes <= found:
        raise UsageError(f"shared memory of {found} bytes has no {nbytes} bytes to map")


@contextmanager
def memory_errors(nbytes: int) -> Iterator[None]:
    """Translate the kernel's errors about too little memory to `MemoryError`."""
    try:
        yield
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in _TOO_LARGE:
            raise
        raise MemoryError(f"no room for {nbytes} bytes of shared memory: {error}") from error


_HEAD = struct.Struct("<QI")
_WITH_FD, _IN_FILE = 1, 2
"""Flags in the head: a descriptor comes with the message; the message lies in a file in memory."""
_LARGE_NBYTES = 32 << 10
"""Larger messages go as files in memory: a socket is soon full, and a stopped receiver never empties it."""
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

_encode = msgspec.msgpack.Encoder().encode


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; the class name travels with each."""


class ReceivedMessage(NamedTuple):
    """A message, and the descriptor that came with it, which the receiver closes."""

    message: Any
    fd: int | None


class Channel:
    """One end of the pair.  Any thread may send; one thread receives.

    `decode` turns bytes into one of the messages that this end may receive.  Without `send_timeout_s` a send
    waits as long as the other end reads nothing.
    """

    def __init__(
        self, sock: socket.socket, decode: Callable[[bytearray], Any], *, send_timeout_s: float | None = None
    ) -> None:
        self._socket = sock
        self._decode = decode
        self._sending = threading.Lock()
        if send_timeout_s is not None:
            seconds = min(int(send_timeout_s) + 1, 1 << 30)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", seconds, 0))

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message, and a descriptor, which stays open here.

        Raises `OSError` when the other end is gone, or reads nothing for too long.
        """
        data = _encode(message)
        flags, fds = (0, []) if fd is None else (_WITH_FD, [fd])
        file = None
        with self._sending:
            try:
                if len(data) > _LARGE_NBYTES:
                    file = nameless_file("reknit-message")
                    write_at(file, 0, data)
                    flags, fds = flags | _IN_FILE, [file, *fds]
                packet = _HEAD.pack(len(data), flags) + (b"" if flags & _IN_FILE else data)
                sent = socket.send_fds(self._socket, [packet], fds) if fds else 0
                if sent < len(packet):
                    self._socket.sendall(packet[sent:])
            except BaseException:  # after half a message the other end cannot find the next one
                self.shut()
                raise
            finally:
                if file is not None:
                    os.close(file)

    def try_send(self, message: Message) -> bool:
        """Send a message, and return whether the other end still exists, without an error if it does not."""
        with suppress(OSError):
            self.send(message)
            return True
        return False

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until a message can be received, or the other end is gone; return False after `timeout_s`."""
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def receive(self) -> ReceivedMessage | None:
        """Return the next message, or None when the other end is gone.

        Raises `OSError` if a descriptor was lost, since this process has too many files open.
        """
        fds: list[int] = []
        try:
            head = self._read(_HEAD.size, fds)
            if head is None:
                return None
            nbytes, flags = _HEAD.unpack(head)
            if len(fds) != bool(flags & _WITH_FD) + bool(flags & _IN_FILE):
                raise OSError(errno.EMFILE, "a message came without its descriptor: too many files are open")
            if flags & _IN_FILE:
                data: bytearray | None = _content(fds[0], nbytes)
            elif nbytes > _LARGE_NBYTES:
                raise OSError(errno.EBADMSG, f"a message of {nbytes} bytes came outside a file")
            else:
                data = self._read(nbytes, fds)
            if data is None:
                return None
            message = self._decode(data)
            return ReceivedMessage(message, fds.pop() if flags & _WITH_FD else None)
        finally:
            for fd in fds:
                os.close(fd)

    def _read(self, nbytes: int, fds: list[int]) -> bytearray | None:
        """Return so many bytes, and append the descriptors that come with them; None at the end."""
        data = bytearray()
        while len(data) < nbytes:
            try:
                part, new = receive_with_fds(self._socket, nbytes - len(data), 2)
            except OSError:
                return None
            fds += new
            if not part:
                return None
            data += part
        return data

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


def receive_with_fds(sock: socket.socket, nbytes: int, max_fds: int) -> tuple[bytes, list[int]]:
    """Return at most so many bytes, and the descriptors that came with them, which no child inherits.

    `socket.recv_fds` does not help: it ignores its flags.
    """
    found = array("i")
    data, ancillary, _, _ = sock.recvmsg(nbytes, socket.CMSG_LEN(max_fds * found.itemsize), _CLOEXEC)
    for level, kind, numbers in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(numbers[: len(numbers) - len(numbers) % found.itemsize])
    return data, list(found)


def _content(fd: int, nbytes: int) -> bytearray:
    """Return the message in a file."""
    found = os.fstat(fd).st_size
    if found != nbytes:
        raise OSError(errno.EBADMSG, f"a message of {nbytes} bytes came in a file of {found} bytes")
    data, at = bytearray(nbytes), 0
    while at < nbytes:
        count = os.preadv(fd, [memoryview(data)[at:]], at)
        if not count:
            raise OSError(errno.EIO, "the file of a message was cut short")
        at += count
    return data
