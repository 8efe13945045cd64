"""Rounds between processes: a tree of calls, one per rank and round, guarded by a token of each server.

A rank calls its parent with all requests of its subtree, and the reply holds all answers for its subtree.
Each of the two notices the end of the other.  Ranks of one host send frames through sockets of that host, all
others use gRPC.  Nothing here depends on the subject of a round.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from reknit.comm import round_errors
from reknit.comm.group import doubling, quietly
from reknit.comm.meeting.addresses import check_owner, deserted, is_unix
from reknit.comm.meeting.hosts import gather_shape
from reknit.comm.meeting.rendezvous import address_of, publish_address, publish_leaving
from reknit.comm.tree.machine import RoundMachine
from reknit.comm.tree.rounds import Rounds
from reknit.errors import CommError, ProtocolError, ReknitError, UsageError, typed_known
from reknit.events.phase import Deadline
from reknit.options import UNIX
from reknit.system import AtExit, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.comm.group import Call, Topology
    from reknit.comm.meeting.addresses import PrivateSocket
    from reknit.comm.meeting.rendezvous import Store
    from reknit.comm.tree.over_grpc import Server, Uplink
    from reknit.comm.tree.over_sockets import HostServer, HostUplink
    from reknit.options import CommOptions

_log = logging.getLogger("reknit.comm")

_PAUSE_S = (0.02, 1.0)

_REFUSED_S = 5.0
"""How long a host may refuse connections to an address at which a rank has listened."""


@cache
def warn_of_plain(num_hosts: int) -> None:
    """Warn, once for each number of hosts, that other users could disturb the job."""
    _log.warning(
        "ranks on %d host%s connect without certificates, and anyone who can connect to the store can read "
        "their tokens: another user of these hosts and networks could make saves fail; set CommOptions.tls "
        "to prevent that",
        num_hosts,
        "" if num_hosts == 1 else "s",
    )


def _ends(*, is_unix: bool) -> tuple[type[Any], type[Any]]:
    """Return the classes of the server of a rank, and of the connection to the rank above."""
    if is_unix:
        from reknit.comm.tree.over_sockets import HostServer, HostUplink

        return HostServer, HostUplink
    with quietly():
        from reknit.comm.tree.over_grpc import Server, Uplink  # gRPC is for ranks of several hosts

    return Server, Uplink


class TreeGroup:
    """The place of a rank in a tree of ranks in processes of their own, on any hosts that reach each other.

    The ranks below can connect to it as soon as it is made; this rank holds rounds once `connect_parent` has
    joined it to the rank above.  `above` is that rank, None for rank 0.  `address` holds the address of its
    server and its token, for the ranks below; it is empty without ranks below.  It is a secret: any process
    that has it can take part in the job.  `host` is its host, None without a server.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        job: str,
        generation: int,
        options: CommOptions,
        *,
        master: str | None = None,
        processes: Mapping[int, str] | None = None,
        door: PrivateSocket | None = None,
    ) -> None:
        """Listen, for ranks that `connect_parent` in any order.  Raises `CommError` when it cannot.

        Use `join` for ranks that share a store.  `master` is the host of that store, if it has one.
        `processes` are the processes of the ranks below, if they have names.  `door` is the socket of a
        server that listens already.
        """
        if not 0 <= rank < topology.size:
            raise UsageError(f"rank must be within 0 .. size - 1, not {rank} of {topology.size}")
        self.rank, self.size, self.topology, self.generation = rank, topology.size, topology, generation
        self.above = topology.parent(rank)
        self._options = options
        machine = RoundMachine(
            rank, topology, job=job, generation=generation, max_nbytes=options.max_message_nbytes
        )
        children = topology.children(rank)
        self.rounds, self._hello = Rounds(machine, children, processes or {}), machine.hello
        self._closing = round_errors.closed(rank)
        self._listeners: list[Callable[[ReknitError], object]] = []
        self._announcing = threading.RLock()  # a listener may close the group, or listen again
        self._lock = threading.Lock()
        self.uplink: HostUplink | Uplink | None = None
        """The connection to the rank above, once there is one."""
        self._joined = False
        self._closed = threading.Event()
        self._process = os.getpid()
        self.server: HostServer | Server | None = None
        if children:
            with typed_known():
                listen, _ = _ends(is_unix=options.bind == UNIX)
                more = {} if door is None else {"door": door}
                self.server = listen(self.rounds, self._hello, topology, options, master, **more)
        self.address = self.server.address if self.server is not None else ""
        self.host = self.server.host if self.server is not None else None
        self._at_exit = AtExit(self.close)

    def __repr__(self) -> str:
        return f"<TreeGroup rank: {self.rank} of {self.size}>"

    @classmethod
    def join(cls, store: Store, rank: int, size: int, *, job: str, options: CommOptions) -> TreeGroup:
        """Join the group of `job`: return when this rank reached the rank above it, and can be reached.

        Ranks meet in `store` under the name `job`; a job that is started again may meet under the same.
        Raises `DeadlineError` if other ranks do not come within `options.connect_timeout_s`, and
        `ProtocolError` if they join another group.  Raises `CommError` if this rank cannot listen, or a
        neighbour has ended.
        """
        timeout_s = options.connect_timeout_s
        shape = gather_shape(store, rank, size, job=job, options=options, timeout_s=timeout_s)
        if shape.together and options.bind is None and options.interface is None and options.tls is None:
            options = replace(options, bind=UNIX)
        elif rank == 0 and options.tls is None and getattr(store, "is_open", False):
            warn_of_plain(shape.topology.num_hosts)
        group: TreeGroup | None = None
        try:
            group = cls(
                rank,
                shape.topology,
                job,
                shape.generation,
                options,
                master=getattr(store, "master", None),
                processes=shape.processes,
            )
            if group.address:
                publish_address(store, job, shape.run, rank, group.address)
            above = "" if group.above is None else address_of(store, job, shape, group.above, timeout_s)
            group.connect_parent(above)
        except BaseException as error:
            if group is not None:
                group.close()
            if shape.topology.children(rank):  # which wait for the address of this rank
                publish_leaving(store, job, shape.run, rank, error)
            raise
        return group

    def connect_parent(self, address: str) -> None:
        """Join the group: return when this rank has connected to the rank above it.

        `address` is that of the rank above, empty on rank 0.  Raises `DeadlineError` if that rank cannot be
        reached within `CommOptions.connect_timeout_s`, and `ProtocolError` if it is of another job,
        generation or shape.  Raises `CommError` if the address has a wrong token, or the group is closed
        meanwhile.  After an error it may be called again.
        """
        if self._joined:
            raise UsageError(f"rank {self.rank} has joined its group already")
        if (" " in address) != (self.above is not None):
            needed = "no address" if self.above is None else f"the address of rank {self.above}"
            raise UsageError(f"rank {self.rank} needs {needed} to join its group")
        with typed_known():
            uplink = None if self.above is None else self._connect(self.above, *address.rsplit(" ", 1))
        with self._lock:
            self._check_open()
            self._joined = True
        if uplink is not None:
            self.rounds.connect(uplink)

    @property
    def broken(self) -> bool:
        """Whether the group has been found broken."""
        return self.rounds.broken is not None

    def await_below(self) -> None:
        """Wait until the ranks below have connected; break the group if one does not, in the time for it."""
        timeout_s = self._options.connect_timeout_s
        if missing := self.rounds.missing_below(timeout_s):
            self.rounds.break_off(round_errors.not_connected(missing, self.rank, timeout_s))

    def fail(self, address: str, error: ReknitError) -> None:
        """Join only to send `error` to the neighbours, in the place of a process that ended before it joined.

        `address` is as in `connect_parent`.
        """
        self.rounds.break_off(error)
        try:
            with suppress(ReknitError):  # the rank above has ended, or its process has joined before its end
                self.connect_parent(address)
            self.rounds.missing_below(self._options.connect_timeout_s)
        finally:
            self.close()

    def gather(self, call: Call) -> list[bytes] | None:
        """Enter a round, as `Group.gather` says; errors may take up to 5 s longer than `timeout_s`."""
        if os.getpid() != self._process:
            raise round_errors.forked(self.rank)
        try:
            return self.rounds.gather(call)
        except CommError:
            self.announce()
            raise

    def give(self, answers: Sequence[bytes] | None) -> bytes:
        """End the round, as `Group.give` says; errors may take up to 5 s longer than `timeout_s`."""
        try:
            return self.rounds.give(answers)
        except CommError:
            self.announce()
            raise

    def leave(self, call: Call, error: BaseException) -> None:
        """End the round of `call`, unless it is over."""
        self.rounds.abandon(call, error)

    def on_broken(self, callback: Callable[[ReknitError], object]) -> None:
        """Call `callback` once, from any thread, when the group is broken, or at once if it is.

        A group breaks when a rank is gone or closes it.  When this rank closes it first, nothing is called.
        A round that fails since the group is broken raises after that call.  So its caller has received the
        group's error before.
        """
        with self._announcing:
            self._listeners.append(callback)

        def wait() -> None:
            self.rounds.until_broken()
            self.announce()

        start_thread("reknit-broken", wait)

    def announce(self) -> None:
        """Call the listeners if the group is broken; return once all calls are over."""
        error = self.rounds.broken
        with self._announcing:
            while error is not None and self._listeners:
                callback = self._listeners.pop(0)
                if error is not self._closing:
                    callback(round_errors.copied(error))

    def close(self) -> None:
        """Leave the group, joined or not: rounds fail on every rank.  Closing twice does nothing.

        Returns once the ranks below have received that, and the outcome of their last round.  A rank that is
        stopped or cut off delays this by at most 2 s.
        """
        if os.getpid() != self._process:  # a forked process leaves its parent's connections alone
            return
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._at_exit.cancel()
        self.rounds.break_off(self._closing)
        if self.server is not None:
            self.server.stop()
        if self.uplink is not None:
            self.uplink.close()

    def _connect(self, above: int, address: str, token: str) -> HostUplink | Uplink:
        """Return the connection to the rank above; from now on each of the two notices the other's end."""
        check_owner(address)
        _, connect = _ends(is_unix=is_unix(address))
        deadline, pauses = Deadline(self._options.connect_timeout_s), doubling(*_PAUSE_S)
        refused: Deadline | None = None
        while True:
            with self._lock:
                self._check_open()
                uplink: HostUplink | Uplink = connect(address, above, token, self._hello, self._options)
                self.uplink = uplink
            try:
                uplink.greet(max(deadline.remaining(), _PAUSE_S[0]))
                uplink.watch(self._break_off, max(deadline.remaining(), _PAUSE_S[0]))
            except BaseException as error:
                uplink.close()
                if isinstance(error, ProtocolError) or not isinstance(error, CommError):
                    raise
                if uplink.refused:
                    raise round_errors.wrong_token(above, address) from error
                if deadline.passed():
                    raise round_errors.unreachable(above, address, deadline.seconds, error.message) from error
                # The rank above listened before it published its address.  For another host, a device in
                # between may refuse connections for a while.
                if not deserted(address):
                    refused = None
                elif (refused := refused or Deadline(0 if is_unix(address) else _REFUSED_S)).passed():
                    detail = f"no process listens at {address} any more"
                    raise round_errors.disconnected(above, detail) from error
            else:
                return uplink
            self._closed.wait(min(next(pauses), deadline.remaining()))

    def _break_off(self, error: ReknitError) -> None:
        self.rounds.break_off(error, self.above)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise round_errors.copied(self._closing)
