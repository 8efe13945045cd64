"""The two ends of a connection between ranks of one host: frames through a Unix socket.

A frame is a kind, the number of the call that it belongs to, and a message.  A thread serves all connections
of an end.  Only that thread uses them, and it never waits for a single one.  So a rank that is stopped delays
no other, and Ctrl-C in a rank's own thread cuts off no frame.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reknit.comm import round_errors
from reknit.comm.meeting.addresses import PrivateSocket, socket_path
from reknit.comm.rank_messages import (
    NOWHERE,
    OVERHEAD_NBYTES,
    Hello,
    News,
    Outcome,
    Reply,
    Report,
    beyond_limit,
    decode,
    encode,
)
from reknit.errors import CommError, DeadlineError, ProtocolError, ReknitError, UsageError, from_wire, typed
from reknit.events.phase import Deadline
from reknit.options import UNIX
from reknit.system import aside, socket_pair, start_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from reknit.comm.group import Topology
    from reknit.comm.tree.rounds import OnEnd, Rounds, Visit
    from reknit.options import CommOptions

    OnReply = Callable[[bytes | ReknitError], object]

TOKEN, WATCH, ROUND, DROP, NEWS = range(5)
"""The kinds of frames; an answer has those of its call, and the end of the group has the number 0."""

HEADER = struct.Struct("<BQQ")
"""The kind, the number, and the size of the message that follows."""

SPARE_CONNECTIONS = 64
"""The number of connections of processes that are not ranks yet, beyond two for each rank below."""

PATIENCE_S = 10.0
"""How long such a connection may say nothing."""

_READ_NBYTES = 1 << 18
_LONGEST_S = 3600.0
_PAUSE_S = 0.05
_FLUSH_S = 2.0
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)

_log = logging.getLogger("reknit.comm")


class Wire:
    """One connection: bytes that wait to be sent, and the beginning of a frame that is not complete."""

    def __init__(self, connection: socket.socket, max_nbytes: int) -> None:
        """Take over a connection; a message above `max_nbytes` is left out."""
        self.socket = socket.socket(fileno=aside(connection.detach()))
        self.socket.settimeout(0)
        self.fd, self.max_nbytes = self.socket.fileno(), max_nbytes
        self.due: Deadline | None = None
        """When `Loop.overdue` is called."""
        self.unsent, self._begun = bytearray(), bytearray()
        self._left_out = 0
        """Bytes of a message above the limit that are still to come."""

    def send(self, kind: int, number: int, message: bytes = b"") -> None:
        """Send a frame as far as the connection takes it; `flush` sends the rest."""
        self.unsent += HEADER.pack(kind, number, len(message)) + message
        self.flush()

    def flush(self) -> None:
        """Send the waiting bytes, as far as the connection takes them."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent, _NO_SIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # reading finds the end

    def read(self) -> bool:
        """Read bytes that have come; return whether the connection is still open."""
        try:
            data = self.socket.recv(_READ_NBYTES)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        out = min(self._left_out, len(data))
        self._left_out -= out
        self._begun += data[out:]
        return bool(data)

    def frames(self) -> Iterator[tuple[int, int, bytes | ReknitError]]:
        """Yield the frames that are complete; an error in the place of a message above the limit."""
        begun = self._begun
        while len(begun) >= HEADER.size:
            kind, number, nbytes = HEADER.unpack_from(begun)
            end = HEADER.size + nbytes
            is_fit = nbytes <= self.max_nbytes
            if is_fit and len(begun) < end:
                return
            self._left_out = max(0, end - len(begun))
            message = bytes(begun[HEADER.size : end]) if is_fit else beyond_limit(nbytes, self.max_nbytes)
            del begun[:end]
            yield kind, number, message


_Wire = TypeVar("_Wire", bound=Wire)


class Loop(Generic[_Wire]):
    """A thread for the connections of one end, and for the jobs that other threads give it."""

    def __init__(self) -> None:
        self.wires: dict[int, _Wire] = {}
        self._bell, self._ear = socket_pair()
        self._bell.settimeout(0)
        self.doors: dict[int, Callable[[], object]] = {self._ear.fileno(): self._read_rings}
        """The functions to call when descriptors of other kinds can be read."""
        self._jobs: deque[Callable[[], object]] = deque()
        self.closing: Deadline | None = None
        """When a close of this end stops waiting, once it has begun."""
        self._over = False
        self._thread: threading.Thread | None = None

    # The parts of an end, called in the thread of the loop.

    def received(self, wire: _Wire, kind: int, number: int, message: bytes | ReknitError) -> None:
        """Take a frame."""

    def ended(self, wire: _Wire) -> None:
        """Note the end of a connection."""

    def overdue(self, wire: _Wire) -> None:
        """Act on a connection whose time is over."""

    def settle(self) -> None:
        """Send the frames that have become due."""

    def done(self, closing: Deadline | None) -> bool:
        """Return whether the thread may end; `closing` is set once this rank closes."""
        return closing is not None and closing.passed()

    def hang_up(self, wire: _Wire) -> None:
        """End a connection; data that the kernel has taken still arrive."""
        if self.wires.get(wire.fd) is wire:
            del self.wires[wire.fd]
            wire.socket.close()
            self.ended(wire)

    def _run(self) -> None:
        try:
            while self._jobs or not self.done(self.closing):
                self._turn()
        finally:
            self._finish()

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        polled = select.poll()
        for fd in self.doors:
            polled.register(fd, select.POLLIN)
        for fd, wire in self.wires.items():
            polled.register(fd, select.POLLIN | (select.POLLOUT if wire.unsent else 0))
        dues = [self.closing, *(wire.due for wire in self.wires.values())]
        wait_s = min([due.remaining() for due in dues if due is not None], default=_LONGEST_S)
        for fd, events in polled.poll(1 + int(1000 * min(wait_s, _LONGEST_S))):
            if fd in self.doors:
                self.doors[fd]()
            elif (served := self.wires.get(fd)) is not None:
                self._serve(served, events)
        self._work()
        for wire in list(self.wires.values()):
            if wire.due is not None and wire.due.passed():
                wire.due = None
                self.overdue(wire)
        self.settle()

    def _read_rings(self) -> None:
        with suppress(OSError):  # closed before the thread began
            self._ear.recv(_READ_NBYTES)

    def _serve(self, wire: _Wire, events: int) -> None:
        wire.flush()
        if events == select.POLLOUT:
            return
        is_open = wire.read()
        try:
            for frame in wire.frames():
                self.received(wire, *frame)
        except Exception:  # a bug; the peer must not wait for an answer
            _log.exception("a connection between ranks of this host is given up")
            is_open = False
        if not is_open:
            self.hang_up(wire)

    def _work(self) -> None:
        while self._jobs:
            with suppress(IndexError):  # another thread did it
                self._jobs.popleft()()

    def _finish(self) -> None:
        for wire in list(self.wires.values()):
            self.hang_up(wire)
        self._over = True
        self._work()
        self.shut()

    # For any thread.

    def start(self) -> None:
        """Start the thread.  Raises `ShortageError`."""
        _loops.add(self)
        self._thread = start_thread("reknit-comm", self._run)

    def submit(self, job: Callable[[], object]) -> None:
        """Let the thread do a job; do it here if the thread has ended."""
        self._jobs.append(job)
        self.ring()
        if self._over:
            self._work()

    def ring(self) -> None:
        """Wake the thread, since something is due."""
        with suppress(OSError):  # it has been rung for already, or has ended
            self._bell.send(b"\0")

    def stop(self, grace_s: float) -> None:
        """End all connections, once this end is done or `grace_s` are over."""
        self.closing = self.closing or Deadline(grace_s)
        self.ring()
        if self._thread is None:
            self._finish()
        else:
            self._thread.join(grace_s + round_errors.GRACE_S)

    def shut(self) -> None:
        """Close all descriptors without a word."""
        for end in (self._bell, self._ear, *(wire.socket for wire in self.wires.values())):
            end.close()


_loops: weakref.WeakSet[Loop[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for loop in list(_loops):
        loop.shut()


# A forked worker with an open connection would hide the death of the rank from its neighbours.
os.register_at_fork(after_in_child=_after_fork)


class HostUplink(Loop[Wire]):
    """A rank's calls to its parent, rank `above` at `address`; `hello` is its first message."""

    def __init__(self, address: str, above: int, token: str, hello: Hello, options: CommOptions) -> None:
        super().__init__()
        self.above, self._hello, self._limit = above, hello, options.max_message_nbytes
        self._path, self._token = socket_path(address), token.encode()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, OnReply] = {}
        self._asking = 0
        self._group_over = False
        self._lost: Callable[[ReknitError], object] | None = None
        self.refused = False
        """Whether the rank above refused the token."""

    def greet(self, timeout_s: float) -> None:
        """Check that the parent answers, and takes the token."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(0)
            try:
                connection.connect(self._path)
            except OSError as error:
                raise round_errors.disconnected(self.above, str(error)) from error
            wire = Wire(connection, self._limit + OVERHEAD_NBYTES)
        self.wires[wire.fd] = wire
        self.start()
        self._exchange(TOKEN, self._token, timeout_s)

    def watch(self, lost: Callable[[ReknitError], object], timeout_s: float) -> None:
        """Call `lost`, from another thread, when the group breaks or the rank above ends.

        It returns when the rank above watches this rank in the same way; raises `ProtocolError` if that does
        not belong to the same job and tree, `CommError` when it takes too long.  Before the rank above ends,
        it sends this rank the outcome of its last report.
        """

        def begin() -> None:
            self._lost = lost

        self._exchange(WATCH, encode(self._hello), timeout_s, begin)

    def ask(self, report: Report, timeout_s: float, on_end: OnEnd) -> None:
        """Send a report; `on_end` is called once, with its outcome or the error that prevented one.

        The machine gives up at its deadline, and a call that is open costs nothing, so it has no limit here.
        """

        def end(reply: bytes | ReknitError) -> None:
            try:
                done = reply if isinstance(reply, ReknitError) else decode(reply, Outcome, self._limit)
            except Exception as error:  # the round must end in any case
                done = typed(error)
            on_end(done)

        message = encode(report)
        self._asking = next(self._numbers)
        self._call(ROUND, self._asking, message, end)

    def drop(self) -> None:
        """Take back the call of `ask` if it is open: the parent sees that this rank is interrupted."""
        number, self._asking = self._asking, 0
        if self._waiting.pop(number, None) is not None:
            self.submit(partial(self._send, DROP, number))

    def send(self, report: Report) -> None:
        """Send a report of failure without waiting for its outcome."""
        self.submit(partial(self._send, ROUND, next(self._numbers), encode(report)))

    def notify(self, error: ReknitError) -> None:
        """Send the parent the error that broke the group."""
        hello = self._hello
        news = News(hello.job, hello.generation, hello.rank, error.to_wire())
        self.submit(partial(self._send, NEWS, next(self._numbers), encode(news)))

    def close(self) -> None:
        """End the connection once all has been sent, or after 2 s.  Closing twice does nothing."""
        self.stop(_FLUSH_S)

    def _exchange(
        self, kind: int, message: bytes, timeout_s: float, accepted: Callable[[], object] = int
    ) -> None:
        """Send a message, and return when it is answered; call `accepted` before anything else is read."""
        answered: Future[None] = Future()

        def end(reply: bytes | ReknitError) -> None:
            try:
                if isinstance(reply, ReknitError):
                    raise reply
                if (error := decode(reply, Reply, self._limit).error) is not None:
                    self.refused = kind == TOKEN
                    raise from_wire(error)
                accepted()
                answered.set_result(None)
            except ReknitError as error:
                answered.set_exception(error)

        self._call(kind, next(self._numbers), message, end)
        if not wait([answered], min(timeout_s, round_errors.FOREVER_S)).done:
            raise DeadlineError(f"rank {self.above} did not answer within {timeout_s:g} s")
        answered.result()

    def _call(self, kind: int, number: int, message: bytes, end: OnReply) -> None:
        self._waiting[number] = end
        self.submit(partial(self._send, kind, number, message))

    # For the thread of the loop.

    def _send(self, kind: int, number: int, message: bytes = b"") -> None:
        for wire in self.wires.values():
            wire.send(kind, number, message)
        if not self.wires:
            self._answer(number, CommError("the connection is closed"))
        self._end_if_unused()

    def _answer(self, number: int, reply: bytes | ReknitError) -> None:
        if (end := self._waiting.pop(number, None)) is not None:  # None: dropped, or nobody waits
            end(reply)

    def received(self, wire: Wire, kind: int, number: int, message: bytes | ReknitError) -> None:
        """Take an answer, or the end of the group."""
        if number:
            self._answer(number, message)
        elif isinstance(message, bytes) and self._lost is not None:
            self._group_over = True
            self._lost(from_wire(decode(message, Reply, self._limit).error or {}))
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        """Let the parent exit if the group is closed and this rank waits for no outcome."""
        for wire in list(self.wires.values()) if self._group_over and not self._waiting else ():
            self.hang_up(wire)

    def ended(self, wire: Wire) -> None:
        """Fail all calls; listeners come before the round's error."""
        error = round_errors.disconnected(self.above)
        if self._lost is not None and not self._group_over:
            self._lost(error)
        for number in list(self._waiting):
            self._answer(number, error)

    def done(self, closing: Deadline | None) -> bool:
        """Return whether the connection has ended, or may end since all has been sent."""
        sent = closing is not None and not any(wire.unsent for wire in self.wires.values())
        return sent or not self.wires or super().done(closing)


class Below(Wire):
    """A connection from below: of rank `child` once that has joined, with its call that waits here."""

    child: int | None = None
    is_trusted = False
    """Whether its token was right."""
    visit: Visit | None = None
    number = 0
    """The number of the call of that visit."""
    has_end = False


def most_strangers(num_below: int) -> int:
    """Return the number of connections of processes that are not ranks yet, at a rank with ranks below."""
    return 2 * num_below + SPARE_CONNECTIONS


class HostServer(Loop[Below]):
    """The server of a rank: answers the ranks below from its rounds.

    `host` is the value of `bind` for other groups of this host; the ranks below need only `address`.
    """

    host = UNIX

    def __init__(
        self,
        rounds: Rounds,
        hello: Hello,
        topology: Topology,
        options: CommOptions,
        _: object = None,
        *,
        door: PrivateSocket | None = None,
    ) -> None:
        """Listen, or take over a `door` where the ranks below may connect already."""
        if topology.num_hosts > 1:
            raise UsageError(
                f"CommOptions.bind='unix' connects ranks of one host, and these are on {topology.num_hosts}",
                remedy="leave it out, or give an address that the other hosts can reach",
            )
        super().__init__()
        self._rounds, self._rank, self._limit = rounds, hello.rank, options.max_message_nbytes
        self._unattached = set(topology.children(hello.rank))
        self._most_strangers = most_strangers(len(self._unattached))
        self._has_logged = False
        try:
            self._door = door or PrivateSocket.listen(self._most_strangers)
        except BaseException:
            super().shut()
            raise
        self._listener, self.address = self._door.socket, self._door.address
        self._token = self._door.token.encode()
        try:
            self._listener.settimeout(0)
            self.doors[self._listener.fileno()] = self._accept
            rounds.on_change = self.ring
            self.start()
        except BaseException:
            self.stop()
            raise

    def stop(self, grace_s: float | None = None) -> None:
        """Wait until the ranks below have received their outcomes and the end of the group, and have left."""
        super().stop(round_errors.GRACE_S if grace_s is None else grace_s)
        self._door.remove()

    def shut(self) -> None:
        """Close all descriptors without a word."""
        self._listener.close()
        super().shut()

    # For the thread of the loop.

    def done(self, closing: Deadline | None) -> bool:
        """Return whether no rank below is left, while this rank closes the group."""
        left = closing is not None and all(wire.child is None for wire in self.wires.values())
        return left or super().done(closing)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many open files, for example; the one who waits is not gone
            time.sleep(_PAUSE_S)
            return
        if sum(wire.child is None for wire in self.wires.values()) >= self._most_strangers:
            connection.close()  # a rank tries again
            return
        wire = Below(connection, len(self._token))
        wire.due = Deadline(PATIENCE_S)
        self.wires[wire.fd] = wire

    def received(self, wire: Below, kind: int, number: int, message: bytes | ReknitError) -> None:
        """Take a call; without the token, nothing of it is read."""
        try:
            if not wire.is_trusted:
                self._check_token(wire, kind, message)
            elif isinstance(message, ReknitError):
                raise message
            else:
                self._take(wire, kind, number, message)
            if kind in (TOKEN, WATCH):
                wire.send(kind, number, encode(Reply()))
        except ReknitError as error:
            refusal = NOWHERE.outcome(error=error) if kind == ROUND else Reply(error.to_wire())
            wire.send(kind, number, encode(refusal))
            if not wire.is_trusted:
                self.hang_up(wire)

    def _check_token(self, wire: Below, kind: int, message: bytes | ReknitError) -> None:
        given = message if kind == TOKEN and isinstance(message, bytes) else b""
        if not secrets.compare_digest(given, self._token):
            if not self._has_logged:
                self._has_logged = True
                _log.warning("rank %d refused a process of this host: wrong token", self._rank)
            raise CommError(f"rank {self._rank} has another token")
        wire.is_trusted, wire.max_nbytes = True, self._limit + OVERHEAD_NBYTES

    def _take(self, wire: Below, kind: int, number: int, message: bytes) -> None:
        """Take a call of a process with the token; raises `ReknitError` for one that does not fit here."""
        if kind == WATCH:
            wire.child, wire.due = self._rounds.attach(decode(message, Hello, self._limit)), None
            self._unattached.discard(wire.child)
            if not self._unattached:  # a killed job would leave the name behind
                self._door.remove()
        elif wire.child is None or kind not in (ROUND, DROP, NEWS):
            raise ProtocolError("a process sends messages of a rank before it has joined, or of no kind")
        elif kind == NEWS:
            self._rounds.receive_news(decode(message, News, self._limit))
        elif kind == ROUND:
            self._attend(wire, number, decode(message, Report, self._limit))
        elif wire.visit is not None and wire.number == number:
            visit, wire.visit, wire.due = wire.visit, None, None
            self._rounds.leave(visit)

    def _attend(self, wire: Below, number: int, report: Report) -> None:
        if report.sender != wire.child:
            raise round_errors.duplicate_rank(report.sender)
        visit = self._rounds.attend(report)
        if wire.visit is not None and not wire.visit.over and wire.visit.number == visit.number:
            return  # it took back its report, and waits only for the outcome of the first
        wire.visit, wire.number = visit, number
        wire.due = Deadline(round_errors.NOTICE_S) if report.opens else None

    def settle(self) -> None:
        """Send the end of the group, and the outcomes that are there; listeners come before an error."""
        broken = self._rounds.broken
        for wire in [wire for wire in self.wires.values() if wire.child is not None]:
            if broken is not None and not wire.has_end:
                wire.has_end = True
                wire.send(WATCH, 0, encode(Reply(broken.to_wire())))
            if (visit := wire.visit) is not None and visit.over:
                wire.visit = wire.due = None
                if visit.outcome is not None:
                    wire.send(ROUND, wire.number, encode(visit.outcome))

    def overdue(self, wire: Below) -> None:
        """Hang up on who says nothing; log that a rank waits for this one."""
        if wire.child is None:
            self.hang_up(wire)
        elif wire.visit is not None:
            self._rounds.note_own_absence(wire.visit)

    def ended(self, wire: Below) -> None:
        """Break the group if that was a rank."""
        if wire.child is not None:
            self._rounds.break_off(round_errors.disconnected(wire.child), wire.child)
        if wire.visit is not None:
            self._rounds.leave(wire.visit)
