"""Rounds between ranks that are threads of one process, for tests and simulated jobs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reknit.comm import round_errors
from reknit.comm.messages import Heading
from reknit.comm.topology import Topology
from reknit.comm.tree.effects import Call
from reknit.errors import ReknitError
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.base import Group, Merge

    Decide = Callable[[list[bytes]], Sequence[bytes]]


def thread_groups(size: int, generation: int = 0) -> list[Group]:
    """Return one group for each of `size` ranks; give each to a thread of its own."""
    hall = _Hall(size, generation)
    return [ThreadGroup(hall, rank) for rank in range(size)]


class _ThreadRound:
    """A round: who came to which place, who was told, and the answers or the error."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.came: dict[int, tuple[Heading, bytes]] = {}
        self.told: set[int] = set()
        self.settled: Deadline | None = None
        self.answers: list[bytes] | None = None
        self.error: ReknitError | None = None

    @property
    def over(self) -> bool:
        return self.answers is not None or self.error is not None

    def places(self) -> dict[str, list[int]]:
        places: dict[str, list[int]] = {}
        for rank in sorted(self.came):
            places.setdefault(self.came[rank][0].place, []).append(rank)
        return places


class _Hall:
    """What the ranks share; `changed` guards all of it."""

    def __init__(self, size: int, generation: int) -> None:
        self.size, self.generation = size, generation
        self.changed = threading.Condition()
        self.rounds: dict[int, _ThreadRound] = {}
        self.broken: ReknitError | None = None

    def fail(self, meeting: _ThreadRound, error: ReknitError) -> None:
        """End a round badly, unless it is over."""
        if not meeting.over:
            meeting.error = error
            self.changed.notify_all()

    def depart(self, meeting: _ThreadRound, rank: int) -> None:
        """Forget a round that every rank has been told of; one that is missing may still come and ask."""
        meeting.told.add(rank)
        if len(meeting.told) == self.size:
            self.rounds.pop(meeting.number, None)


class ThreadGroup:
    """One rank of `thread_groups`."""

    def __init__(self, hall: _Hall, rank: int) -> None:
        """Use `thread_groups`."""
        self.rank, self.size = rank, hall.size
        self._hall = hall
        self._number = 0
        self._turn = threading.Lock()

    @property
    def topology(self) -> Topology:
        """A tree in which every rank is a host of its own."""
        return Topology.flat(self.size, 16)

    @property
    def generation(self) -> int:
        """What `thread_groups` was given."""
        return self._hall.generation

    @property
    def broken(self) -> bool:
        """Whether a rank has closed the group."""
        return self._hall.broken is not None

    def exchange(
        self,
        name: str,
        request: bytes,
        decide: Decide,
        timeout_s: float,
        *,
        merge: Merge | None = None,
        subject: str = "",
    ) -> bytes:
        """Hold one round, as `Group.exchange` says."""
        if not self._turn.acquire(blocking=False):
            raise round_errors.concurrent_rounds(self.rank)
        try:
            number, self._number = self._number, self._number + 1
            with self._hall.changed:
                meeting = self._hall.rounds.setdefault(number, _ThreadRound(number))
                call = Call(name, request, min(timeout_s, round_errors.FOREVER_S), subject, merge)
                try:
                    return self._attend(meeting, call, decide)
                finally:
                    self._hall.depart(meeting, self.rank)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Leave the group: the others fail at once, now and later.  Closing twice does nothing."""
        with self._hall.changed:
            self._hall.broken = self._hall.broken or round_errors.closed(self.rank)
            self._hall.changed.notify_all()

    def _attend(self, meeting: _ThreadRound, call: Call, decide: Decide) -> bytes:
        heading = Heading("threads", self.generation, meeting.number, call.name, call.subject)
        if not meeting.over:
            meeting.came[self.rank] = (heading, call.request)
            self._hall.changed.notify_all()
        deadline = Deadline(call.timeout_s)
        try:
            while not meeting.over:
                self._advance(meeting, call, decide, deadline)
        except ReknitError as error:
            self._hall.fail(meeting, error)
            raise
        except BaseException as error:
            # Whatever it is, Ctrl-C too: the other ranks wait for an outcome.
            if self.rank == 0:
                self._hall.fail(meeting, round_errors.decide_failed(heading, error))
            else:
                self._hall.fail(meeting, round_errors.gave_up(heading, self.rank))
            raise
        if meeting.answers is None:
            assert meeting.error is not None
            raise round_errors.copied(meeting.error)
        return meeting.answers[self.rank]

    def _advance(self, meeting: _ThreadRound, call: Call, decide: Decide, deadline: Deadline) -> None:
        """Bring a round nearer to its end: fail it, decide it, or wait for a change."""
        hall, all_here = self._hall, len(meeting.came) == self.size
        heading = meeting.came[self.rank][0]
        one_place = len(meeting.places()) == 1
        if not one_place and meeting.settled is None:
            meeting.settled = Deadline(round_errors.SETTLE_S)
        clocks = [clock for clock in (deadline, meeting.settled) if clock is not None]
        pause_s = min(clock.remaining() for clock in clocks)
        if hall.broken is not None:
            hall.fail(meeting, hall.broken)
        elif all_here and one_place and self.rank == 0:
            self._decide(meeting, heading, call, decide)
        elif pause_s > 0 and (one_place or not all_here):
            hall.changed.wait(pause_s)
        elif all_here and one_place:
            hall.fail(meeting, round_errors.no_answer(heading, 0, deadline.seconds))
        else:
            missing = [rank for rank in range(self.size) if rank not in meeting.came]
            error = round_errors.failed_round(heading, meeting.places(), missing, deadline.seconds)
            hall.fail(meeting, error)

    def _decide(self, meeting: _ThreadRound, heading: Heading, call: Call, decide: Decide) -> None:
        """Run `decide` with the hall open, so that the others can still give up or close."""
        hall = self._hall
        requests = [meeting.came[rank][1] for rank in range(self.size)]
        hall.changed.release()
        try:
            if call.merge is not None and self.size > 1:
                requests = [call.merge(requests)]
            answers = list(decide(requests))
        finally:
            hall.changed.acquire()
        if len(answers) != self.size:
            raise round_errors.wrong_answer_count(heading, len(answers), self.size)
        if hall.broken is not None:
            hall.fail(meeting, hall.broken)
        elif not meeting.over:
            meeting.answers = answers
            hall.changed.notify_all()
