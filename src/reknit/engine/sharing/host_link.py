"""Ranks of one host share memory: a ring that many read, and packets about its content.

Each rank has a ring of its own, in shared memory.  It connects to every rank that takes fetches from it,
passes it the memory, and says where each fetch is; the taker answers when it has copied it.  If a connection
ends while something is outstanding, the other rank is gone or has failed.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reknit.errors import CommError, UsageError, shortage
from reknit.processes.channel import receive_with_fds
from reknit.processes.shared_memory import SharedMemory
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

_HELLO = struct.Struct("<16sQQ")
"""The token of the rank that is called, the caller's rank, and the size of the memory that comes with it."""
_READY = struct.Struct("<QQ")
"""Number of a fetch, and where it begins in the ring."""
_TAKEN = struct.Struct("<Q")
"""Number of a fetch."""
_CREDENTIALS = struct.Struct("3i")


class LinkListener(Protocol):
    """Calls of a link to its user, in the thread that listens."""

    def ready(self, rank: int, number: int, memory: NDArray[np.uint8]) -> None:
        """Note that a fetch lies at the beginning of `memory`, in the ring of a rank."""

    def taken(self, number: int, rank: int) -> None:
        """Note that a rank has copied a fetch out of this rank's ring."""

    def source_ended(self, rank: int) -> None:
        """Note that a rank whose ring this one reads has left."""

    def taker_ended(self, rank: int) -> None:
        """Note that a rank that reads this rank's ring has left."""

    def failed(self, error: BaseException) -> None:
        """Take the error of the link itself, after which no call follows."""


class _Peer(NamedTuple):
    """A rank from which this one takes: the connection that it made, and its ring."""

    socket: socket.socket
    ring: SharedMemory


class HostLink:
    """This rank's connections with other ranks of its host, for one load.

    The others connect to `address`; a process with this address, of the same user, can take part.
    """

    @classmethod
    def available(cls) -> bool:
        """Return whether this system supports a link."""
        return hasattr(socket, "SO_PEERCRED")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._token = secrets.token_bytes(16)
        name = secrets.token_hex(16)
        self.address = f"{name}{self._token.hex()}"
        # An abstract name: it is gone with the socket, and only processes of this network namespace see it.
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(f"\0reknit-{name}")
        self._door.listen(1024)
        self._door.settimeout(0.0)
        self._wake, self._woken = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._takers: dict[int, socket.socket] = {}
        self._sources: dict[int, _Peer] = {}
        self._callers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._join: Callable[[], None] | None = None

    def open(self, ring: SharedMemory | None, takers: Mapping[int, str], listener: LinkListener) -> None:
        """Give `ring` to the `takers` (rank: address), and begin to listen.

        Without a ring they are notified that this rank has left.  Raises `CommError` when one of them cannot
        be reached; the others are connected all the same, so that they notice when this rank leaves.
        """
        failures = []
        for rank, address in takers.items():
            try:
                self._takers[rank] = self._connect(rank, address, ring)
            except CommError as error:
                failures.append(error)
        self._join = start_thread("reknit-host-link", lambda: self._listen(listener)).join
        if failures:
            raise failures[0]

    def ready(self, rank: int, number: int, at: int) -> None:
        """Announce to a taker that a fetch begins at byte `at` of this rank's ring."""
        with suppress(OSError):  # the listening thread notices the end of the connection
            self._takers[rank].send(_READY.pack(number, at))

    def taken(self, rank: int, number: int) -> None:
        """Report to a rank that a fetch has been copied out of its ring."""
        with self._lock:
            source = self._sources.get(rank)
        if source is not None:
            with suppress(OSError):
                source.socket.send(_TAKEN.pack(number))

    def close(self) -> None:
        """End all connections, and let go of the others' memory."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.send(b"x")
        try:
            if self._join is not None:
                self._join()
        finally:
            for source in self._sources.values():
                source.socket.close()
                source.ring.close()
            for end in (*self._takers.values(), *self._callers, self._door, self._wake, self._woken):
                end.close()

    def _connect(self, rank: int, address: str, ring: SharedMemory | None) -> socket.socket:
        name, token = address[:32], bytes.fromhex(address[32:])
        peer = None
        try:
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.connect(f"\0reknit-{name}")
            if ring is None:
                peer.send(_HELLO.pack(token, self._rank, 0))
            else:
                socket.send_fds(peer, [_HELLO.pack(token, self._rank, ring.nbytes)], [ring.fd])
        except OSError as error:
            if peer is not None:
                peer.close()
            raise CommError(f"rank {rank} of this host cannot be reached: {error}") from error
        return peer

    # The thread that listens.  The data of a selector's connection is the function to call for a packet.

    def _listen(self, listener: LinkListener) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(self._door, selectors.EVENT_READ, self._admit)
                for rank, taker in self._takers.items():
                    selector.register(taker, selectors.EVENT_READ, partial(self._receive_taker, rank))
                while not self._closing.is_set():
                    for key, _ in selector.select():
                        if key.data is not None:
                            key.data(selector, listener)
        except BaseException as error:  # also a bug: threads that wait for a call must receive it
            listener.failed(error)

    def _admit(self, selector: selectors.BaseSelector, _: LinkListener) -> None:
        """Accept a connection from the same user; its first packet has to say who it is."""
        try:
            peer, _ = self._door.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has left again
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            peer.close()
            return
        peer.settimeout(0.0)
        self._callers.add(peer)
        selector.register(peer, selectors.EVENT_READ, partial(self._greet, peer))

    def _greet(self, peer: socket.socket, selector: selectors.BaseSelector, listener: LinkListener) -> None:
        """Take a caller's first packet: a rank of this job has the token, and sends its ring."""
        selector.unregister(peer)
        self._callers.discard(peer)
        hello, fds = b"", list[int]()
        with suppress(OSError):  # as good as nothing said
            hello, fds = receive_with_fds(peer, _HELLO.size, 1)
        if len(hello) != _HELLO.size or not secrets.compare_digest(hello[:16], self._token):
            for fd in fds:
                os.close(fd)
            peer.close()
            return
        _, rank, nbytes = _HELLO.unpack(hello)
        try:
            ring = SharedMemory(fds.pop(), nbytes)
        except (IndexError, UsageError, MemoryError, OSError) as error:
            peer.close()
            if nbytes:
                unusable = CommError(f"the memory of rank {rank} of this host cannot be used: {error}")
                raise shortage(error) or unusable from error
            listener.source_ended(rank)
            return
        peer.settimeout(None)
        with self._lock:
            self._sources[rank] = _Peer(peer, ring)
        selector.register(peer, selectors.EVENT_READ, partial(self._receive_source, rank))

    def _receive_source(self, rank: int, selector: selectors.BaseSelector, listener: LinkListener) -> None:
        """Take one packet of a rank from which this one takes."""
        source = self._sources[rank]
        packet = _packet(source.socket)
        if len(packet) == _READY.size:
            number, at = _READY.unpack(packet)
            listener.ready(rank, number, source.ring.bytes[at:])
        else:
            selector.unregister(source.socket)
            listener.source_ended(rank)

    def _receive_taker(self, rank: int, selector: selectors.BaseSelector, listener: LinkListener) -> None:
        """Take one packet of a rank that takes from this one."""
        packet = _packet(self._takers[rank])
        if len(packet) == _TAKEN.size:
            listener.taken(_TAKEN.unpack(packet)[0], rank)
        else:
            selector.unregister(self._takers[rank])
            listener.taker_ended(rank)


def _packet(peer: socket.socket) -> bytes:
    """Return the next packet, nothing when the other end is gone."""
    try:
        return peer.recv(64)
    except OSError:
        return b""
