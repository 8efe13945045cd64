"""The two ends of a connection between ranks over gRPC: the calls of a rank, and the server of its parent."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import grpc

from reknit.comm import round_errors
from reknit.comm.meeting.addresses import addresses
from reknit.comm.rank_messages import (
    FIRST_NBYTES,
    NOWHERE,
    OVERHEAD_NBYTES,
    Hello,
    News,
    Outcome,
    Reply,
    Report,
    decode,
    divided,
    encode,
    joined,
)
from reknit.comm.serving import (
    TOKEN,
    channel,
    channel_settings,
    open_port,
    replying,
    server_settings,
    token_server,
)
from reknit.errors import CommError, DeadlineError, ReknitError, from_wire
from reknit.system import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reknit.comm.group import Topology
    from reknit.comm.tree.rounds import OnEnd, Rounds
    from reknit.errors import ShortageError
    from reknit.options import CommOptions

SERVICE = "/reknit.Tree/"
"""The beginning of the path of every call."""

WATCHING = "reknit-watching"
"""The metadata by which a server announces that it notices a rank's end from then on."""

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


class Server:
    """The server of a rank: answers the ranks below from its rounds.

    `host` is the published address of this host, `address` is all that the ranks below need.
    """

    def __init__(
        self, rounds: Rounds, hello: Hello, topology: Topology, options: CommOptions, master: str | None
    ) -> None:
        """Listen; `master` is the host of the store in which the ranks met, if it has one."""
        self._rounds, self._rank = rounds, hello.rank
        self._limit = options.max_message_nbytes
        methods = {
            SERVICE + "hello": replying(Hello, self._greet, self._limit),
            SERVICE + "watch": replying(Hello, self._watch, self._limit),
            SERVICE + "tell": replying(News, self._receive_news, self._limit),
            SERVICE + "stay": replying(Hello, self._stay, self._limit),
            SERVICE + "round": grpc.stream_stream_rpc_method_handler(self._round),
        }
        self._children = frozenset(topology.children(hello.rank))
        self._ended = threading.Condition()
        self.num_open = 0
        self._staying: set[int] = set()
        # For each child a round, a watch and a stay may wait here; the others return at once.
        self._executor = DaemonExecutor(
            "reknit-comm", 3 * len(self._children) + 4, ready=1, on_shortage=self._fall_short
        )
        token = secrets.token_hex(32)
        self._server = token_server(
            f"rank {hello.rank}", token, methods, self._executor, server_settings(len(self._children))
        )
        self.host, listens = addresses(options, one_host=topology.num_hosts == 1, master=master)
        port = open_port(self._server, f"{listens}:0", options)
        self._server.start()
        self.address = f"{self.host}:{port} {token}"

    def stop(self) -> None:
        """Wait until the ranks below have received their outcomes, then free port and threads.

        The end of a call here means only that its reply was given to the kernel.  On a network that loses
        packets the reply may have to be sent again, and a process that ends before resets the connection.
        The server's own grace period is not used: it needs a new thread, which an interpreter that ends
        refuses.  A script may well end between its last round and the reply to the ranks below.
        """
        with self._ended:
            self._ended.wait_for(lambda: self.num_open == 0, round_errors.GRACE_S)
        self._server.stop(None)
        self._executor.shutdown()

    def _fall_short(self, error: ShortageError) -> None:
        """Break the group: no thread is free, so a child's call would wait until its deadline."""
        error.sign(rank=self._rank)
        self._rounds.break_off(error)

    def _open(self, context: grpc.ServicerContext, ended: Callable[[], None]) -> None:
        """Count a call that waits here; run `ended` once its reply is sent, or its caller is gone."""

        def end() -> None:
            ended()
            with self._ended:
                self.num_open -= 1
                self._ended.notify_all()

        with self._ended:
            self.num_open += 1
        if not context.add_callback(end):
            end()

    def _greet(self, hello: Hello, _: object) -> Reply:
        self._rounds.greet(hello)
        return Reply()

    def _watch(self, hello: Hello, context: grpc.ServicerContext) -> Reply:
        child = self._rounds.attach(hello)
        self._open(
            context, functools.partial(self._rounds.break_off, round_errors.disconnected(child), child)
        )
        with contextlib.suppress(grpc.RpcError):  # of a child that is gone again; that is seen to
            context.send_initial_metadata(((WATCHING, ""),))
        return Reply(self._rounds.until_broken().to_wire())

    def _receive_news(self, news: News, _: object) -> Reply:
        self._rounds.receive_news(news)
        return Reply()

    def _stay(self, hello: Hello, context: grpc.ServicerContext) -> Reply:
        """Wait until a child has received all outcomes and the end of the group, or has exited."""
        child = self._rounds.known(hello)
        with self._ended:
            if child not in self._children or child in self._staying:
                raise round_errors.duplicate_rank(child)
            self._staying.add(child)
        ended = threading.Event()
        self._open(context, ended.set)
        ended.wait()
        return Reply()

    def _round(self, chunks: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from divided(encode(self._attended(chunks, context)))

    def _attended(self, chunks: Iterable[bytes], context: grpc.ServicerContext) -> Outcome:
        """Take a report, and wait for its outcome."""
        try:
            report = decode(joined(chunks, self._limit + OVERHEAD_NBYTES), Report, self._limit)
            visit = self._rounds.attend(report)
        except ReknitError as error:
            return NOWHERE.outcome(error=error)
        self._open(context, functools.partial(self._rounds.leave, visit))
        outcome = self._rounds.answer(visit)
        # A child that hung up does not receive this.
        return outcome or report.outcome(error=round_errors.gave_up(report, visit.child))
