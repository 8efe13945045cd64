"""The server of a rank in the tree: it lets in who knows its token, and answers out of the rank's rounds."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import secrets
import threading
from typing import TYPE_CHECKING, cast

import grpc

from reknit.comm.call_threads import CallThreads
from reknit.comm.meeting.addresses import PrivateSocket, addresses
from reknit.comm.tls import open_port
from reknit.comm.tree import round_errors as faults
from reknit.comm.tree.chunks import CHUNK_NBYTES, divided, joined
from reknit.comm.tree.message import OVERHEAD_NBYTES, Heading, Hello, News, Reply, Report, decode, encode
from reknit.errors import ReknitError, UsageError, from_wire
from reknit.options import UNIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import ThreadPoolExecutor

    from reknit.comm.topology import Topology
    from reknit.comm.tree.message import Outcome
    from reknit.comm.tree.rounds import Rounds
    from reknit.options import CommOptions

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

MOST_STRANGERS = 64
"""How many connections a server has beyond those that it needs, and as many for those that come anew."""

_HANDSHAKE_MS = 10_000
_IDLE_MS = 20_000


_NOWHERE = Heading("", 0, -1, "", "")


def settings() -> list[tuple[str, int]]:
    """Return the settings of channels and servers, so that no environment variable decides them."""
    return [
        # What is larger comes in chunks; see `CommOptions.max_message_nbytes` for what these may add up to.
        ("grpc.max_send_message_length", 2 * CHUNK_NBYTES),
        ("grpc.max_receive_message_length", 2 * CHUNK_NBYTES),
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


def server_settings(num_callers: int) -> list[tuple[str, int]]:
    """Return the settings of a server for so many callers: strangers take no more of it than a bounded part.

    Whoever connects and says nothing is shown out soon, and so is who has been turned away.  A caller that
    finds no room comes again.
    """
    return [
        *settings(),
        ("grpc.max_allowed_incoming_connections", 2 * num_callers + MOST_STRANGERS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # A rank that has joined is never idle: the call that watches is open.
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]


def _named_socket(topology: Topology) -> PrivateSocket:
    """Return a name for the socket of a group whose ranks are all on this host."""
    if topology.num_hosts > 1:
        raise UsageError(
            f"CommOptions.bind='unix' connects ranks of one host, and these are on {topology.num_hosts}",
            remedy="leave it out, or give an address that the other hosts reach",
        )
    return PrivateSocket()


class Server(_Handler):
    """The server of a rank: answers the ranks below it out of its rounds.

    `host` is the address of this host that other ranks are told, `address` all that the ranks below need.
    """

    def __init__(
        self, rounds: Rounds, hello: Hello, topology: Topology, options: CommOptions, master: str | None
    ) -> None:
        """Listen; `master` is the host of the store in which the ranks met, if it has one."""
        self._socket = _named_socket(topology) if options.bind == UNIX else None
        self._rounds, self._hello = rounds, hello
        token = secrets.token_hex(32)
        self._token = token.encode()
        self._limit = options.max_message_nbytes
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            SERVICE + "hello": unary(functools.partial(self._reply, self._greet)),
            SERVICE + "watch": unary(functools.partial(self._reply, self._watch)),
            SERVICE + "tell": unary(functools.partial(self._reply, self._hear)),
            SERVICE + "stay": unary(functools.partial(self._reply, self._stay)),
            SERVICE + "round": stream(self._round),
        }
        self._children = frozenset(topology.children(hello.rank))
        self._refused: set[str] = set()
        self._ended = threading.Condition()
        self._num_open = 0
        self._staying: set[int] = set()
        # For each child a round, a watch and a stay may wait here; the others return at once.
        self._crew = CallThreads(3 * len(self._children) + 4, ready=1)
        self._server = grpc.server(
            cast("ThreadPoolExecutor", self._crew),
            handlers=[self],
            options=server_settings(len(self._children)),
        )
        self._unattached = set(self._children)
        try:
            if self._socket is not None:
                self.host, where = UNIX, self._socket.address
                open_port(self._server, where, options)
            else:
                self.host, listens = addresses(options, one_host=topology.num_hosts == 1, master=master)
                where = f"{self.host}:{open_port(self._server, f'{listens}:0', options)}"
            self._server.start()
        except BaseException:
            self._remove_socket()
            raise
        self.address = f"{where} {token}"

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return what serves a call: a refusal that reads nothing of it, unless it carries the token."""
        handler = self._handlers.get(handler_call_details.method)
        if handler is None:
            return None
        given = next((v for k, v in handler_call_details.invocation_metadata or () if k == TOKEN), "")
        value = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(value, self._token):
            return grpc.stream_unary_rpc_method_handler(self._refuse)
        return handler

    def stop(self) -> None:
        """Let calls that have their outcome end, and the ranks below hear it, then free port and threads.

        That a call ended here says no more than that its reply was given to the kernel.  On a wire that loses
        packets the reply may have to be sent again, and a process that ends before resets the connection.
        The server's own grace period is not used: it needs a new thread, which an interpreter that ends
        refuses, and a script may well end between its last round and the reply to the ranks below.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._num_open == 0, faults.GRACE_S)
        self._server.stop(None)
        self._crew.shutdown()
        self._remove_socket()

    def _remove_socket(self) -> None:
        if self._socket is not None:
            self._socket.remove()

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
            _log.warning("rank %d refused a call from %s: wrong token", self._rounds.rank, peer)
        context.abort(grpc.StatusCode.UNAUTHENTICATED, f"rank {self._rounds.rank} does not know this token")

    def _reply(self, hear: Callable[..., Reply], data: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return encode(hear(data, context))
        except ReknitError as error:
            return encode(Reply(error.to_wire()))

    def _greet(self, data: bytes, _: object) -> Reply:
        self._rounds.greet(self._known(data))
        return Reply()

    def _watch(self, data: bytes, context: grpc.ServicerContext) -> Reply:
        child = self._known(data)
        self._rounds.attach(child)
        self._unattached.discard(child)
        if not self._unattached:  # a killed job would leave the name behind
            self._remove_socket()
        self._open(context, functools.partial(self._rounds.break_off, faults.gone(child), child))
        with contextlib.suppress(grpc.RpcError):  # of a child that is gone again; that is seen to
            context.send_initial_metadata(((WATCHING, ""),))
        return Reply(self._rounds.until_broken().to_wire())

    def _hear(self, data: bytes, _: object) -> Reply:
        news = decode(data, News, self._limit)
        self._agree(news.sender, news.job, news.generation)
        self._rounds.break_off(from_wire(news.error), news.sender)
        return Reply()

    def _stay(self, data: bytes, context: grpc.ServicerContext) -> Reply:
        """Wait until a child has heard that the group is over and all that it is owed, or is gone."""
        child = self._known(data)
        with self._ended:
            if child not in self._children or child in self._staying:
                raise faults.taken(child)
            self._staying.add(child)
        ended = threading.Event()
        self._open(context, ended.set)
        ended.wait()
        return Reply()

    def _round(self, chunks: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from divided(encode(self._attended(chunks, context)))

    def _attended(self, chunks: Iterable[bytes], context: grpc.ServicerContext) -> Outcome:
        """Take a report, and wait for what its sender is told."""
        try:
            report = decode(joined(chunks, self._limit + OVERHEAD_NBYTES), Report, self._limit)
            visit = self._rounds.attend(report)
        except ReknitError as error:
            return _NOWHERE.outcome(error=error)
        self._open(context, functools.partial(self._rounds.leave, visit))
        outcome = self._rounds.answer(visit)
        # A child that hung up hears nothing of this.
        return outcome or report.outcome(error=faults.left(report, visit.child))

    def _known(self, data: bytes) -> int:
        """Return the rank that says hello; raises `ProtocolError` unless it belongs to this group."""
        theirs = decode(data, Hello, self._limit)
        self._agree(theirs.rank, theirs.job, theirs.generation)
        if theirs.topology != self._hello.topology:
            raise faults.reshaped(theirs.rank, self._hello.rank)
        return theirs.rank

    def _agree(self, rank: int, job: str, generation: int) -> None:
        ours = self._hello
        stranger = faults.misfit(rank, job, generation, ours.rank, ours.job, ours.generation)
        if stranger is not None:
            raise stranger
