"""Rounds between processes: a tree of gRPC calls, one per rank and round, guarded by a token of each server.

A rank calls the one above it with everything that its subtree asks, and the answer of that call is everything
that its subtree is told.  A second call, which stays open as long as both live, tells each side when the
other is gone.  Nothing here knows what a round is about.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from reknit.comm.meeting.addresses import check_owner, deserted, is_unix
from reknit.comm.meeting.hosts import address_in, base, gather_shape, left
from reknit.comm.tree import round_errors as faults
from reknit.comm.tree.client import Uplink
from reknit.comm.tree.effects import Call
from reknit.comm.tree.machine import RoundMachine
from reknit.comm.tree.message import Hello
from reknit.comm.tree.rounds import Rounds
from reknit.comm.tree.server import Server
from reknit.errors import CommError, ProtocolError, ReknitError, UsageError
from reknit.exits import AtExit
from reknit.monitor.phase import Deadline
from reknit.options import UNIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.meeting.rendezvous import Store
    from reknit.comm.topology import Topology
    from reknit.comm.tree.subtree import Merge
    from reknit.options import CommOptions

_log = logging.getLogger("reknit.comm")

_PAUSE_S = (0.02, 1.0)

_REFUSED_S = 5.0
"""How long a host may answer that nobody listens at an address which was told by who did."""


@cache
def _warn_of_plain(num_hosts: int) -> None:
    """Tell, once for a shape of a job, that who is no part of it could disturb it."""
    _log.warning(
        "ranks on %d host%s connect without certificates, and the tokens of their connections are in a store "
        "that whoever reaches it can read: another user of these hosts and networks could make saves fail; "
        "set CommOptions.tls where that matters",
        num_hosts,
        "" if num_hosts == 1 else "s",
    )


def _tell_below(
    store: Store, key: str, rank: int, _: object, error: BaseException | None, __: object
) -> None:
    """Let the ranks below hear at once why a rank leaves the rendezvous, in the place of its address."""
    if error is not None:
        with suppress(CommError):  # of a store that is gone; they find out by themselves
            store.set(key, left(error, rank))


class TreePort:
    """The place of a rank in the tree: the ranks below can reach it as soon as there is one.

    `above` is the rank above it, None for rank 0.  `address` is what the ranks below need, the address of its
    server and the token that lets them in, or empty for a rank with none below it.  Whoever knows it can take
    part in the job: tell it to nobody else.  `host` is the part of it that says where, None without a server.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        job: str,
        generation: int,
        options: CommOptions,
        master: str | None = None,
    ) -> None:
        """Use `TreeGroup.listen`."""
        if not 0 <= rank < topology.size:
            raise UsageError(f"rank must be within 0 .. size - 1, not {rank} of {topology.size}")
        self.rank, self.topology, self.generation = rank, topology, generation
        self.above = topology.parent(rank)
        self._options = options
        self._hello = Hello(job, generation, rank, topology.digest)
        machine = RoundMachine(
            rank, topology, job=job, generation=generation, max_nbytes=options.max_message_nbytes
        )
        children = topology.children(rank)
        self.rounds = Rounds(machine, children)
        self._farewell = faults.closed(rank)
        self._listeners: list[Callable[[ReknitError], object]] = []
        self._announcing = threading.RLock()  # one that hears may close the group, or ask to hear again
        self._lock = threading.Lock()
        self._uplink: Uplink | None = None
        self._climbed = False
        self._closed = threading.Event()
        self._server = Server(self.rounds, self._hello, topology, options, master) if children else None
        self.address = self._server.address if self._server is not None else ""
        self.host = self._server.host if self._server is not None else None
        self._at_exit = AtExit(self.close)

    def climb(self, address: str) -> TreeGroup:
        """Join the group: return when this rank reached the rank above it.

        `address` is that of the seat of the rank above, empty on rank 0.  Raises `DeadlineError` when that
        rank cannot be reached within `CommOptions.connect_timeout_s`, `ProtocolError` when it is of another
        job, generation or shape, `CommError` when the address carries a wrong token, or the seat is closed
        meanwhile.  After an error the seat can climb again.
        """
        if self._climbed:
            raise UsageError(f"rank {self.rank} has joined its group already")
        if (" " in address) != (self.above is not None):
            needed = "no address" if self.above is None else f"the address of the seat of rank {self.above}"
            raise UsageError(f"rank {self.rank} needs {needed} to join its group")
        uplink = None if self.above is None else self._reach(self.above, *address.rsplit(" ", 1))
        with self._lock:
            self._check()
            self._climbed = True
        if uplink is not None:
            self.rounds.connect(uplink)
        return TreeGroup(self)

    @property
    def broken(self) -> bool:
        """Whether the group is known to be broken."""
        return self.rounds.broken is not None

    def on_broken(self, callback: Callable[[ReknitError], object]) -> None:
        """Call `callback` once, from any thread, when the group is broken, or at once if it is.

        A group breaks when a rank is gone or closes it.  When this rank closes it first, nothing is called.
        A round that fails since the group is broken raises after that call, so that whoever hears of the
        round has heard of the group.
        """
        with self._announcing:
            self._listeners.append(callback)

        def wait() -> None:
            self.rounds.until_broken()
            self.announce()

        threading.Thread(target=wait, name="reknit-broken", daemon=True).start()

    def announce(self) -> None:
        """Call those that want to hear of a broken group, if it is; return once they all have heard."""
        error = self.rounds.broken
        with self._announcing:
            while error is not None and self._listeners:
                callback = self._listeners.pop(0)
                if error is not self._farewell:
                    callback(faults.copied(error))

    def close(self) -> None:
        """Leave the group, joined or not: rounds fail on every rank.  Closing twice does nothing.

        Returns once the ranks below have heard that, and the outcome of their last round; one that is stopped
        or cut off is waited for no longer than 2 s.
        """
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._at_exit.cancel()
        self.rounds.break_off(self._farewell)
        if self._server is not None:
            self._server.stop()
        if self._uplink is not None:
            self._uplink.close()

    def _reach(self, above: int, address: str, token: str) -> Uplink:
        """Return the connection to the rank above; from now on each of the two notices the other's end."""
        check_owner(address)
        deadline, pause_s = Deadline(self._options.connect_timeout_s), _PAUSE_S[0]
        refused: Deadline | None = None
        while True:
            with self._lock:
                self._check()
                uplink = self._uplink = Uplink(address, above, token, self._hello, self._options)
            try:
                uplink.greet(max(deadline.remaining(), _PAUSE_S[0]))
                uplink.watch(self._hear_above, max(deadline.remaining(), _PAUSE_S[0]))
                return uplink
            except ProtocolError:
                uplink.close()
                raise
            except CommError as error:
                uplink.close()
                if uplink.refused:
                    raise faults.stranger(above, address) from error
                if deadline.passed():
                    raise faults.unreachable(above, address, deadline.seconds, error.message) from error
                # It listened before it told its address.  Between hosts somebody else may say so for a while.
                if not deserted(address):
                    refused = None
                elif (refused := refused or Deadline(0 if is_unix(address) else _REFUSED_S)).passed():
                    raise faults.gone(above, f"nobody listens at {address} any more") from error
            except BaseException:
                uplink.close()
                raise
            self._closed.wait(min(pause_s, deadline.remaining()))
            pause_s = min(_PAUSE_S[1], pause_s * 2)

    def _hear_above(self, error: ReknitError) -> None:
        self.rounds.break_off(error, self.above)

    def _check(self) -> None:
        if self._closed.is_set():
            raise faults.copied(self._farewell)


class TreeGroup:
    """Ranks in processes of their own, on any hosts that reach each other by TCP."""

    def __init__(self, seat: TreePort) -> None:
        """Use `join`, or `listen` and then `TreePort.climb`."""
        self.rank, self.size = seat.rank, seat.topology.size
        self.topology, self.generation = seat.topology, seat.generation
        self.host = seat.host
        """The address of this host that other ranks are told, None for a rank with none below it."""
        self._seat = seat

    @classmethod
    def join(cls, store: Store, rank: int, size: int, *, job: str, options: CommOptions) -> TreeGroup:
        """Join the group of `job`: return when this rank reached the rank above it, and can be reached.

        Ranks meet in `store` under the name `job`; a job that is started again may meet under the same.
        Raises `DeadlineError` when other ranks do not come within `options.connect_timeout_s`,
        `ProtocolError` when they take the group for another one, `CommError` when this rank cannot listen.
        """
        patience_s = options.connect_timeout_s
        shape = gather_shape(store, rank, size, job=job, options=options, timeout_s=patience_s)
        if shape.together and options.bind is None and options.interface is None and options.tls is None:
            options = replace(options, bind=UNIX)
        elif rank == 0 and options.tls is None and getattr(store, "is_open", False):
            _warn_of_plain(shape.topology.num_hosts)
        key = f"{base(job)}/{shape.run}/address"
        with ExitStack() as failing:
            if shape.topology.children(rank):
                failing.push(partial(_tell_below, store, f"{key}/{rank}", rank))
            seat = TreePort(
                rank, shape.topology, job, shape.generation, options, getattr(store, "master", None)
            )
            failing.callback(seat.close)
            if seat.address:
                store.set(f"{key}/{rank}", seat.address.encode())
            above = "" if seat.above is None else address_in(store.get(f"{key}/{seat.above}", patience_s))
            group = seat.climb(above)
            failing.pop_all()
        return group

    @classmethod
    def listen(
        cls, rank: int, topology: Topology, *, job: str, generation: int, options: CommOptions
    ) -> TreePort:
        """Take a seat, for ranks that share no store: others carry its address to the ranks below it.

        `TreePort.above` says whose address a rank needs to climb.  The ranks may climb in any order.  Raises
        `CommError` when this rank cannot listen.
        """
        return TreePort(rank, topology, job, generation, options)

    @property
    def broken(self) -> bool:
        """Whether the group is known to be broken."""
        return self._seat.broken

    def exchange(
        self,
        name: str,
        request: bytes,
        decide: Callable[[list[bytes]], Sequence[bytes]],
        timeout_s: float,
        *,
        merge: Merge | None = None,
        subject: str = "",
    ) -> bytes:
        """Hold one round, as `Group.exchange` says; errors may take up to 5 s longer than `timeout_s`."""
        try:
            return self._seat.rounds.hold(Call(name, request, timeout_s, subject, merge), decide)
        except CommError:
            self._seat.announce()
            raise

    def on_broken(self, callback: Callable[[ReknitError], object]) -> None:
        """Call `callback` when the group breaks, as `TreePort.on_broken` says."""
        self._seat.on_broken(callback)

    def close(self) -> None:
        """Leave the group: later rounds fail on every rank.  Closing twice does nothing."""
        self._seat.close()
