"""Rounds between ranks that are threads of one process, for tests and simulated jobs."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from reknit.comm import round_errors
from reknit.comm.group import Topology
from reknit.comm.tree.machine import Decide, Notify, RoundDone, RoundMachine, SendOutcome, SendReport
from reknit.errors import from_wire
from reknit.events.phase import monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Call, Group
    from reknit.comm.rank_messages import Outcome
    from reknit.comm.tree.machine import Effect


def thread_groups(size: int, generation: int = 0) -> list[Group]:
    """Return one group for each of `size` ranks; give each to a thread of its own."""
    hall = _Hall(size, generation)
    return [ThreadGroup(hall, rank) for rank in range(size)]


class _Hall:
    """The machines of all ranks, and the pending effects of each thread; `lock` guards both."""

    def __init__(self, size: int, generation: int) -> None:
        self.topology, self.generation = Topology.flat(size, 16), generation
        self.lock = threading.Lock()
        self.changed = [threading.Condition(self.lock) for _ in range(size)]
        self.due: list[deque[Decide | RoundDone]] = [deque() for _ in range(size)]
        self.machines = [
            RoundMachine(rank, self.topology, job="threads", generation=generation, max_nbytes=sys.maxsize)
            for rank in range(size)
        ]

    def put(self, rank: int, receive: Callable[..., list[Effect]], *what: object) -> None:
        """Give the machine of a rank an input, and carry out the effects; with the lock held."""
        queue = deque([(rank, receive(*what, monotonic()))])
        while queue:
            rank, effects = queue.popleft()
            for effect in effects:
                if isinstance(effect, SendReport):
                    above = self.topology.parent(rank) or 0
                    queue.append((above, self.machines[above].receive_report(effect.report, monotonic())))
                elif isinstance(effect, SendOutcome):
                    child = effect.child
                    queue.append((child, self.machines[child].receive_outcome(effect.outcome, monotonic())))
                elif isinstance(effect, Notify):
                    effects_there = self.machines[effect.rank].break_off(effect.error, monotonic(), rank)
                    queue.append((effect.rank, effects_there))
                elif isinstance(effect, (Decide, RoundDone)):
                    self.due[rank].append(effect)
            self.changed[rank].notify_all()

    def next(self, rank: int) -> Decide | RoundDone:
        """Wait for the next effect for the thread of a rank, and return it; with the lock held."""
        machine, due = self.machines[rank], self.due[rank]
        while not due:
            wait_s = machine.next_at - monotonic()
            if wait_s > 0:
                self.changed[rank].wait(min(wait_s, round_errors.FOREVER_S))
            else:
                self.put(rank, machine.tick)
        return due.popleft()


class ThreadGroup:
    """One rank of `thread_groups`."""

    def __init__(self, hall: _Hall, rank: int) -> None:
        """Use `thread_groups`."""
        self.rank, self.size = rank, hall.topology.size
        self.topology, self.generation = hall.topology, hall.generation
        self._hall, self._machine = hall, hall.machines[rank]
        self._call: Call | None = None
        self._asked = -1

    @property
    def broken(self) -> bool:
        """Whether a rank has closed the group."""
        return self._machine.broken is not None

    def gather(self, call: Call) -> list[bytes] | None:
        """Enter a round, as `Group.gather` says."""
        self._put(self._enter, call)
        if self.rank > 0:
            return None
        effect = self._next()
        if isinstance(effect, Decide):
            if (broken := self._machine.broken) is None:
                self._asked = effect.number
                return effect.requests
            self._put(self._machine.decided, effect.number, broken)
            effect = self._next()
        raise from_wire(self._ended(effect).error or {})  # no round has an answer before a decision

    def give(self, answers: Sequence[bytes] | None) -> bytes:
        """End the round, as `Group.give` says."""
        if answers is not None:
            self._put(self._machine.decided, self._asked, answers)
        outcome = self._ended(self._next())
        if outcome.error is not None:
            raise from_wire(outcome.error)
        return outcome.answers.payloads(1)[0]

    def leave(self, call: Call, error: BaseException) -> None:
        """End the round of `call`, as `Group.leave` says."""
        if self._call is call:
            self._put(self._machine.leave, error)
            self._hall.due[self.rank].clear()
            self._call = None

    def _ended(self, done: Decide | RoundDone) -> Outcome:
        assert isinstance(done, RoundDone)
        self._call = None
        return done.outcome

    def close(self) -> None:
        """Leave the group: all rounds of the other ranks fail at once.  Closing twice does nothing."""
        self._put(self._machine.break_off, round_errors.closed(self.rank))

    def _enter(self, call: Call, now: float) -> list[Effect]:
        if self._hall.due[self.rank]:  # for another thread, whose round is not over
            raise round_errors.concurrent_rounds(self.rank)
        effects = self._machine.enter(call, now)
        self._call = call
        return effects

    def _put(self, receive: Callable[..., list[Effect]], *what: object) -> None:
        with self._hall.lock:
            self._hall.put(self.rank, receive, *what)

    def _next(self) -> Decide | RoundDone:
        with self._hall.lock:
            return self._hall.next(self.rank)
