"""Fetches that several ranks want: read by one, and passed on while the next ones are read."""

from __future__ import annotations

import threading
from collections import Counter, deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from reknit.engine.memory.workers import run_jobs, start
from reknit.engine.sharing.host_exchange import HostExchange
from reknit.engine.sharing.ring import AWAY, HeldFetch, Slot, aligned, batches_of, num_slots
from reknit.errors import CommError, DeadlineError, ReknitError
from reknit.monitor.phase import Deadline
from reknit.processes.shared_memory import SharedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.memory.arena import Arena
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.engine.sharing.host_link import HostLink
    from reknit.monitor.phase import Recorder
    from reknit.planner.sharing import FetchTable
    from reknit.types.plan import LoadPlan

    Job = Callable[[Arena], None]
    Bytes = NDArray[np.uint8]

_LOOK_S = 0.5
_GRACE_S = 10.0
"""How much longer a rank stays in step with other hosts, so that all meet their deadlines there."""


class StoppedError(CommError):
    """Another rank has left the exchange; it knows why."""


class Sharing(NamedTuple):
    """How this rank takes part.

    `rows[k]` are the reads (numbers of the plan) that row `k` of `part` contains, `paths[k]` is its file.
    `peers` are the addresses of those that take from this rank's ring.  `cell_nbytes` is the size of the
    largest fetch, and `num_slots` says how many of that size the ring should have.
    """

    part: FetchTable
    num_turns: int
    rows: Sequence[Sequence[int]]
    paths: Sequence[str]
    peers: Mapping[int, str]
    cell_nbytes: int
    num_slots: int


class FetchReader(Protocol):
    """What an exchange does with the bytes of fetches; `loading.read.RangeReader` is one."""

    def fetch(self, path: str, start: int, buffer: Bytes, /) -> None:
        """Read and verify."""

    def deliver(self, number: int, start: int, data: Bytes, /) -> None:
        """Copy to the targets what read `number` is for."""

    def under_way(self) -> str:
        """Say what is being read."""

    def abandon(self) -> None:
        """Touch no target any more, even if a read of the storage still hangs."""


class PlanReader(FetchReader, Protocol):
    """What a shared read needs of the reader of one rank's plan; `loading.read.RangeReader` is one."""

    plan: LoadPlan
    cell_nbytes: int
    block_nbytes: int

    def jobs(self, reads: Iterable[int], /) -> Sequence[int]:
        """Return the numbers of some reads of the plan and of all strided reads."""

    def read(self, number: int, arena: Arena, /) -> None:
        """Carry out one of `jobs`."""

    def record(self, recorder: Recorder, /) -> None:
        """Record the phases read, verify and deliver."""


class Exchange:
    """One rank's part in the reading of one load.

    `private` are the jobs that concern nobody else.  Workers take, in this order, what has arrived from
    others, the next fetch that this rank reads for others as long as there is room in its ring, and private
    jobs.  So none of them ever waits for room while another rank waits for him.
    """

    def __init__(
        self,
        rank: int,
        sharing: Sharing,
        work: FetchReader,
        private: Sequence[Job],
        link: HostLink | None,
        carrier: Carrier | None,
        broken: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self.nbytes_received = 0
        self._rank, self._sharing, self._work = rank, sharing, work
        self._link, self._broken = link, broken
        self._deadline, self._latest = Deadline(timeout_s), Deadline(timeout_s + _GRACE_S)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._private: deque[Job] = deque(private)
        self._arrived: deque[Job] = deque()
        part = sharing.part
        self._row = {number: row for row, number in enumerate(part.number.tolist())}
        self._to_read = deque(batches_of(part, rank, sharing.cell_nbytes))
        self._to_come = set(part.number[part.reader != rank].tolist())
        self._owed = Counter(part.taker.tolist())
        self._held: dict[int, HeldFetch] = {}
        self._free: list[Slot] = []
        self._ring: SharedMemory | None = None
        self._is_open, self._num_reading = False, 0
        self._received = Counter[int]()
        """Of each exchange, how many fetches are not yet copied by all."""
        self._turns = None if carrier is None else HostExchange(rank, part, carrier, self._check_others)

    # The caller's thread.

    def run(self, threads: int, arena_nbytes: int, budget_nbytes: int) -> None:
        """Carry out everything, with this much memory, but for what the least of it takes.

        Raises `StoppedError` when another rank gave up, or its own error.
        """
        with ExitStack() as last:
            join_turns: Callable[[], None] = self._hold_turns
            try:
                join_turns = start("reknit-exchange", self._hold_turns).join
                self._open(last)
                run_jobs(
                    range(threads),
                    lambda _, arena: self._loop(arena),
                    threads=threads,
                    arena_nbytes=arena_nbytes,
                    budget_nbytes=budget_nbytes - self._nbytes,
                    timeout_s=self._deadline.seconds,
                    what=self._doing,
                    stop=self.failed,
                )
                self._wait(lambda: not self._held)
                self._leave(join_turns)
            except BaseException as error:
                self._work.abandon()
                self.failed(error)
                self._leave(join_turns)
                if isinstance(error, ReknitError):
                    error.sign(phase="read")
                raise
            if self._error is not None:
                raise self._error

    def _open(self, last: ExitStack) -> None:
        """Make the ring, and give it to those who take from it."""
        try:
            self._make_ring(last)
        finally:
            # Also without a ring: those who wait for this rank then hear that it is gone.
            if self._link is not None:
                try:
                    self._link.open(self._ring, self._sharing.peers, self)
                except CommError as error:
                    raise StoppedError(error.message) from error
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    @property
    def _nbytes(self) -> int:
        """Memory of the ring, and of what is packed to be sent."""
        sent = 0 if self._turns is None else self._turns.sent_nbytes
        return sent if self._ring is None else sent + self._ring.nbytes

    def _leave(self, join_turns: Callable[[], None]) -> None:
        """Let ranks of this host know that this one has ended, then those of others, in step with them."""
        if self._link is not None:
            self._link.close()
        join_turns()
        self._turns = None

    def _make_ring(self, last: ExitStack) -> None:
        """Make the memory through which fetches go from this rank, no larger than needed."""
        cell = self._sharing.cell_nbytes
        slots = num_slots(self._to_read, self._sharing.part, self._sharing.num_slots)
        received = 0 if self._turns is None else self._turns.area_nbytes
        if slots or received:
            ring = self._ring = SharedMemory.create(slots * cell + received)
            last.callback(ring.close)
            self._free = [Slot(k * cell, ring.bytes[k * cell : (k + 1) * cell]) for k in range(slots)]
            if self._turns is not None:
                self._turns.area = ring.bytes[slots * cell :]

    def failed(self, error: BaseException) -> None:
        """Keep the first error, and let nobody wait any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so; raises what went wrong meanwhile."""
        with self._changed:
            while not ready():
                self._check()
                self._changed.wait(min(_LOOK_S, self._deadline.remaining()))

    def _check(self) -> None:
        """Raise what ends the exchange early."""
        if self._error is not None:
            raise self._error
        if self._broken():
            raise StoppedError("the group of ranks is broken")
        if self._deadline.passed():
            raise self._late()

    def _check_others(self) -> None:
        """Raise what keeps this rank from going on in step with other hosts; no error of its own does.

        Whoever left an exchange in the middle would keep the others waiting, and spoil the process group.
        """
        if self._broken():
            raise StoppedError("the group of ranks is broken")
        if self._latest.passed():
            raise self._late()

    def _late(self) -> DeadlineError:
        """Return the error of a rank that has waited too long."""
        return DeadlineError(f"{self._doing()} did not finish within {self._deadline.seconds:g} s")

    def _doing(self) -> str:
        """Say what this rank is at."""
        if self._num_reading:
            return self._work.under_way()
        part, paths = self._sharing.part, self._sharing.paths
        with self._changed:
            rows = [self._row[number] for number in sorted(self._to_come)]
            waiting = {rank for held in self._held.values() for rank in held.waiting}
        if rows:
            readers = ", ".join(map(str, sorted(set(part.reader[rows].tolist()))[:8]))
            return f"waiting for {len(rows)} ranges, such as of {paths[rows[0]]}, that rank {readers} reads"
        takers = ", ".join(map(str, sorted(waiting - {self._rank, AWAY})[:8])) or "of another host"
        return f"waiting for rank {takers} to take what was read for it"

    # Workers.

    def _loop(self, arena: Arena) -> None:
        while (job := self._take()) is not None:
            job(arena)

    def _take(self) -> Job | None:
        """Return the next job, waiting for one; None when there is nothing left to do for this rank."""
        with self._changed:
            while True:
                self._check()
                if self._arrived:
                    return self._arrived.popleft()
                if self._to_read and self._free:
                    return self._reading(partial(self._read, self._to_read.popleft(), self._free.pop()))
                if self._private:
                    return self._reading(self._private.popleft())
                if not self._to_read and not self._to_come:
                    return None
                self._changed.wait(min(_LOOK_S, self._deadline.remaining()))

    def _reading(self, job: Job) -> Job:
        """Return a job that tells while it is at storage."""

        def counted(arena: Arena) -> None:
            with self._changed:
                self._num_reading += 1
            job(arena)
            with self._changed:
                self._num_reading -= 1

        return counted

    def _read(self, rows: Sequence[int], slot: Slot, _: Arena) -> None:
        """Read fetches into a slot, tell those who want them, and take this rank's own part."""
        part = self._sharing.part
        slot.holds = set(part.number[list(rows)].tolist())
        at = 0
        for row in rows:
            start, nbytes = int(part.start[row]), int(part.nbytes[row])
            memory = slot.memory[at : at + nbytes]
            self._work.fetch(self._sharing.paths[row], start, memory)
            self._hold(row, HeldFetch(slot, slot.at + at, memory, {AWAY} if part.turn[row] >= 0 else set()))
            at += aligned(nbytes)
            self._deliver(row, memory)
            self.taken(int(part.number[row]), self._rank)

    def _hold(self, row: int, held: HeldFetch) -> None:
        """Keep a fetch until all have copied it, and tell those of this host."""
        part = self._sharing.part
        number = int(part.number[row])
        takers = part.taker[part.taker_first[row] : part.taker_first[row + 1]].tolist()
        held.waiting.update([self._rank, *takers])
        with self._changed:
            self._held[number] = held
            self._received[held.slot.turn] += 1
            self._changed.notify_all()
        for rank in takers:
            assert self._link is not None
            self._link.ready(rank, number, held.at)

    def _deliver(self, row: int, memory: Bytes) -> None:
        part = self._sharing.part
        start, nbytes = int(part.start[row]), int(part.nbytes[row])
        for read in self._sharing.rows[row]:
            self._work.deliver(read, start, memory[:nbytes])

    def _arrive(self, row: int, memory: Bytes, done: Callable[[], None]) -> None:
        """Let a worker take this rank's part of what another rank read, and call `done` then."""

        def job(_: Arena) -> None:
            self._deliver(row, memory)
            with self._changed:
                self.nbytes_received += int(self._sharing.part.nbytes[row])
                self._to_come.discard(int(self._sharing.part.number[row]))
                self._changed.notify_all()
            done()

        with self._changed:
            self._arrived.append(job)
            self._changed.notify_all()

    # The thread that listens to ranks of this host.

    def ready(self, rank: int, number: int, memory: Bytes) -> None:
        """Let a worker copy a fetch out of another rank's ring."""
        assert self._link is not None
        self._arrive(self._row[number], memory, partial(self._link.taken, rank, number))

    def taken(self, number: int, rank: int) -> None:
        """Free a slot when the last rank has copied it."""
        with self._changed:
            held = self._held[number]
            held.waiting.discard(rank)
            self._owed[rank] -= 1
            if not held.waiting:
                del self._held[number]
                self._received[held.slot.turn] -= 1
                held.slot.holds.discard(number)
                if held.slot.turn < 0 and not held.slot.holds:
                    self._free.append(held.slot)
            self._changed.notify_all()

    def source_ended(self, rank: int) -> None:
        """Give up when a rank has gone that owes something."""
        source = self._sharing.part.source
        with self._changed:
            is_early = any(source[self._row[number]] == rank for number in self._to_come)
        if is_early:
            self.failed(StoppedError(f"rank {rank} has left the exchange"))

    def taker_ended(self, rank: int) -> None:
        """Give up when a rank has gone that has not taken all that it wanted."""
        if self._owed[rank] > 0:
            self.failed(StoppedError(f"rank {rank} has left the exchange"))

    # The thread that holds the exchanges between hosts.

    def _hold_turns(self) -> None:
        try:
            for turn in range(self._sharing.num_turns):
                self._hold_turn(turn)
        except BaseException as error:  # whatever it is, the workers must not wait for more to come
            if isinstance(error, CommError) and not isinstance(error, DeadlineError):
                error = StoppedError(error.message)  # who is gone, the group of ranks knows better
            self.failed(error)

    def _hold_turn(self, turn: int) -> None:
        """Send and receive what belongs to one exchange, when it is read and there is room for it."""
        assert self._turns is not None
        numbers = self._sharing.part.number
        sending = self._turns.sending(turn)
        to_read = numbers[sending].tolist()

        def is_read() -> bool:
            while to_read and to_read[-1] in self._held:
                to_read.pop()
            return self._is_open and not to_read

        failure: BaseException | None = None
        try:
            self._wait(is_read)
            # Each half of the area is filled in every other turn.
            self._wait(lambda: turn < 2 or not self._received[turn - 2])
            self._check()
        except BaseException as error:  # the others must not wait for this rank's bytes
            failure = error
        if not self._turns.all_well(failure is None):
            raise failure or StoppedError("a rank of another host has left the exchange")
        received = self._turns.swap(turn, {row: self._held[int(numbers[row])].memory for row in sending})
        for row in sending:
            self.taken(int(numbers[row]), AWAY)
        base = 0 if self._ring is None else self._ring.nbytes - self._turns.area_nbytes
        for row, at, memory in received:
            self._hold(row, HeldFetch(Slot(base + at, memory, turn), base + at, memory, set()))
            self._arrive(row, memory, partial(self.taken, int(numbers[row]), self._rank))
