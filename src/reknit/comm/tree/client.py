"""A rank's connection to its parent in the tree."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import grpc

from reknit.comm import round_errors
from reknit.comm.rank_messages import (
    FIRST_NBYTES,
    OVERHEAD_NBYTES,
    News,
    Outcome,
    Reply,
    decode,
    divided,
    encode,
    joined,
)
from reknit.comm.serving import TOKEN, channel, channel_settings
from reknit.comm.tree.server import SERVICE, WATCHING
from reknit.errors import CommError, DeadlineError, ReknitError, from_wire
from reknit.system import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.rank_messages import Hello, Report
    from reknit.comm.tree.rounds import OnEnd
    from reknit.options import CommOptions

_NOTIFY_S = 2.0

_READERS = 2
"""Threads that wait for an outcome: one for this round's, one for that of a round that was just given up."""


class Uplink:
    """A rank's calls to its parent, rank `above` at `address`; `hello` is its first message."""

    def __init__(self, address: str, above: int, token: str, hello: Hello, options: CommOptions) -> None:
        self.above, self._hello, self._limit = above, hello, options.max_message_nbytes
        self._metadata = ((TOKEN, token),)
        self.channel = channel(address, options, channel_settings())
        self._readers = DaemonExecutor("reknit-comm", _READERS)
        self._lock = threading.Lock()
        self._asking: Any = None
        self._sending: Any = None
        self._notifying: Any = None
        self._staying: Any = None
        self._num_read = 0
        self._over = False
        self._closed = False
        self._lost: Callable[[ReknitError], object] | None = None
        self.refused = False
        """Whether the rank above refused the token."""

    def greet(self, timeout_s: float) -> None:
        """Check that the parent answers and belongs to the same job and tree."""
        call = self._unary("hello", encode(self._hello), timeout_s)
        error = self._reply(call, f"did not answer within {timeout_s:g} s").error
        if error is not None:
            raise from_wire(error)

    def watch(self, lost: Callable[[ReknitError], object], timeout_s: float) -> None:
        """Call `lost`, from another thread, when the group breaks or the rank above ends.

        It returns when the rank above watches this rank in the same way; raises `CommError` when that takes
        too long.  Both use one call that stays open.  Before the rank above ends, it sends this rank the
        outcome of its last report.
        """

        def ended(call: Any) -> None:
            try:
                error = from_wire(self._reply(call, "ended").error or {})
            except CommError as failure:
                error = failure
            self._over = True
            lost(error)
            self._stay_no_longer()

        with self._lock:
            self._check()
            # The same on the wire, but the beginning of a stream can be seen before its end.
            stream = self.channel.stream_unary(SERVICE + "watch", None, None)
            call = self._watching = stream.future(iter([encode(self._hello)]), metadata=self._metadata)
        # It waits for these data, or for the end of the call.
        starting = self._readers.submit(call.initial_metadata)
        if not wait([starting], min(timeout_s, round_errors.FOREVER_S)).done:
            call.cancel()  # type: ignore[no-untyped-call]
        if WATCHING not in (name for name, _ in starting.result() or ()):
            raise from_wire(self._reply(call, "ended").error or {})
        self._staying = self._unary("stay", encode(self._hello), None)
        self._lost = lost
        call.add_done_callback(ended)

    def ask(self, report: Report, timeout_s: float, on_end: OnEnd) -> None:
        """Send a report; `on_end` is called once, with its outcome or the error that prevented one."""
        message = encode(report)
        with self._lock:
            call = None if self._closed else self._stream("round", message, timeout_s)
            self._asking = call
            self._num_read += call is not None
        if call is None:
            on_end(CommError("the connection is closed"))
        else:
            self._readers.submit(self._read, call, on_end)

    def drop(self) -> None:
        """Cancel the call of `ask` if it is open, so that the parent sees that this rank is interrupted."""
        with self._lock:
            call, self._asking = self._asking, None
        if call is not None:
            call.cancel()

    def send(self, report: Report) -> None:
        """Send a report of failure without waiting for its outcome."""
        message = encode(report)
        with self._lock:
            if not self._closed:  # a call that nothing refers to is cancelled
                self._sending = self._stream("round", message, _NOTIFY_S)

    def notify(self, error: ReknitError) -> None:
        """Send the parent the error that broke the group; `close` waits up to 2 s for its answer."""
        hello = self._hello
        news = encode(News(hello.job, hello.generation, hello.rank, error.to_wire()))
        with contextlib.suppress(CommError):  # of a closed connection: its end says the same
            self._notifying = self._unary("tell", news, _NOTIFY_S)

    def close(self) -> None:
        """Cancel all calls and close the connection."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self.drop()
        try:
            if self._notifying is not None:
                # A parent that does not receive it sees the connection break next.
                with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError, grpc.FutureTimeoutError):
                    self._notifying.result(timeout=_NOTIFY_S)
        finally:
            self.channel.close()
            self._readers.shutdown()

    def _stay_no_longer(self) -> None:
        """Let the parent exit if the group is closed and this rank waits for no outcome."""
        with self._lock:
            staying = None if self._num_read or not self._over else self._staying
        if staying is not None:
            staying.cancel()

    def _check(self) -> None:
        if self._closed:
            raise CommError("the connection is closed")

    def _unary(self, method: str, message: bytes, timeout_s: float | None) -> Any:
        with self._lock:
            self._check()
            stub = self.channel.unary_unary(SERVICE + method, None, None)
            return stub.future(message, timeout=timeout_s, metadata=self._metadata)

    def _stream(self, method: str, message: bytes, timeout_s: float) -> Any:
        chunks = divided(message)
        if len(message) <= FIRST_NBYTES:
            # The same on the wire; but for a stream, gRPC would start a thread.
            stub = self.channel.unary_stream(SERVICE + method, None, None)
            return stub(next(chunks), timeout=timeout_s, metadata=self._metadata)
        stream = self.channel.stream_stream(SERVICE + method, None, None)
        return stream(chunks, timeout=timeout_s, metadata=self._metadata)

    def _read(self, call: Any, on_end: OnEnd) -> None:
        """Wait until the call of a report ends."""
        try:
            on_end(self._end(call))
        finally:
            with self._lock:
                self._num_read -= 1
            self._stay_no_longer()

    def _end(self, call: Any) -> Outcome | ReknitError:
        """Return the outcome of a report's call, or the error that prevented one."""
        end: Outcome | ReknitError
        try:
            end = decode(joined(call, self._limit + OVERHEAD_NBYTES), Outcome, self._limit)
        except grpc.RpcError:
            end = self._meaning(call, "did not answer in time")
            if call.code() is grpc.StatusCode.UNAVAILABLE and self._lost is not None:
                # The watching call ends too, but not before this: listeners come before the round's error.
                self._lost(end)
        except CommError as error:
            call.cancel()
            end = error
        return end

    def _reply(self, call: Any, overdue: str) -> Reply:
        """Return the reply to a call, or raise the error for its failure."""
        try:
            return decode(call.result(), Reply, self._limit)
        except grpc.FutureCancelledError as error:
            raise CommError(f"the call to rank {self.above} was cancelled") from error
        except grpc.RpcError as error:
            raise self._meaning(call, overdue) from error

    def _meaning(self, call: Any, overdue: str) -> CommError:
        code, details = call.code(), call.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(f"rank {self.above} {overdue}")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return round_errors.disconnected(self.above, details)
        self.refused = code is grpc.StatusCode.UNAUTHENTICATED
        return CommError(f"the call to rank {self.above} failed: {code.name}: {details}")
