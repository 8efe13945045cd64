"""Read shared ranges once: one rank reads a fetch, and passes it on while it reads the next."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct

from reknit.engine.memory.workers import borrowed, run_jobs
from reknit.engine.messages import StoppedError
from reknit.engine.sharing.host_exchange import HostExchange
from reknit.engine.sharing.tracker import (
    LOOK_S,
    OTHER_HOSTS,
    FetchTracker,
    HeldFetch,
    RingSlot,
    aligned,
    batches_of,
    num_slots,
)
from reknit.errors import CommError, ReknitError
from reknit.processes.shared_memory import SharedMemory
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from reknit.engine.memory.devices import Transfer
    from reknit.engine.memory.workers import Arena, Arenas
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.engine.sharing.tracker import Arrival, HostLink
    from reknit.events.phase import Recorder
    from reknit.planner.sharing import FetchTable
    from reknit.types.shard import LoadPlan

    Job = Callable[[Arena], None]
    Bytes = NDArray[np.uint8]


class Sharing(Struct, frozen=True):
    """How this rank takes part.

    `rows[k]` are the reads (numbers of the plan) that row `k` of `part` contains, `paths[k]` is its file.
    `peers` are the addresses of the ranks that copy from this rank's ring.  `cell_nbytes` is the size of the
    largest fetch, and `num_slots` says how many of that size the ring should have.  There are `num_turns`
    exchanges with other hosts, each in `num_steps` steps.
    """

    part: FetchTable
    num_turns: int
    num_steps: int
    rows: Sequence[Sequence[int]]
    paths: Sequence[str]
    peers: Mapping[int, str]
    cell_nbytes: int
    num_slots: int


class FetchReader(Protocol):
    """The actions of an exchange on the bytes of fetches; `loading.read.RangeReader` is one."""

    def fetch(self, path: str, start: int, buffer: Bytes, /) -> None:
        """Read and verify."""

    def wrong(self, path: str, start: int, data: Bytes, /) -> list[tuple[int, int]]:
        """Return the ranges of a file's bytes that differ from the saved ones; none without `verify`."""

    def deliver(self, number: int, start: int, data: Bytes, arena: Arena, /) -> None:
        """Copy the boxes of read `number` to the targets; `data` is free again when this returns."""

    def under_way(self) -> str:
        """Name the files that are being read."""

    def abandon(self) -> None:
        """Touch no target any more, even if a read of the storage still hangs."""


class PlanReader(FetchReader, Protocol):
    """The reader of one rank's plan, as a shared read needs it; `loading.read.RangeReader` is one."""

    plan: LoadPlan
    cell_nbytes: int
    block_nbytes: int
    arena_nbytes: int
    transfer: Transfer

    def arenas(self, nbytes: int, /) -> AbstractContextManager[Arena]:
        """Have an arena of a worker."""

    def jobs(self, reads: Iterable[int], /) -> Sequence[int]:
        """Return the numbers of some reads of the plan and of all strided reads."""

    def read(self, number: int, arena: Arena, /) -> None:
        """Carry out one of `jobs`."""

    def record(self, recorder: Recorder, /) -> None:
        """Record the phases read, verify and deliver."""


class Exchange:
    """One rank's part in a shared read.

    `private` are the jobs that concern no other rank.  Workers take, in this order, arrivals from other
    ranks, the next fetch that this rank reads for others while the ring has room, and private jobs.  So no
    worker waits for room while another rank waits for this one.
    """

    def __init__(
        self,
        rank: int,
        sharing: Sharing,
        work: FetchReader,
        *,
        private: Sequence[Job],
        link: HostLink | None,
        carrier: Carrier | None,
        broken: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self.nbytes_received = 0
        self._rank, self._sharing, self._work, self._link = rank, sharing, work, link
        part = sharing.part
        self._fetches = FetchTracker(
            rank=rank,
            part=part,
            paths=sharing.paths,
            link=link,
            under_way=work.under_way,
            broken=broken,
            timeout_s=timeout_s,
        )
        self._private: deque[Job] = deque(private)
        self._to_read = deque(batches_of(part, rank, sharing.cell_nbytes))
        self._ring: SharedMemory | None = None
        self._hosts: HostExchange | None = None
        if carrier is not None:
            self._hosts = HostExchange(
                rank=rank,
                part=part,
                carrier=carrier,
                fetches=self._fetches,
                num_steps=sharing.num_steps,
                paths=sharing.paths,
                wrong=work.wrong,
            )

    # The caller's thread.

    def run(self, threads: int, arena_nbytes: int, budget_nbytes: int, arenas: Arenas = borrowed) -> None:
        """Carry out everything within this much memory, or the least that it takes.

        Raises `StoppedError` when another rank left, or its own error.
        """
        fetches = self._fetches
        with ExitStack() as last:
            join_hosts: Callable[[float], None] | None = None
            try:
                if self._hosts is not None:
                    join_hosts = start_thread("reknit-exchange", self._hold_exchanges).join
                self._open(last)
                run_jobs(
                    range(threads),
                    lambda _, arena: self._loop(arena),
                    threads=threads,
                    arena_nbytes=arena_nbytes,
                    budget_nbytes=budget_nbytes - self._nbytes,
                    arenas=arenas,
                    timeout_s=fetches.deadline.seconds,
                    what=fetches.doing,
                    stop=fetches.failed,
                )
                fetches.wait(lambda: not fetches.held)
                self._leave(join_hosts)
            except BaseException as error:
                self._work.abandon()
                fetches.failed(error)
                self._leave(join_hosts)
                if isinstance(error, ReknitError):
                    error.sign(phase="read")
                raise
            if fetches.error is not None:
                raise fetches.error

    @property
    def _nbytes(self) -> int:
        """Memory of the ring, and of bytes that are packed for other hosts."""
        sent = 0 if self._hosts is None else self._hosts.packed_nbytes
        return sent if self._ring is None else sent + self._ring.nbytes

    def _open(self, last: ExitStack) -> None:
        """Make the ring, no larger than needed, and give it to the ranks that copy from it."""
        cell, slots = self._sharing.cell_nbytes, 0
        try:
            slots = num_slots(self._to_read, self._sharing.part, self._sharing.num_slots)
            received = 0 if self._hosts is None else self._hosts.area_nbytes
            if slots or received:
                self._ring = SharedMemory.create(slots * cell + received)
                last.callback(self._ring.close)
                if self._hosts is not None:
                    self._hosts.receive_into(self._ring, slots * cell)
        finally:
            # Also without a ring: ranks that wait for this one are then notified that it has left.
            if self._link is not None:
                try:
                    self._link.open(self._ring, self._sharing.peers, self._fetches)
                except CommError as error:
                    raise StoppedError(error.message) from error
        memory = np.empty(0, np.uint8) if self._ring is None else self._ring.bytes
        self._fetches.opened([RingSlot(k * cell, memory[k * cell : (k + 1) * cell]) for k in range(slots)])

    def _hold_exchanges(self) -> None:
        if self._hosts is not None:
            self._hosts.run(self._sharing.num_turns)

    def _leave(self, join_hosts: Callable[[float], None] | None) -> None:
        """Report the end of this rank to ranks of this host, then to those of others, in step with them.

        A thread that hangs in a call of the process group or of a driver is left behind when its time is up.
        """
        if self._link is not None:
            self._link.close()
        fetches, hosts = self._fetches, self._hosts
        if hosts is not None and join_hosts is not None:
            while not hosts.ended and not fetches.is_late():
                join_hosts(LOOK_S)
            join_hosts(LOOK_S)
            if not hosts.ended:
                fetches.failed(fetches.late())
        else:
            # A rank that could not start the thread holds the exchanges here, since other hosts wait for it.
            self._hold_exchanges()
        self._hosts = None

    # Workers.

    def _loop(self, arena: Arena) -> None:
        """Work until there is nothing left to do for this rank."""
        fetches = self._fetches
        while True:
            with fetches.changed:
                fetches.check()
                if fetches.arrived:
                    job: Job = partial(self._copy, fetches.arrived.popleft())
                elif self._to_read and fetches.free:
                    job = self._reading(partial(self._read, self._to_read.popleft(), fetches.free.pop()))
                elif self._private:
                    job = self._reading(self._private.popleft())
                elif self._to_read or fetches.to_come:
                    fetches.wait_for_change()
                    continue
                else:
                    return
            job(arena)

    def _reading(self, job: Job) -> Job:
        """Return a job that is counted while it reads from storage."""

        def counted(arena: Arena) -> None:
            with self._fetches.changed:
                self._fetches.num_reading += 1
            job(arena)
            with self._fetches.changed:
                self._fetches.num_reading -= 1

        return counted

    def _read(self, rows: Sequence[int], slot: RingSlot, arena: Arena) -> None:
        """Read fetches into a slot, announce them, and take this rank's own part."""
        part = self._sharing.part
        slot.holds = set(part.number[list(rows)].tolist())
        at = 0
        for row in rows:
            start, nbytes = int(part.start[row]), int(part.nbytes[row])
            memory = slot.memory[at : at + nbytes]
            self._work.fetch(self._sharing.paths[row], start, memory)
            waiting = {OTHER_HOSTS} if part.turn[row] >= 0 else set[int]()
            self._fetches.hold(row, HeldFetch(slot, slot.at + at, memory, waiting))
            at += aligned(nbytes)
            self._deliver(row, memory, arena)
            self._fetches.taken(int(part.number[row]), self._rank)

    def _copy(self, arrival: Arrival, arena: Arena) -> None:
        """Take this rank's part of a fetch of another rank."""
        row, memory, done = arrival.row, arrival.memory, arrival.done
        self._deliver(row, memory, arena)
        fetches, part = self._fetches, self._sharing.part
        with fetches.changed:
            self.nbytes_received += int(part.nbytes[row])
            fetches.to_come.discard(int(part.number[row]))
            fetches.changed.notify_all()
        done()

    def _deliver(self, row: int, memory: Bytes, arena: Arena) -> None:
        part = self._sharing.part
        start, nbytes = int(part.start[row]), int(part.nbytes[row])
        for read in self._sharing.rows[row]:
            self._work.deliver(read, start, memory[:nbytes], arena)
