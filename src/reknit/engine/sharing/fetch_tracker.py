"""Which fetches does a rank hold for others, and which is it waiting for?  Shared by all its threads."""

from __future__ import annotations

import threading
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.sharing.ring import OTHER_HOSTS, HeldFetch, RingSlot
from reknit.errors import CommError, DeadlineError
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.sharing.host_link import HostLink
    from reknit.planner.sharing import FetchTable

    Bytes = NDArray[np.uint8]

LOOK_S = 0.5
"""How often a thread that waits looks at deadlines, and whether the group of ranks is broken."""
_GRACE_S = 10.0
"""How much longer a rank stays in step with other hosts, so that all meet their deadlines there."""


class StoppedError(CommError):
    """Another rank left the shared read; it has the reason."""


class Arrival(NamedTuple):
    """A fetch that another rank read, for a worker to copy; `done` is called afterwards."""

    row: int
    memory: Bytes
    done: Callable[[], None]


class FetchTracker:
    """The state of one rank's part in a shared read; `changed` guards it and wakes waiting threads.

    `part` lists the fetches, `paths` has the file of each of its rows, and `under_way` names the files that
    are being read from storage.  `free` are the slots of the ring that can be filled, and `held` the fetches
    that other ranks have not copied yet.  `arrived` are the fetches that workers of this rank have to copy,
    and `to_come` the numbers of the fetches that other ranks read.
    """

    def __init__(
        self,
        *,
        rank: int,
        part: FetchTable,
        paths: Sequence[str],
        link: HostLink | None,
        under_way: Callable[[], str],
        broken: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.is_open = False
        self.free: list[RingSlot] = []
        self.held: dict[int, HeldFetch] = {}
        self.arrived: deque[Arrival] = deque()
        self.to_come = set(part.number[part.reader != rank].tolist())
        self.num_reading = 0
        """Workers that are reading from storage."""
        self.in_exchange = ""
        """The exchange with other hosts in which this rank is waiting for them, or for a device."""
        self.deadline, self._latest = Deadline(timeout_s), Deadline(timeout_s + _GRACE_S)
        self._rank, self._part, self._paths = rank, part, paths
        self._link, self._under_way, self._broken = link, under_way, broken
        self._row = {number: row for row, number in enumerate(part.number.tolist())}
        self._owed = Counter(part.taker.tolist())
        self._uncopied = Counter[int]()
        """By exchange between hosts: how many of its fetches are not copied yet by all."""

    def opened(self, free: list[RingSlot]) -> None:
        """Let threads use the ring."""
        with self.changed:
            self.free, self.is_open = free, True
            self.changed.notify_all()

    def hold(self, row: int, held: HeldFetch) -> None:
        """Keep a fetch until all have copied it, and announce it to the ranks of this host that want it."""
        part, number = self._part, int(self._part.number[row])
        takers = part.taker[part.taker_first[row] : part.taker_first[row + 1]].tolist()
        held.waiting.update([self._rank, *takers])
        with self.changed:
            self.held[number] = held
            self._uncopied[held.slot.turn] += 1
            self.changed.notify_all()
        for rank in takers:
            assert self._link is not None
            self._link.ready(rank, number, held.at)

    def arrive(self, arrival: Arrival) -> None:
        """Let a worker copy a fetch of another rank."""
        with self.changed:
            self.arrived.append(arrival)
            self.changed.notify_all()

    def all_copied(self, turn: int) -> bool:
        """Return whether all ranks have copied the bytes of an exchange between hosts."""
        return not self._uncopied[turn]

    # Calls of the link to other ranks of this host.

    def ready(self, rank: int, number: int, memory: Bytes) -> None:
        """Let a worker copy a fetch out of another rank's ring."""
        assert self._link is not None
        self.arrive(Arrival(self._row[number], memory, partial(self._link.taken, rank, number)))

    def taken(self, number: int, rank: int) -> None:
        """Note that a rank has copied a fetch; the last one frees its slot."""
        with self.changed:
            held = self.held[number]
            held.waiting.discard(rank)
            self._owed[rank] -= 1
            if not held.waiting:
                del self.held[number]
                self._uncopied[held.slot.turn] -= 1
                held.slot.holds.discard(number)
                if held.slot.turn < 0 and not held.slot.holds:
                    self.free.append(held.slot)
            self.changed.notify_all()

    def source_ended(self, rank: int) -> None:
        """Fail when a rank has left that this one still needs something from."""
        source = self._part.source
        with self.changed:
            is_early = any(source[self._row[number]] == rank for number in self.to_come)
        if is_early:
            self.failed(StoppedError(f"rank {rank} has left the exchange"))

    def taker_ended(self, rank: int) -> None:
        """Fail when a rank has left that has not taken all that it wanted."""
        if self._owed[rank] > 0:
            self.failed(StoppedError(f"rank {rank} has left the exchange"))

    def failed(self, error: BaseException) -> None:
        """Keep the first error, and wake all threads."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    # Waiting, and its end.

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once something is so; raise an error that came meanwhile."""
        with self.changed:
            while not ready():
                self.check()
                self.wait_for_change()

    def wait_for_change(self) -> None:
        """Sleep until something has changed or it is time to `check`; `changed` is held."""
        self.changed.wait(min(LOOK_S, self.deadline.remaining()))

    def check(self) -> None:
        """Raise the error that ends the exchange early."""
        if self.error is not None:
            raise self.error
        self._check(self.deadline)

    def is_late(self) -> bool:
        """Return whether not even other hosts are waited for any longer."""
        return self._latest.passed()

    def check_other_hosts(self) -> None:
        """Raise the error that keeps this rank from going on in step with other hosts; no error of its own
        does.

        A rank that left an exchange in the middle would keep the others waiting, and spoil the process group.
        """
        self._check(self._latest)

    def _check(self, deadline: Deadline) -> None:
        if self._broken():
            raise StoppedError("the group of ranks is broken")
        if deadline.passed():
            raise self.late()

    def late(self) -> DeadlineError:
        """Return the error that names the fetches that were late."""
        return DeadlineError(f"{self.doing()} did not finish within {self.deadline.seconds:g} s")

    def doing(self) -> str:
        """Name the files that this rank is reading, or else the fetches that it waits for."""
        if self.num_reading:
            return self._under_way()
        part, within = self._part, f"{self.in_exchange}, " if self.in_exchange else ""
        with self.changed:
            rows = [self._row[number] for number in sorted(self.to_come)]
            waiting = {rank for held in self.held.values() for rank in held.waiting}
        if rows:
            readers = ", ".join(map(str, sorted(set(part.reader[rows].tolist()))[:8]))
            first = self._paths[rows[0]]
            return f"{within}waiting for {len(rows)} ranges, such as of {first}, that rank {readers} reads"
        takers = ", ".join(map(str, sorted(waiting - {self._rank, OTHER_HOSTS})[:8])) or "of another host"
        return f"{within}waiting for rank {takers} to take the bytes read for it"
