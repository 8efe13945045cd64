"""A rank's server in the tree: checks the token and answers calls from the rank's rounds."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from typing import TYPE_CHECKING

import grpc

from reknit.comm import round_errors
from reknit.comm.meeting.addresses import PrivateSocket, addresses
from reknit.comm.rank_messages import (
    OVERHEAD_NBYTES,
    Heading,
    Hello,
    News,
    Reply,
    Report,
    decode,
    divided,
    encode,
    joined,
)
from reknit.comm.serving import open_port, replying, server_settings, token_server
from reknit.errors import ReknitError, UsageError, from_wire
from reknit.options import UNIX
from reknit.system import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reknit.comm.group import Topology
    from reknit.comm.rank_messages import Outcome
    from reknit.comm.tree.rounds import Rounds
    from reknit.errors import ShortageError
    from reknit.options import CommOptions

SERVICE = "/reknit.Tree/"
"""The beginning of the path of every call."""

WATCHING = "reknit-watching"
"""The metadata by which a server announces that it notices a rank's end from then on."""

_NOWHERE = Heading("", 0, -1, "", "")


def _named_socket(topology: Topology) -> PrivateSocket:
    """Return a name for the socket of a group whose ranks are all on this host."""
    if topology.num_hosts > 1:
        raise UsageError(
            f"CommOptions.bind='unix' connects ranks of one host, and these are on {topology.num_hosts}",
            remedy="leave it out, or give an address that the other hosts can reach",
        )
    return PrivateSocket()


class Server:
    """The server of a rank: answers the ranks below from its rounds.

    `host` is the published address of this host, `address` is all that the ranks below need.
    """

    def __init__(
        self, rounds: Rounds, hello: Hello, topology: Topology, options: CommOptions, master: str | None
    ) -> None:
        """Listen; `master` is the host of the store in which the ranks met, if it has one."""
        self._socket = _named_socket(topology) if options.bind == UNIX else None
        self._rounds, self._hello = rounds, hello
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
        self._remove_socket()

    def _fall_short(self, error: ShortageError) -> None:
        """Break the group: no thread is free, so a child's call would wait until its deadline."""
        error.sign(rank=self._hello.rank)
        self._rounds.break_off(error)

    def _remove_socket(self) -> None:
        if self._socket is not None:
            self._socket.remove()

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
        self._rounds.greet(self._known(hello))
        return Reply()

    def _watch(self, hello: Hello, context: grpc.ServicerContext) -> Reply:
        child = self._known(hello)
        self._rounds.attach(child)
        self._unattached.discard(child)
        if not self._unattached:  # a killed job would leave the name behind
            self._remove_socket()
        self._open(
            context, functools.partial(self._rounds.break_off, round_errors.disconnected(child), child)
        )
        with contextlib.suppress(grpc.RpcError):  # of a child that is gone again; that is seen to
            context.send_initial_metadata(((WATCHING, ""),))
        return Reply(self._rounds.until_broken().to_wire())

    def _receive_news(self, news: News, _: object) -> Reply:
        self._check_job(news.sender, news)
        self._rounds.break_off(from_wire(news.error), news.sender)
        return Reply()

    def _stay(self, hello: Hello, context: grpc.ServicerContext) -> Reply:
        """Wait until a child has received all outcomes and the end of the group, or has exited."""
        child = self._known(hello)
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
            return _NOWHERE.outcome(error=error)
        self._open(context, functools.partial(self._rounds.leave, visit))
        outcome = self._rounds.answer(visit)
        # A child that hung up does not receive this.
        return outcome or report.outcome(error=round_errors.gave_up(report, visit.child))

    def _known(self, theirs: Hello) -> int:
        """Return the rank that sent a hello; raises `ProtocolError` unless it belongs to this group."""
        self._check_job(theirs.rank, theirs)
        if theirs.topology != self._hello.topology:
            raise round_errors.wrong_topology(theirs.rank, self._hello.rank)
        return theirs.rank

    def _check_job(self, rank: int, message: Hello | News) -> None:
        if (refusal := round_errors.wrong_job(rank, message, self._hello)) is not None:
            raise refusal
