"""Rounds between processes: a tree of gRPC calls, one per rank and round, guarded by a token of the job.

A rank calls the one above it with everything that its subtree asks, and the reply of that call is everything
that its subtree is told.  A second call, which stays open as long as both live, tells each side when the
other is gone.  Nothing here knows what a round is about.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import grpc

from reknit.comm import faults
from reknit.comm.crew import Crew
from reknit.comm.message import Hello, Outcome, Report, decode, encode, wire_limit
from reknit.comm.node import Node
from reknit.comm.rendezvous import addresses
from reknit.comm.rounds import Rounds
from reknit.comm.topology import Topology
from reknit.errors import CommError, DeadlineError, ProtocolError, ReknitError, UsageError, from_wire
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from reknit.comm.rendezvous import Store
    from reknit.options import CommOptions

    Behaviour = Callable[[bytes, grpc.ServicerContext], Outcome]
    _Handler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _Handler = grpc.GenericRpcHandler  # generic in the stubs only

_log = logging.getLogger("reknit.comm")

_SERVICE = "/reknit.Tree/"
_TOKEN = "reknit-token"
_TELL_S = 2.0
_PAUSE_S = (0.02, 1.0)
_MOST_PEERS_LOGGED = 256


def _settings(options: CommOptions) -> list[tuple[str, int]]:
    """Return the settings of channels and servers, so that no environment variable decides them."""
    limit = wire_limit(options.max_message_nbytes)
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        # Channels of one process would else share connections, and the back-off of a dead one.
        ("grpc.use_local_subchannel_pool", 1),
        # A host that loses its power sends no reset; only a ping finds out.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


class _Service(_Handler):
    """The server of a rank: answers the ranks below it out of its node."""

    def __init__(
        self,
        node: Node,
        hello: Hello,
        token: str,
        options: CommOptions,
        tell: Callable[[ReknitError], object],
    ) -> None:
        self._node, self._hello, self._token, self._tell = node, hello, token.encode(), tell
        self._limit = options.max_message_nbytes
        self._behaviours: dict[str, Behaviour] = {
            _SERVICE + "hello": self._greet,
            _SERVICE + "watch": self._watch,
            _SERVICE + "round": self._round,
            _SERVICE + "tell": self._hear,
        }
        self._refused: set[str] = set()
        self._ended = threading.Condition()
        self._num_open = 0
        # For each child a round and a watch may wait here; the others return at once.
        self._crew = Crew(2 * options.fan_out + 4)
        self._server = grpc.server(
            cast("ThreadPoolExecutor", self._crew), handlers=[self], options=_settings(options)
        )
        host, listens = addresses(options.bind)
        try:
            port = self._server.add_insecure_port(f"{listens}:0")
        except RuntimeError as error:
            raise CommError(
                f"no server can listen on {listens}: {error}",
                remedy="set CommOptions.bind to an address of this host that the other hosts reach",
            ) from error
        self._server.start()
        self.address = f"{host}:{port}"

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return what serves a call: a refusal that reads nothing of it, unless it carries the token."""
        behaviour = self._behaviours.get(handler_call_details.method)
        if behaviour is None:
            return None
        given = next((v for k, v in handler_call_details.invocation_metadata or () if k == _TOKEN), "")
        value = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(value, self._token):
            return grpc.stream_unary_rpc_method_handler(self._refuse)
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._reply, behaviour))

    def stop(self) -> None:
        """Let calls that have their outcome end, then free port and threads.

        The server's own grace period is not used: it needs a new thread, which an interpreter that ends
        refuses, and a script may well end between its last round and the reply to the ranks below.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._num_open == 0, faults.GRACE_S)
        self._server.stop(None)
        self._crew.shutdown()

    def _open(self, context: grpc.ServicerContext, ended: Callable[[], None]) -> None:
        """Count a call that waits here; run `ended` once its reply is sent, or its caller is gone."""

        def end() -> None:
            ended()
            with self._ended:
                self._num_open -= 1
                self._ended.notify_all()

        with self._ended:
            self._num_open += 1
        if not context.add_callback(end):
            end()

    def _refuse(self, _: object, context: grpc.ServicerContext) -> bytes:
        peer = context.peer().rpartition(":")[0]
        if peer not in self._refused and len(self._refused) < _MOST_PEERS_LOGGED:
            self._refused.add(peer)
            _log.warning("rank %d refused a call from %s: wrong token", self._node.rank, peer)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"rank {self._node.rank} does not know this token")

    def _reply(self, behaviour: Behaviour, data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return encode(behaviour(data, context))
        except ReknitError as error:
            return encode(Outcome(error=error.to_wire()))

    def _greet(self, data: bytes, _: grpc.ServicerContext) -> Outcome:
        theirs, ours = decode(data, Hello, self._limit), self._hello
        if (theirs.job, theirs.size, theirs.fan_out) != (ours.job, ours.size, ours.fan_out):
            raise ProtocolError(
                f"rank {theirs.rank} joins job {theirs.job!r} with size {theirs.size} and fan-out "
                f"{theirs.fan_out}, rank {ours.rank} job {ours.job!r} with {ours.size} and {ours.fan_out}",
                remedy="start every rank with the same job, size and CommOptions.fan_out",
            )
        self._node.greet(theirs.rank)
        return Outcome()

    def _watch(self, data: bytes, context: grpc.ServicerContext) -> Outcome:
        child = decode(data, Hello, self._limit).rank
        self._node.attach(child)
        self._open(context, functools.partial(self._lost, child))
        return Outcome(error=self._node.until_broken().to_wire())

    def _lost(self, child: int) -> None:
        error = faults.gone(child)
        if self._node.break_off(error):
            self._tell(error)

    def _round(self, data: bytes, context: grpc.ServicerContext) -> Outcome:
        visit = self._node.attend(decode(data, Report, self._limit))
        self._open(context, functools.partial(self._node.leave, visit))
        return self._node.answer(visit)

    def _hear(self, data: bytes, _: grpc.ServicerContext) -> Outcome:
        error = from_wire(decode(data, Outcome, self._limit).error or {})
        if self._node.break_off(error):
            self._tell(error)
        return Outcome()


class _Uplink:
    """The connection of a rank to the one above it."""

    def __init__(self, address: str, above: int, token: str, options: CommOptions) -> None:
        self.above, self._limit = above, options.max_message_nbytes
        self._metadata = ((_TOKEN, token),)
        self._channel = grpc.insecure_channel(address, options=_settings(options))
        self._lock = threading.Lock()
        self._asking: Any = None
        self._sending: Any = None
        self._telling: Any = None
        self._closed = False

    def greet(self, hello: Hello, timeout_s: float) -> None:
        """Check that the rank above is there and of the same job."""
        error = self._result(
            self._call("hello", hello, timeout_s), f"did not answer within {timeout_s:g} s"
        ).error
        if error is not None:
            raise from_wire(error)

    def watch(self, hello: Hello, lost: Callable[[ReknitError], object]) -> None:
        """Call `lost` once, from another thread, when the group breaks or the rank above is gone."""

        def ended(call: Any) -> None:
            try:
                error = self._result(call, "ended").error
            except CommError as failure:
                lost(failure)
            else:
                lost(from_wire(error or {}))

        self._watching = self._call("watch", hello, None)
        self._watching.add_done_callback(ended)

    def ask(self, report: Report, timeout_s: float, overdue: str) -> Outcome:
        """Send a report, and wait for its outcome."""
        with self._lock:
            if self._closed:
                raise CommError("the connection is closed")
            call = self._asking = self._call("round", report, timeout_s)
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

    def _call(self, method: str, message: Hello | Report | Outcome, timeout_s: float | None) -> Any:
        stub = self._channel.unary_unary(_SERVICE + method, None, None)
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
        remedy = None
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            remedy = "give every rank the same CommOptions.max_message_nbytes"
        return CommError(f"the call to rank {self.above} failed: {code.name}: {details}", remedy=remedy)


class TreeGroup:
    """Ranks in processes of their own, on any hosts that reach each other by TCP."""

    def __init__(self, node: Node, topology: Topology, options: CommOptions, uplink: _Uplink | None) -> None:
        """Use `join`."""
        self.rank, self.size = node.rank, topology.size
        self._node, self._uplink = node, uplink
        self._rounds = Rounds(node, topology, options.max_message_nbytes, uplink)
        self._service: _Service | None = None
        self._closing = threading.Lock()
        self._closed = False
        atexit.register(self.close)

    @classmethod
    def join(cls, store: Store, rank: int, size: int, *, job: str, options: CommOptions) -> TreeGroup:
        """Join the group of `job`: return when this rank reached the rank above it, and can be reached.

        `job` names one run of the job: a restarted job takes another name.  Raises `DeadlineError` when the
        rank above does not appear within `options.connect_timeout_s`, `ProtocolError` when it is of another
        size or shape, `CommError` when this rank cannot listen.
        """
        if not 0 <= rank < size:
            raise UsageError(f"rank must be within 0 .. size - 1, not {rank} of {size}")
        topology = Topology(size, options.fan_out)
        hello = Hello(job, rank, size, options.fan_out)
        if rank == 0:
            token, uplink = secrets.token_hex(32), None
            store.set(_key(job, "token"), token.encode())
        else:
            token, uplink = _climb(store, topology, hello, options)
        group = cls(Node(rank, topology, job), topology, options, uplink)
        try:
            group._open(store, hello, token, options)
        except BaseException:
            group.close()
            raise
        return group

    def _open(self, store: Store, hello: Hello, token: str, options: CommOptions) -> None:
        if self._uplink is not None:
            self._uplink.watch(hello, self._node.break_off)
        if len(self._node.ranks) > 1:
            self._service = _Service(self._node, hello, token, options, self._tell)
            store.set(_key(hello.job, f"address/{self.rank}"), self._service.address.encode())

    def exchange(
        self, name: str, request: bytes, decide: Callable[[list[bytes]], Sequence[bytes]], timeout_s: float
    ) -> bytes:
        """Hold one round, as `Group.exchange` says; errors may take up to 5 s longer than `timeout_s`."""
        return self._rounds.hold(name, request, decide, timeout_s)

    def close(self) -> None:
        """Leave the group: later rounds fail on every rank.  Closing twice does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        error = faults.closed(self.rank)
        if self._node.break_off(error):
            self._tell(error)
        if self._service is not None:
            self._service.stop()
        if self._uplink is not None:
            self._uplink.close()

    def _tell(self, error: ReknitError) -> None:
        if self._uplink is not None:
            self._uplink.tell(error)


def _key(job: str, what: str) -> str:
    return f"reknit/{job}/{what}"


def _climb(store: Store, topology: Topology, hello: Hello, options: CommOptions) -> tuple[str, _Uplink]:
    """Reach the rank above: return the token that it accepted, and the connection."""
    deadline, pause_s = Deadline(options.connect_timeout_s), _PAUSE_S[0]
    above = topology.parent(hello.rank)
    assert above is not None
    while True:
        # Read anew at every attempt: the store may still hold what an earlier run left under this name.
        address = store.get(_key(hello.job, f"address/{above}"), deadline.remaining()).decode()
        token = store.get(_key(hello.job, "token"), deadline.remaining()).decode()
        uplink = _Uplink(address, above, token, options)
        try:
            uplink.greet(hello, max(deadline.remaining(), _PAUSE_S[0]))
            return token, uplink
        except ProtocolError:
            uplink.close()
            raise
        except CommError as error:
            uplink.close()
            if deadline.passed():
                raise DeadlineError(
                    f"rank {above} at {address} could not be reached within "
                    f"{options.connect_timeout_s:g} s: {error.message}",
                    remedy="look at its log, or set CommOptions.bind there to an address that we reach",
                ) from error
        except BaseException:
            uplink.close()
            raise
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(_PAUSE_S[1], pause_s * 2)
