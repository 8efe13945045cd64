"""Where one rank of the tree stands: the reports of the ranks below it, and what they are told."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.comm import faults
from reknit.comm.message import Outcome, Parcel, Report
from reknit.errors import ProtocolError, from_wire
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.topology import Topology
    from reknit.errors import ReknitError


@dataclass(eq=False, slots=True)
class Visit:
    """One call of a child: its report, and then what it is told, or that it did not wait for that."""

    report: Report
    outcome: Outcome | None = None
    left: ReknitError | None = None


class Node:
    """The meeting point, within one process, of its own round and the calls of the ranks below it.

    The rank's thread calls `collect`, then `finish`, once per round; threads that serve children call
    `attend`, `answer` and `leave`.  Rounds are counted by every rank alone.  A rank that failed a round is
    therefore in step again in the next; a message of a round that is over changes nothing.  Once broken, a
    node stays broken: no round can end well without the rank that is gone.
    """

    def __init__(self, rank: int, topology: Topology, job: str) -> None:
        self.rank = rank
        self.job = job
        self.ranks = topology.subtree(rank)
        self._below = {child: topology.subtree(child) for child in topology.children(rank)}
        self._changed = threading.Condition()
        self._visits: dict[int, Visit] = {}
        self._attached: set[int] = set()
        self._reported: set[int] = set()
        self._holding: int | None = None
        self._finished = -1
        self._last = Outcome()
        self._broken: ReknitError | None = None

    # Called for the children, each from a thread of its own.

    def greet(self, child: int) -> None:
        """Raise `ProtocolError` when `child` is no child, or another process has been that rank."""
        with self._changed:
            if child not in self._below:
                raise ProtocolError(f"rank {child} does not report to rank {self.rank}")
            if child in self._attached or child in self._reported:
                raise ProtocolError(
                    f"another process is rank {child} already",
                    remedy="give each process a rank of its own, and each run of a job another name",
                )

    def attach(self, child: int) -> None:
        """Note that `child` is there, so that its end is the end of the group; raises `ProtocolError`."""
        with self._changed:
            if child not in self._below or child in self._attached:
                raise ProtocolError(f"another process is rank {child} already, or it does not report here")
            self._attached.add(child)

    def attend(self, report: Report) -> Visit:
        """Take a child's report; raises `ProtocolError`, changing nothing, when it does not belong here."""
        child = report.sender
        if report.job != self.job or child not in self._below:
            raise ProtocolError(
                f"a report of rank {child} of job {report.job!r} came to rank {self.rank} of {self.job!r}"
            )
        if report.whole:
            report.requests.payloads(len(self._below[child]))
        with self._changed:
            if report.number == self._finished and self._last.error is not None:
                raise from_wire(self._last.error)
            before = self._visits.get(child)
            if report.number <= max(self._finished, before.report.number if before else -1):
                raise faults.over(report.number, report.name, child)
            visit = self._visits[child] = Visit(report)
            self._reported.add(child)
            self._changed.notify_all()
            return visit

    def answer(self, visit: Visit) -> Outcome:
        """Wait for the end of the visit's round, and return what the child is told."""
        with self._changed:
            while visit.outcome is None and visit.left is None:
                # While this rank is in that round, only the end of the round counts: the rank above may have
                # decided it, told this rank, and closed, and then the child is to have its answer too.
                if self._broken is not None and visit.report.number != self._holding:
                    return Outcome(error=self._broken.to_wire())
                self._changed.wait()
            if visit.outcome is not None:
                return visit.outcome
            assert visit.left is not None
            return Outcome(error=visit.left.to_wire())

    def leave(self, visit: Visit) -> None:
        """Note that the child's call ended; if that was before its outcome, the round cannot end well."""
        with self._changed:
            if visit.outcome is None:
                report = visit.report
                visit.left = faults.left(report.number, report.name, report.sender)
                self._changed.notify_all()

    # Called by the rank itself.

    def collect(self, number: int, name: str, request: bytes, wait_s: float) -> Report:
        """Wait for the reports of all children to round `number`, and return the report of the whole subtree.

        A round that cannot end well any more is reported after a short while, in which other ranks may still
        come and be named.  Raises the error of a broken node.
        """
        deadline, settled = Deadline(wait_s), None
        with self._changed:
            self._holding = number
            while True:
                self._check()
                error = self._obstacle(number, name)
                here = [v.report for v in self._visits.values() if v.report.number == number]
                if error is not None or len(here) == len(self._below):
                    break
                if settled is None and any(not report.whole or report.name != name for report in here):
                    settled = Deadline(faults.SETTLE_S)
                pause_s = min(clock.remaining() for clock in (deadline, settled) if clock is not None)
                if pause_s == 0:
                    break
                self._changed.wait(pause_s)
        return self._merged(number, name, request, here, error)

    def objection(self, number: int, name: str) -> ReknitError | None:
        """Return why a round that was decided must fail after all: someone did not wait for the answer."""
        with self._changed:
            return self._broken or self._obstacle(number, name)

    def deal(self, outcome: Outcome) -> dict[int, Outcome]:
        """Return what each child is told when this rank's subtree is told `outcome`."""
        if outcome.error is not None:
            return dict.fromkeys(self._below, outcome)
        answers = dict(zip(self.ranks, outcome.answers.payloads(len(self.ranks)), strict=True))
        return {
            child: Outcome(Parcel.of(answers[rank] for rank in ranks)) for child, ranks in self._below.items()
        }

    def finish(self, number: int, outcome: Outcome) -> None:
        """End round `number` for this rank and for the children that came to it."""
        shares = self.deal(outcome)
        with self._changed:
            self._holding, self._finished = None, number
            self._last = Outcome(error=outcome.error)
            for child, visit in list(self._visits.items()):
                if visit.report.number == number:
                    visit.outcome = shares[child]
                    del self._visits[child]
            self._changed.notify_all()

    # Called by anyone.

    def break_off(self, error: ReknitError) -> bool:
        """Fail every round from now on with `error`; return False when the node was broken before."""
        with self._changed:
            first = self._broken is None
            self._broken = self._broken or error
            self._changed.notify_all()
            return first

    def until_broken(self) -> ReknitError:
        """Wait until the node is broken, and return by what."""
        with self._changed:
            while self._broken is None:
                self._changed.wait()
            return self._broken

    @property
    def broken(self) -> ReknitError | None:
        """What the node is broken by, None while it is whole."""
        with self._changed:
            return self._broken

    def check(self) -> None:
        """Raise the error of a broken node."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise faults.copied(self._broken)

    def _obstacle(self, number: int, name: str) -> ReknitError | None:
        """Return the first error that a child met or is, in this round."""
        for child, visit in self._visits.items():
            report = visit.report
            if report.number > number:
                return faults.ahead(number, name, child, report.number, report.name, self.rank)
            if report.number == number and visit.left is not None:
                return visit.left
            if report.number == number and report.error is not None:
                return from_wire(report.error)
        return None

    def _merged(
        self, number: int, name: str, request: bytes, here: Sequence[Report], error: ReknitError | None
    ) -> Report:
        if error is not None:
            return Report(self.job, self.rank, number, name, error=error.to_wire())
        came = {report.sender for report in here}
        if len(came) == len(self._below) and all(report.whole and report.name == name for report in here):
            requests = {self.rank: request}
            for report in here:
                ranks = self._below[report.sender]
                requests.update(zip(ranks, report.requests.payloads(len(ranks)), strict=True))
            return Report(self.job, self.rank, number, name, Parcel.of(requests[rank] for rank in self.ranks))
        places: dict[str, list[int]] = {name: [self.rank]}
        missing = [rank for child, ranks in self._below.items() if child not in came for rank in ranks]
        for report in here:
            whole = {report.name: list(self._below[report.sender])}
            for place, ranks_there in (whole if report.whole else report.places).items():
                places.setdefault(place, []).extend(ranks_there)
            missing.extend(report.missing)
        return Report(self.job, self.rank, number, name, places=places, missing=missing)
