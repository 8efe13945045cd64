"""Rounds between processes: a tree of gRPC calls, one per rank and round, guarded by a token of each server.

A rank calls the one above it with everything that its subtree asks, and the reply of that call is everything
that its subtree is told.  A second call, which stays open as long as both live, tells each side when the
other is gone.  Nothing here knows what a round is about.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import grpc

from reknit.comm import faults
from reknit.comm.message import Hello, Outcome, Report, decode, encode
from reknit.comm.node import Node
from reknit.comm.rounds import Rounds
from reknit.comm.topology import Topology
from reknit.comm.tree_server import SERVICE, TOKEN, WATCHING, Server, settings
from reknit.errors import CommError, DeadlineError, ProtocolError, ReknitError, UsageError, from_wire
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.rendezvous import Store
    from reknit.options import CommOptions

_TELL_S = 2.0
_PAUSE_S = (0.02, 1.0)


class _Uplink:
    """The connection of a rank to the one above it."""

    def __init__(self, address: str, above: int, token: str, options: CommOptions) -> None:
        self.above, self._limit = above, options.max_message_nbytes
        self._metadata = ((TOKEN, token),)
        self._channel = grpc.insecure_channel(address, options=settings(options))
        self._lock = threading.Lock()
        self._asking: Any = None
        self._sending: Any = None
        self._telling: Any = None
        self._closed = False
        self.refused = False

    def greet(self, hello: Hello, timeout_s: float) -> None:
        """Check that the rank above is there and of the same job; `refused` tells of a wrong token."""
        call = self._begin("hello", hello, timeout_s)
        error = self._result(call, f"did not answer within {timeout_s:g} s").error
        if error is not None:
            raise from_wire(error)

    def watch(self, hello: Hello, lost: Callable[[ReknitError], object], timeout_s: float) -> None:
        """Call `lost` once, from another thread, when the group breaks or the rank above is gone.

        Return when the rank above notices our end likewise; raises `CommError` when that takes too long.
        """

        def ended(call: Any) -> None:
            try:
                error = self._result(call, "ended").error
            except CommError as failure:
                lost(failure)
            else:
                lost(from_wire(error or {}))

        call = self._watching = self._begin("watch", hello, None)
        limit = threading.Timer(min(timeout_s, faults.FOREVER_S), call.cancel)
        limit.start()
        try:
            signs = call.initial_metadata() or ()  # waits for it, or for the end of the call
        finally:
            limit.cancel()
        if WATCHING not in (name for name, _ in signs):
            raise from_wire(self._result(call, "ended").error or {})
        call.add_done_callback(ended)

    def ask(self, report: Report, timeout_s: float, overdue: str) -> Outcome:
        """Send a report, and wait for its outcome."""
        call = self._asking = self._begin("round", report, timeout_s)
        try:
            return self._result(call, overdue)
        finally:
            call.cancel()  # no effect on a call that ended; an interrupted one must not look alive above

    def send(self, report: Report) -> None:
        """Send a report of failure whose outcome nobody here waits for."""
        self._sending = self._call("round", report, _TELL_S)  # a call that nothing refers to is cancelled

    def tell(self, error: ReknitError) -> None:
        """Tell the rank above that the group is broken; `close` waits a moment until it heard."""
        with self._lock:
            if not self._closed:
                self._telling = self._call("tell", Outcome(error=error.to_wire()), _TELL_S)

    def close(self) -> None:
        """End every call and the connection."""
        with self._lock:
            self._closed = True
        if self._asking is not None:
            self._asking.cancel()
        if self._telling is not None:
            # Whoever does not hear it sees the connection break next.
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError, grpc.FutureTimeoutError):
                self._telling.result(timeout=_TELL_S)
        self._channel.close()

    def _begin(self, method: str, message: Hello | Report, timeout_s: float | None) -> Any:
        with self._lock:
            if self._closed:
                raise CommError("the connection is closed")
            return self._call(method, message, timeout_s)

    def _call(self, method: str, message: Hello | Report | Outcome, timeout_s: float | None) -> Any:
        if method == "watch":
            # The same on the wire, but what gRPC takes for a stream can be seen to begin before it ends.
            stream = self._channel.stream_unary(SERVICE + method, None, None)
            return stream.future(iter([encode(message)]), timeout=timeout_s, metadata=self._metadata)
        stub = self._channel.unary_unary(SERVICE + method, None, None)
        return stub.future(encode(message), timeout=timeout_s, metadata=self._metadata)

    def _result(self, call: Any, overdue: str) -> Outcome:
        """Return the outcome of a call, or raise what its failure means."""
        try:
            return decode(call.result(), Outcome, self._limit)
        except grpc.FutureCancelledError as error:
            raise CommError(f"the call to rank {self.above} was cancelled") from error
        except grpc.RpcError as error:
            raise self._meaning(call.code(), call.details() or "", overdue) from error

    def _meaning(self, code: grpc.StatusCode, details: str, overdue: str) -> CommError:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"rank {self.above} {overdue}")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return faults.gone(self.above, details)
        self.refused = code is grpc.StatusCode.UNAUTHENTICATED
        remedy = None
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            remedy = "give every rank the same CommOptions.max_message_nbytes"
        return CommError(f"the call to rank {self.above} failed: {code.name}: {details}", remedy=remedy)


class Seat:
    """The place of a rank in the tree: the ranks below can reach it as soon as there is one.

    `address` is what they need for that, the address of its server and the token that lets them in, or empty
    for a rank with none below it.  Whoever knows it can take part in the job: tell it to nobody else.
    """

    def __init__(self, rank: int, size: int, job: str, options: CommOptions) -> None:
        """Use `TreeGroup.listen`."""
        if not 0 <= rank < size:
            raise UsageError(f"rank must be within 0 .. size - 1, not {rank} of {size}")
        self.rank, self.size = rank, size
        self._options, self._topology = options, Topology(size, options.fan_out)
        self._hello = Hello(job, rank, size, options.fan_out)
        self._node = Node(rank, self._topology, job)
        self._farewell = faults.closed(rank)
        self._lock = threading.Lock()
        self._uplink: _Uplink | None = None
        self._climbed = False
        self._closed = threading.Event()
        has_children = len(self._node.ranks) > 1
        self._server = Server(self._node, self._hello, options, self._tell) if has_children else None
        self.address = self._server.address if self._server is not None else ""
        atexit.register(self.close)

    def climb(self, above: str | Callable[[float], str]) -> TreeGroup:
        """Join the group: return when this rank reached the rank above it.

        `above` is the address of that rank's seat, empty on rank 0; or, where it may be out of date, a
        function that looks it up, called at each attempt with the seconds that are left.  Raises
        `DeadlineError` when the rank above cannot be reached within `CommOptions.connect_timeout_s`,
        `ProtocolError` when it is of another job, size or shape, `CommError` when a given address carries a
        wrong token, or the seat is closed meanwhile.  After an error the seat can climb again.
        """
        if self._climbed:
            raise UsageError(f"rank {self.rank} has joined its group already")
        parent = self._topology.parent(self.rank)
        if isinstance(above, str) and (" " in above) != (parent is not None):
            needed = "no address" if parent is None else f"the address of the seat of rank {parent}"
            raise UsageError(f"rank {self.rank} needs {needed} to join its group")
        uplink = None if parent is None else self._reach(parent, above)
        with self._lock:
            self._check()
            self._climbed = True
        if self._node.broken is not None:
            self._tell(self._node.broken)  # a rank below was lost before there was anyone to tell
        rounds = Rounds(self._node, self._topology, self._options.max_message_nbytes, uplink)
        return TreeGroup(self, rounds)

    @property
    def broken(self) -> bool:
        """Whether the group is known to be broken."""
        return self._node.broken is not None

    def on_broken(self, callback: Callable[[ReknitError], object]) -> None:
        """Call `callback` once, from a thread of its own, when the group is broken, or at once if it is.

        A group breaks when a rank is gone or closes it.  When this rank closes it first, nothing is called.
        """

        def wait() -> None:
            error = self._node.until_broken()
            if error is not self._farewell:
                callback(faults.copied(error))

        threading.Thread(target=wait, name="reknit-broken", daemon=True).start()

    def close(self) -> None:
        """Leave the group, joined or not: rounds fail on every rank.  Closing twice does nothing."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        atexit.unregister(self.close)
        if self._node.break_off(self._farewell):
            self._tell(self._farewell)
        if self._server is not None:
            self._server.stop()
        if self._uplink is not None:
            self._uplink.close()

    def _reach(self, parent: int, above: str | Callable[[float], str]) -> _Uplink:
        """Return the connection to the rank above; from now on each of the two notices the other's end."""
        deadline, pause_s = Deadline(self._options.connect_timeout_s), _PAUSE_S[0]
        while True:
            self._check()
            seat = above if isinstance(above, str) else above(deadline.remaining())
            address, _, token = seat.partition(" ")
            with self._lock:
                self._check()
                uplink = self._uplink = _Uplink(address, parent, token, self._options)
            try:
                uplink.greet(self._hello, max(deadline.remaining(), _PAUSE_S[0]))
                uplink.watch(self._hello, self._node.break_off, max(deadline.remaining(), _PAUSE_S[0]))
                return uplink
            except ProtocolError:
                uplink.close()
                raise
            except CommError as error:
                uplink.close()
                if uplink.refused and isinstance(above, str):
                    raise faults.stranger(parent, address) from error
                if deadline.passed():
                    raise faults.unreachable(parent, address, deadline.seconds, error.message) from error
            except BaseException:
                uplink.close()
                raise
            self._closed.wait(min(pause_s, deadline.remaining()))
            pause_s = min(_PAUSE_S[1], pause_s * 2)

    def _check(self) -> None:
        if self._closed.is_set():
            raise faults.copied(self._farewell)

    def _tell(self, error: ReknitError) -> None:
        with self._lock:
            uplink = self._uplink if self._climbed else None
        if uplink is not None:
            uplink.tell(error)


class TreeGroup:
    """Ranks in processes of their own, on any hosts that reach each other by TCP."""

    def __init__(self, seat: Seat, rounds: Rounds) -> None:
        """Use `join`, or `listen` and then `Seat.climb`."""
        self.rank, self.size = seat.rank, seat.size
        self._seat, self._rounds = seat, rounds

    @classmethod
    def join(cls, store: Store, rank: int, size: int, *, job: str, options: CommOptions) -> TreeGroup:
        """Join the group of `job`: return when this rank reached the rank above it, and can be reached.

        `job` names one run of the job: a restarted job takes another name.  Raises `DeadlineError` when the
        rank above does not appear within `options.connect_timeout_s`, `ProtocolError` when it is of another
        size or shape, `CommError` when this rank cannot listen.
        """
        seat = cls.listen(rank, size, job=job, options=options)
        above = Topology(size, options.fan_out).parent(rank)

        def look_up(timeout_s: float) -> str:
            # The store may still hold what an earlier run left under this name, until that rank is there.
            return store.get(_key(job, above), timeout_s).decode()

        try:
            if seat.address:
                store.set(_key(job, rank), seat.address.encode())
            return seat.climb("" if above is None else look_up)
        except BaseException:
            seat.close()
            raise

    @classmethod
    def listen(cls, rank: int, size: int, *, job: str, options: CommOptions) -> Seat:
        """Take a seat, for ranks that share no store: others carry its address to the ranks below it.

        `Topology(size, options.fan_out).parent(rank)` says whose address a rank needs to climb.  The ranks
        may climb in any order.  Raises `CommError` when this rank cannot listen.
        """
        return Seat(rank, size, job, options)

    @property
    def broken(self) -> bool:
        """Whether the group is known to be broken."""
        return self._seat.broken

    def exchange(
        self, name: str, request: bytes, decide: Callable[[list[bytes]], Sequence[bytes]], timeout_s: float
    ) -> bytes:
        """Hold one round, as `Group.exchange` says; errors may take up to 5 s longer than `timeout_s`."""
        return self._rounds.hold(name, request, decide, timeout_s)

    def on_broken(self, callback: Callable[[ReknitError], object]) -> None:
        """Call `callback` when the group breaks, as `Seat.on_broken` says."""
        self._seat.on_broken(callback)

    def close(self) -> None:
        """Leave the group: later rounds fail on every rank.  Closing twice does nothing."""
        self._seat.close()


def _key(job: str, rank: int | None) -> str:
    return f"reknit/{job}/address/{rank}"
