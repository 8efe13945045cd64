"""The fetches that a rank holds for others or waits for, and the ring in shared memory that carries them.

Ranks of one host share memory: a ring that many read, and packets about its content.

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
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from reknit.engine.messages import StoppedError
from reknit.errors import CommError, DeadlineError, UsageError, shortage
from reknit.events.phase import Deadline
from reknit.processes.channel import receive_with_fds
from reknit.processes.shared_memory import SharedMemory
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.planner.sharing import FetchTable

    Bytes = NDArray[np.uint8]


OTHER_HOSTS = -1
"""Stands for all ranks of other hosts, which get a fetch in one exchange."""


class RingSlot:
    """Room for fetches in the ring; `turn` is the exchange that filled it, -1 if this rank did."""

    def __init__(self, at: int, memory: Bytes, turn: int = -1) -> None:
        self.at, self.memory, self.turn = at, memory, turn
        self.holds: set[int] = set()


class HeldFetch(Struct, frozen=True):
    """A fetch in a slot, from byte `at` of the ring on, and who has not copied it yet.

    That can be this rank itself, and `OTHER_HOSTS`.
    """

    slot: RingSlot
    at: int
    memory: Bytes
    waiting: set[int]


def batches_of(part: FetchTable, rank: int, cell_nbytes: int) -> list[list[int]]:
    """Return the rows that a rank reads from storage, in batches that fit in a slot.

    Those of a batch travel in the same exchange between hosts, or in none.
    """
    batches: list[list[int]] = []
    filling: dict[bool, tuple[int, int, list[int]]] = {}
    for row in (part.reader == rank).nonzero()[0].tolist():
        turn, nbytes = int(part.turn[row]), aligned(int(part.nbytes[row]))
        of_turn, filled, batch = filling.get(turn < 0, (turn, cell_nbytes, []))
        if of_turn != turn or filled + nbytes > cell_nbytes:
            filled, batch = 0, []
            batches.append(batch)
        batch.append(row)
        filling[turn < 0] = turn, filled + nbytes, batch
    return batches


def aligned(nbytes: int) -> int:
    """Return the bytes of a slot that a fetch takes up."""
    return -(-nbytes // 64) * 64


def num_slots(batches: Sequence[Sequence[int]], part: FetchTable, wanted: int) -> int:
    """Return the slots that a rank's ring needs: `wanted`, unless there is less to read, or more at once."""
    turns = Counter(int(part.turn[batch[0]]) for batch in batches)
    # The rows of one exchange are in the ring all at once.
    together = max((count for turn, count in turns.items() if turn >= 0), default=0)
    return min(len(batches), max(wanted, together + 1))


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


class _Peer(Struct, frozen=True):
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


LOOK_S = 0.5
"""How often a thread that waits looks at deadlines, and whether the group of ranks is broken."""
_GRACE_S = 10.0
"""How much longer a rank stays in step with other hosts, so that all meet their deadlines there."""


class Arrival(Struct, frozen=True):
    """A fetch that another rank read, for a worker to copy; `done` is called afterwards."""

    row: int
    memory: Bytes
    done: Callable[[], None]


class FetchTracker:
    """The state of one rank's part in a shared read; `changed` guards it and wakes waiting threads.

    `part` lists the fetches, `paths` has the file of each of its rows, and `under_way` names the files that
    are being read from storage.  `free` are the slots of the ring that can be filled, and `held` the fetches
    that other ranks have not copied yet.  `arrived` are the fetches that workers of this rank have to copy,
    and `to_come` the numbers of the fetches that other ranks read.
    """

    def __init__(
        self,
        *,
        rank: int,
        part: FetchTable,
        paths: Sequence[str],
        link: HostLink | None,
        under_way: Callable[[], str],
        broken: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.is_open = False
        self.free: list[RingSlot] = []
        self.held: dict[int, HeldFetch] = {}
        self.arrived: deque[Arrival] = deque()
        self.to_come = set(part.number[part.reader != rank].tolist())
        self.num_reading = 0
        """Workers that are reading from storage."""
        self.in_exchange = ""
        """The exchange with other hosts in which this rank is waiting for them, or for a device."""
        self.deadline, self._latest = Deadline(timeout_s), Deadline(timeout_s + _GRACE_S)
        self._rank, self._part, self._paths = rank, part, paths
        self._link, self._under_way, self._broken = link, under_way, broken
        self._row = {number: row for row, number in enumerate(part.number.tolist())}
        self._owed = Counter(part.taker.tolist())
        self._uncopied = Counter[int]()
        """By exchange between hosts: how many of its fetches are not copied yet by all."""

    def opened(self, free: list[RingSlot]) -> None:
        """Let threads use the ring."""
        with self.changed:
            self.free, self.is_open = free, True
            self.changed.notify_all()

    def hold(self, row: int, held: HeldFetch) -> None:
        """Keep a fetch until all have copied it, and announce it to the ranks of this host that want it."""
        part, number = self._part, int(self._part.number[row])
        takers = part.taker[part.taker_first[row] : part.taker_first[row + 1]].tolist()
        held.waiting.update([self._rank, *takers])
        with self.changed:
            self.held[number] = held
            self._uncopied[held.slot.turn] += 1
            self.changed.notify_all()
        for rank in takers:
            assert self._link is not None
            self._link.ready(rank, number, held.at)

    def arrive(self, arrival: Arrival) -> None:
        """Let a worker copy a fetch of another rank."""
        with self.changed:
            self.arrived.append(arrival)
            self.changed.notify_all()

    def all_copied(self, turn: int) -> bool:
        """Return whether all ranks have copied the bytes of an exchange between hosts."""
        return not self._uncopied[turn]

    # Calls of the link to other ranks of this host.

    def ready(self, rank: int, number: int, memory: Bytes) -> None:
        """Let a worker copy a fetch out of another rank's ring."""
        assert self._link is not None
        self.arrive(Arrival(self._row[number], memory, partial(self._link.taken, rank, number)))

    def taken(self, number: int, rank: int) -> None:
        """Note that a rank has copied a fetch; the last one frees its slot."""
        with self.changed:
            held = self.held[number]
            held.waiting.discard(rank)
            self._owed[rank] -= 1
            if not held.waiting:
                del self.held[number]
                self._uncopied[held.slot.turn] -= 1
                held.slot.holds.discard(number)
                if held.slot.turn < 0 and not held.slot.holds:
                    self.free.append(held.slot)
            self.changed.notify_all()

    def source_ended(self, rank: int) -> None:
        """Fail when a rank has left that this one still needs something from."""
        source = self._part.source
        with self.changed:
            is_early = any(source[self._row[number]] == rank for number in self.to_come)
        if is_early:
            self.failed(StoppedError(f"rank {rank} has left the exchange"))

    def taker_ended(self, rank: int) -> None:
        """Fail when a rank has left that has not taken all that it wanted."""
        if self._owed[rank] > 0:
            self.failed(StoppedError(f"rank {rank} has left the exchange"))

    def failed(self, error: BaseException) -> None:
        """Keep the first error, and wake all threads."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    # Waiting, and its end.

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once something is so; raise an error that came meanwhile."""
        with self.changed:
            while not ready():
                self.check()
                self.wait_for_change()

    def wait_for_change(self) -> None:
        """Sleep until something has changed or it is time to `check`; `changed` is held."""
        self.changed.wait(min(LOOK_S, self.deadline.remaining()))

    def check(self) -> None:
        """Raise the error that ends the exchange early."""
        if self.error is not None:
            raise self.error
        self._check(self.deadline)

    def is_late(self) -> bool:
        """Return whether not even other hosts are waited for any longer."""
        return self._latest.passed()

    def check_other_hosts(self) -> None:
        """Raise the error that keeps this rank from going on in step with other hosts; no error of its own
        does.

        A rank that left an exchange in the middle would keep the others waiting, and spoil the process group.
        """
        self._check(self._latest)

    def _check(self, deadline: Deadline) -> None:
        if self._broken():
            raise StoppedError("the group of ranks is broken")
        if deadline.passed():
            raise self.late()

    def late(self) -> DeadlineError:
        """Return the error that names the fetches that were late."""
        return DeadlineError(f"{self.doing()} did not finish within {self.deadline.seconds:g} s")

    def doing(self) -> str:
        """Name the files that this rank is reading, or else the fetches that it waits for."""
        if self.num_reading:
            return self._under_way()
        part, within = self._part, f"{self.in_exchange}, " if self.in_exchange else ""
        with self.changed:
            rows = [self._row[number] for number in sorted(self.to_come)]
            waiting = {rank for held in self.held.values() for rank in held.waiting}
        if rows:
            readers = ", ".join(map(str, sorted(set(part.reader[rows].tolist()))[:8]))
            first = self._paths[rows[0]]
            return f"{within}waiting for {len(rows)} ranges, such as of {first}, that rank {readers} reads"
        takers = ", ".join(map(str, sorted(waiting - {self._rank, OTHER_HOSTS})[:8])) or "of another host"
        return f"{within}waiting for rank {takers} to take the bytes read for it"
