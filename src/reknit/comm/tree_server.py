"""The server of a rank in the tree: it lets in who knows its token, and answers out of the rank's node."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import secrets
import threading
from typing import TYPE_CHECKING, cast

import grpc

from reknit.comm import faults
from reknit.comm.crew import Crew
from reknit.comm.message import Hello, Outcome, Report, decode, encode, wire_limit
from reknit.comm.rendezvous import addresses
from reknit.errors import CommError, ProtocolError, ReknitError, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import ThreadPoolExecutor

    from reknit.comm.node import Node
    from reknit.options import CommOptions

    Behaviour = Callable[[bytes, grpc.ServicerContext], Outcome]
    _Handler = grpc.GenericRpcHandler[bytes, bytes]
else:
    _Handler = grpc.GenericRpcHandler  # generic in the stubs only

_log = logging.getLogger("reknit.comm")

SERVICE = "/reknit.Tree/"
"""What the path of every call begins with."""

TOKEN = "reknit-token"
"""The name under which a call carries the token of the server that it is for."""

WATCHING = "reknit-watching"
"""The name of the sign by which a server says that it notices a rank's end from then on."""

_MOST_PEERS_LOGGED = 256


def settings(options: CommOptions) -> list[tuple[str, int]]:
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


class Server(_Handler):
    """The server of a rank: answers the ranks below it out of its node."""

    def __init__(
        self,
        node: Node,
        hello: Hello,
        options: CommOptions,
        tell: Callable[[ReknitError], object],
    ) -> None:
        """Listen; `tell` gets the error of whoever is gone or closed, when that breaks the node."""
        self._node, self._hello, self._tell = node, hello, tell
        token = secrets.token_hex(32)
        self._token = token.encode()
        self._limit = options.max_message_nbytes
        self._behaviours: dict[str, Behaviour] = {
            SERVICE + "hello": self._greet,
            SERVICE + "watch": self._watch,
            SERVICE + "round": self._round,
            SERVICE + "tell": self._hear,
        }
        self._refused: set[str] = set()
        self._ended = threading.Condition()
        self._num_open = 0
        # For each child a round and a watch may wait here; the others return at once.
        self._crew = Crew(2 * options.fan_out + 4)
        self._server = grpc.server(
            cast("ThreadPoolExecutor", self._crew), handlers=[self], options=settings(options)
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
        self.address = f"{host}:{port} {token}"

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return what serves a call: a refusal that reads nothing of it, unless it carries the token."""
        behaviour = self._behaviours.get(handler_call_details.method)
        if behaviour is None:
            return None
        given = next((v for k, v in handler_call_details.invocation_metadata or () if k == TOKEN), "")
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
        with contextlib.suppress(grpc.RpcError):  # of a child that is gone again; `_lost` has seen to that
            context.send_initial_metadata(((WATCHING, ""),))
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
