"""The arenas of one rank: made when they are needed, pre-faulted, pinned for devices, lent and reused."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reknit.engine.memory.arena import PAGE_NBYTES, SPAN_NBYTES
from reknit.engine.memory.workers import run_jobs
from reknit.environment import local_ranks, num_threads
from reknit.errors import UsageError
from reknit.monitor.host_memory import available_nbytes
from reknit.monitor.phase import Deadline
from reknit.processes.shared_memory import SharedMemory
from reknit.types.devices import device_of, pin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger("reknit")

MAX_ARENAS = 2
LEAST_NBYTES = 2 * SPAN_NBYTES
"""Less than this is not settled for: with two spans, one is filled while the other is written."""

_ROUND_NBYTES = 2 << 20  # a huge page
_LOOK_S = 1.0


@dataclass(eq=False)
class Lease:
    """An arena that is the caller's until `Arenas.release`.

    `number` names the arena for as long as it exists, and is never given again.  `dropped`: numbers of arenas
    that were lent before and are closed since the last lease.  As long as `under_way` tells so a device may
    still write to the arena, and nobody gets it.
    """

    number: int
    arena: SharedMemory
    dropped: tuple[int, ...]
    under_way: Callable[[], bool] = lambda: False

    def pin(self, sources: Iterable[Any]) -> bool:
        """Let the devices of some `bits` arrays copy to the arena on their own; return whether they can."""
        device = next(filter(None, map(device_of, sources)), None)
        if device is None or self.arena.is_held:
            return True
        unpin = pin(self.arena.bytes, device)
        self.arena.hold(unpin)
        return unpin is not None

    @property
    def nbytes(self) -> int:
        """Capacity of the arena; where it is less than was asked for, it is to be used as a ring."""
        return self.arena.nbytes


@dataclass(eq=False)
class _Slot:
    """Room for one arena: being made while `arena` is None, then free or, with a `lease`, busy."""

    number: int
    nbytes: int
    replaces: list[SharedMemory] = field(default_factory=list)
    arena: SharedMemory | None = None
    lease: Lease | None = None
    was_lent: bool = False
    under_way: Callable[[], bool] = lambda: False

    @property
    def is_free(self) -> bool:
        """Whether the arena is there and nobody's."""
        return self.arena is not None and self.lease is None and not self.under_way()


class Arenas:
    """At most two arenas of one rank, so that a save can be staged while the one before is still written.

    All arenas together never exceed the budget.  For a save of n bytes (rounded up to 2 MiB) there are

    * two arenas of n bytes, where both fit in the budget, the second from when a save finds the first lent;
    * else one of n bytes, and a save waits until the one before is written;
    * else one of the whole budget (rounded down to spans), which the save is streamed through as a ring.

    A free arena that is large enough is taken as it is, so while sizes stay the same nothing is ever
    allocated again; arenas only grow.  Before a larger one is made, the free ones that are too small are
    closed and their pages given back, whoever else still maps them.

    Without a budget, one is chosen at the first `acquire`: half of the memory that this process could still
    get (the least of what the machine has and what its control groups leave), divided by the ranks on this
    machine, and at least two spans.  Where the kernel has less than was planned, the plan is made smaller:
    one arena instead of two, then half the size, down to two spans.

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
        self._wanted: int | None = None  # what was planned when memory ended, until a warning has said so
        self._warned = False
        self._closed = False

    def acquire(self, nbytes: int, timeout_s: float) -> Lease | None:
        """Borrow an arena for a save of `nbytes`, pre-faulted; None if none came free within `timeout_s`.

        The timeout may be 0.  The lease's `nbytes` may be less than was asked for.  Raises
        `MemoryError` when not even the smallest arena can be had, `UsageError` after `close`.
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
        """Give an arena back, when all its bytes are written; a second time does nothing."""
        with self._changed:
            slot = next((slot for slot in self._slots if slot.lease is lease), None)
            if slot is None:
                return
            slot.lease, slot.under_way = None, lease.under_way
            unwanted = self._take_unwanted()
        _dispose(unwanted)

    def close(self) -> None:
        """Close the free arenas now, and the others as they are released; waiting calls raise."""
        with self._changed:
            self._closed = True
            unwanted = self._take_unwanted()
        _dispose(unwanted)

    def forget(self) -> None:
        """Let go of all memory in a forked child, where it is still in use by the parent."""
        for slot in self._slots:
            if slot.arena is not None:
                slot.arena.hold(None)
                slot.arena.close()

    def _take_unwanted(self) -> list[SharedMemory]:
        """Wake who waits; after `close`, take out the free arenas, for the caller to dispose of unlocked."""
        self._changed.notify_all()
        if not self._closed:
            return []
        free = [slot for slot in self._slots if slot.is_free]
        self._slots = [slot for slot in self._slots if slot not in free]
        return [slot.arena for slot in free if slot.arena is not None]

    def _limit(self) -> int:
        """Return the bytes that all arenas together may have."""
        if self._budget is None:
            self._budget = max(LEAST_NBYTES, available_nbytes() // 2 // local_ranks())
        return self._budget

    def _capacity(self, nbytes: int) -> int:
        """Return the size of the arena for a save of `nbytes`."""
        whole = max(1, -(-nbytes // _ROUND_NBYTES)) * _ROUND_NBYTES
        limit = self._limit()
        return whole if whole <= limit else limit // SPAN_NBYTES * SPAN_NBYTES

    def _take(self, nbytes: int, deadline: Deadline) -> _Slot | None:
        """Wait for a slot: one with a free arena, or a new one whose arena the caller has to make."""
        while True:
            if self._closed:
                raise UsageError("these arenas are closed")
            want = self._capacity(nbytes)
            free = [slot for slot in self._slots if slot.is_free]
            if fitting := [slot for slot in free if slot.nbytes >= want]:
                return min(fitting, key=lambda slot: slot.nbytes)  # the larger may be needed for another
            if slot := self._reserve(want):
                return slot
            if deadline.passed():
                return None
            self._changed.wait(min(deadline.remaining(), _LOOK_S))  # no device says when it is done

    def _reserve(self, want: int) -> _Slot | None:
        """Return a new slot in place of the free ones, which are too small, if there is room for it."""
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
        """Give a reserved slot its arena; return the error if memory ended and nothing less will do.

        Takes a second for some GiB, so the lock is not held: arenas can be released meanwhile.
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
        """Plan for less, after an arena of `nbytes` could not be had; return whether that is possible."""
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
        # The kernel reserves pages for one thread after the other, but clears and maps them side by side.
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
        # Closing alone would leave the pages to other processes that have not let go of them yet.
        arena.discard()
        arena.close()
