"""The arenas of one rank: made on demand, pre-faulted, pinned for devices, lent and reused."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reknit.engine.memory.workers import PAGE_NBYTES, SPAN_NBYTES, run_jobs
from reknit.environment import local_ranks, num_threads
from reknit.errors import UsageError
from reknit.events.phase import Deadline
from reknit.processes.shared_memory import SharedMemory
from reknit.system import available_nbytes
from reknit.types.devices import device_of, pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger("reknit")

MAX_ARENAS = 2
LEAST_NBYTES = 2 * SPAN_NBYTES
"""The smallest arena that is of use: with two spans, one is filled while the other is written."""

_ROUND_NBYTES = 2 << 20  # a huge page
_LOOK_S = 1.0


@dataclass(eq=False)
class Lease:
    """An arena that belongs to the caller until `Arenas.release`.

    `number` names the arena while it exists, and is not reused.  `dropped` are the numbers of arenas that
    were lent before, and were closed since the last lease.  While `under_way` returns True a device may still
    write to the arena, which is not lent again until then.
    """

    number: int
    arena: SharedMemory
    dropped: tuple[int, ...]
    under_way: Callable[[], bool] = lambda: False

    def pin(self, sources: Iterable[Any]) -> bool:
        """Pin the arena for the devices of some `bits` arrays; return whether they can copy to it alone."""
        device = next(filter(None, map(device_of, sources)), None)
        if device is None or self.arena.is_held:
            return True
        unpin = pin(self.arena.bytes, device)
        self.arena.hold(unpin)
        return unpin is not None

    @property
    def nbytes(self) -> int:
        """Capacity of the arena; if it is less than the requested size, use the arena as a ring."""
        return self.arena.nbytes


@dataclass(eq=False)
class _Slot:
    """Room for one arena: in the making while `arena` is None, then free or, with a `lease`, busy."""

    number: int
    nbytes: int
    replaces: list[SharedMemory] = field(default_factory=list)
    arena: SharedMemory | None = None
    lease: Lease | None = None
    was_lent: bool = False
    under_way: Callable[[], bool] = lambda: False

    @property
    def is_free(self) -> bool:
        """Whether the arena exists and can be lent."""
        return self.arena is not None and self.lease is None and not self.under_way()


class Arenas:
    """At most two arenas of one rank, so that a save can be staged while the save before is still written.

    All arenas together never exceed the budget.  For a save of n bytes (rounded up to 2 MiB) there are

    * two arenas of n bytes if both fit in the budget; the second is made when a save finds the first lent;
    * else one arena of n bytes, and a save waits until the save before is written;
    * else one arena of the whole budget (rounded down to spans), through which the save streams as a ring.

    A free arena that is large enough is lent as it is.  So arenas only grow, and saves of equal size allocate
    nothing.  Before a larger arena is made, the free arenas are closed and their pages given back to the
    kernel, even if other processes still map them.

    Without a budget, the first `acquire` sets one: half of the free memory, divided by the ranks on this
    machine, and at least two spans.  Memory is free if neither the machine nor a control group withholds it.
    If the kernel has less memory than planned, the plan shrinks: one arena instead of two, then half the
    size, down to two spans.

    All methods may be called from any thread.
    """

    def __init__(self, budget_nbytes: int | None) -> None:
        if budget_nbytes is not None and budget_nbytes < SPAN_NBYTES:
            raise UsageError(f"the budget for arenas must be at least {SPAN_NBYTES} bytes")
        self._budget = budget_nbytes
        self._most = MAX_ARENAS
        self._changed = threading.Condition()
        self._slots: list[_Slot] = []
        self._last_number = 0
        self._dropped: list[int] = []
        self._wanted: int | None = None  # the bytes planned when memory ran out, for the warning
        self._warned = False
        self._closed = False

    def acquire(self, nbytes: int, timeout_s: float) -> Lease | None:
        """Borrow a pre-faulted arena for a save of `nbytes`; None if no arena came free within `timeout_s`.

        The timeout may be 0.  The lease may have fewer bytes.  Raises `MemoryError` when there is too little
        memory for the smallest arena, and `UsageError` after `close`.
        """
        deadline = Deadline(timeout_s)
        while True:
            with self._changed:
                slot = self._take(nbytes, deadline)
                if slot is None:
                    return None
                if slot.arena is not None:
                    return self._lend(slot, slot.arena)
            if error := self._make(slot):
                raise error

    def release(self, lease: Lease) -> None:
        """Give an arena back when all its bytes are written; a second call does nothing."""
        with self._changed:
            slot = next((slot for slot in self._slots if slot.lease is lease), None)
            if slot is None:
                return
            slot.lease, slot.under_way = None, lease.under_way
            unwanted = self._take_unwanted()
        _dispose(unwanted)

    def close(self) -> None:
        """Close the free arenas now, and each other arena at its release; waiting calls raise."""
        with self._changed:
            self._closed = True
            unwanted = self._take_unwanted()
        _dispose(unwanted)

    def forget(self) -> None:
        """Unmap all arenas in a forked child, and leave their pages to the parent."""
        for slot in self._slots:
            if slot.arena is not None:
                slot.arena.hold(None)
                slot.arena.close()

    def _take_unwanted(self) -> list[SharedMemory]:
        """Wake the waiting threads; after `close`, return the free arenas, to be disposed of unlocked."""
        self._changed.notify_all()
        if not self._closed:
            return []
        free = [slot for slot in self._slots if slot.is_free]
        self._slots = [slot for slot in self._slots if slot not in free]
        return [slot.arena for slot in free if slot.arena is not None]

    def _limit(self) -> int:
        """Return the largest size of all arenas together."""
        if self._budget is None:
            self._budget = max(LEAST_NBYTES, available_nbytes() // 2 // local_ranks())
        return self._budget

    def _capacity(self, nbytes: int) -> int:
        """Return the size of the arena for a save of `nbytes`."""
        whole = max(1, -(-nbytes // _ROUND_NBYTES)) * _ROUND_NBYTES
        limit = self._limit()
        return whole if whole <= limit else limit // SPAN_NBYTES * SPAN_NBYTES

    def _take(self, nbytes: int, deadline: Deadline) -> _Slot | None:
        """Wait for a slot with a free arena, or for a new slot, whose arena the caller has to make."""
        while True:
            if self._closed:
                raise UsageError("these arenas are closed")
            want = self._capacity(nbytes)
            free = [slot for slot in self._slots if slot.is_free]
            if fitting := [slot for slot in free if slot.nbytes >= want]:
                return min(fitting, key=lambda slot: slot.nbytes)  # a larger save may need the larger arena
            if slot := self._reserve(want):
                return slot
            if deadline.passed():
                return None
            self._changed.wait(min(deadline.remaining(), _LOOK_S))  # devices do not notify

    def _reserve(self, want: int) -> _Slot | None:
        """Return a new slot that replaces the free slots, which are too small; None without room for it."""
        kept = [slot for slot in self._slots if not slot.is_free]
        if len(kept) >= self._most or sum(slot.nbytes for slot in kept) + want > self._limit():
            return None
        gone = [slot for slot in self._slots if slot not in kept]
        self._dropped += [slot.number for slot in gone if slot.was_lent]
        self._last_number += 1
        new = _Slot(self._last_number, want, [slot.arena for slot in gone if slot.arena is not None])
        self._slots = [*kept, new]
        return new

    def _make(self, slot: _Slot) -> MemoryError | None:
        """Make the arena of a reserved slot; return the error if memory ran out and the plan cannot shrink.

        This takes a second for some GiB.  The lock is not held, so that arenas can be released meanwhile.
        """
        arena, failure = None, None
        try:
            _dispose(slot.replaces)
            arena = _prefaulted(slot.nbytes)
        except MemoryError as error:
            failure = error
        finally:
            with self._changed:
                slot.replaces, slot.arena = [], arena
                if arena is None:
                    self._slots.remove(slot)
                if failure is not None and self._settle(slot.nbytes):
                    failure = None
                unwanted = self._take_unwanted()
            _dispose(unwanted)
        return failure

    def _settle(self, nbytes: int) -> bool:
        """Shrink the plan after an arena of `nbytes` could not be made; return whether that is possible."""
        others = sum(slot.nbytes for slot in self._slots)
        self._wanted = self._wanted or others + nbytes
        if self._slots:
            self._most = 1
        elif nbytes > LEAST_NBYTES:
            self._budget = max(LEAST_NBYTES, nbytes // 2 // SPAN_NBYTES * SPAN_NBYTES)
        else:
            return False
        return True

    def _lend(self, slot: _Slot, arena: SharedMemory) -> Lease:
        if self._wanted is not None and not self._warned:
            self._warned = True
            logger.warning(
                "only %d of %d bytes of host memory could be had: saves are streamed through it, or wait for "
                "one another, and block longer",
                sum(slot.nbytes for slot in self._slots),
                self._wanted,
            )
        lease = slot.lease = Lease(slot.number, arena, tuple(self._dropped))
        slot.was_lent = True
        self._dropped.clear()
        return lease


def _prefaulted(nbytes: int) -> SharedMemory:
    arena = SharedMemory.create(nbytes)
    threads = num_threads(None)
    try:
        # The kernel reserves pages for one thread at a time, but clears and maps them in parallel.
        run_jobs(
            range(0, nbytes, SPAN_NBYTES),
            lambda start, _: arena.populate(start, SPAN_NBYTES),
            threads=threads,
            arena_nbytes=PAGE_NBYTES,
            budget_nbytes=threads * PAGE_NBYTES,
        )
    except BaseException:
        _dispose([arena])
        raise
    return arena


def _dispose(arenas: list[SharedMemory]) -> None:
    for arena in arenas:
        # `close` alone would keep the pages as long as another process maps them.
        arena.discard()
        arena.close()
