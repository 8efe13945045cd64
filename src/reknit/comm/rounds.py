"""One rank's part in a round of the tree: collect from below, decide or ask above, tell those below."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from reknit.comm import faults
from reknit.comm.message import Outcome, Parcel, Report, too_large
from reknit.errors import CommError, DeadlineError, ProtocolError, ReknitError, from_wire
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.node import Node
    from reknit.comm.topology import Topology

    Decide = Callable[[list[bytes]], Sequence[bytes]]


class Above(Protocol):
    """The rank above, as a round needs it."""

    def ask(self, report: Report, timeout_s: float, overdue: str) -> Outcome:
        """Send a report, and return its outcome; raises `CommError`."""

    def send(self, report: Report) -> None:
        """Send a report of failure whose outcome nobody here waits for."""


class Rounds:
    """The rounds of one rank, one after another."""

    def __init__(self, node: Node, topology: Topology, max_nbytes: int, above: Above | None) -> None:
        self._node, self._above, self._max_nbytes = node, above, max_nbytes
        self._size = topology.size
        self._height, self._depth = topology.height, topology.depth(node.rank)
        self._number = 0
        self._turn = threading.Lock()

    def hold(self, name: str, request: bytes, decide: Decide, timeout_s: float) -> bytes:
        """Hold the next round, as `Group.exchange` says."""
        if not self._turn.acquire(blocking=False):
            raise faults.crowded(self._node.rank)
        try:
            number, self._number = self._number, self._number + 1
            try:
                outcome = self._outcome(number, name, request, decide, min(timeout_s, faults.FOREVER_S))
            except BaseException as error:
                # Whatever it is, Ctrl-C too: the ranks below wait for an outcome.
                self._node.finish(number, Outcome(error=self._described(error, number, name).to_wire()))
                raise
            self._node.finish(number, outcome)
        finally:
            self._turn.release()
        if outcome.error is not None:
            raise from_wire(outcome.error)
        return outcome.answers.payloads(len(self._node.ranks))[0]

    def _outcome(self, number: int, name: str, request: bytes, decide: Decide, timeout_s: float) -> Outcome:
        # The deeper a rank, the sooner it reports who is missing below it, and the longer it waits to be
        # told: the deadline of the rank above lies between, so it can name those that are to blame.
        slack_s = min(faults.SETTLE_S, faults.GRACE_S / max(1, self._height))
        told = Deadline(timeout_s + slack_s * (self._height + self._depth))
        collect_s = timeout_s + slack_s * (self._height - self._depth)
        report = self._node.collect(number, name, request, collect_s)
        if self._above is None:
            return self._judged(report, decide, timeout_s)
        return self._asked(self._above, self._bounded(report), told, timeout_s)

    def _judged(self, report: Report, decide: Decide, timeout_s: float) -> Outcome:
        """Return the outcome of a round, on rank 0."""
        if report.error is not None:
            return Outcome(error=report.error)
        if not report.whole:
            error: ReknitError = faults.failed_round(report.number, report.places, report.missing, timeout_s)
            return Outcome(error=error.to_wire())
        answers = list(decide(report.requests.payloads(self._size)))
        if len(answers) != self._size:
            raise ProtocolError(
                f"{len(answers)} answers were decided for {self._size} ranks in {report.name!r}"
            )
        objection = self._node.objection(report.number, report.name)
        if objection is not None:
            return Outcome(error=objection.to_wire())
        outcome = Outcome(Parcel.of(answers))
        for child, share in self._node.deal(outcome).items():
            what = f"the answers of {report.name!r} for rank {child} and the ranks below it are too large"
            too_much = too_large(what, share.answers.nbytes, self._max_nbytes)
            if too_much is not None:
                return Outcome(error=too_much.to_wire())
        return outcome

    def _bounded(self, report: Report) -> Report:
        """Return the report, or one that tells all ranks that it is too large to send."""
        what = f"the requests of rank {report.sender} and the ranks below it to {report.name!r} are too large"
        error = too_large(what, report.requests.nbytes, self._max_nbytes)
        if error is None:
            return report
        return Report(report.job, report.sender, report.number, report.name, error=error.to_wire())

    def _asked(self, above: Above, report: Report, told: Deadline, timeout_s: float) -> Outcome:
        """Return the outcome of a round, on the other ranks."""
        overdue = f"did not answer round {report.number} ({report.name!r}) within {timeout_s:g} s"
        try:
            outcome = above.ask(report, told.remaining(), overdue)
        except DeadlineError:
            raise
        except CommError:
            self._node.check()  # whatever broke the group is the better reason
            raise
        if outcome.error is None:
            outcome.answers.payloads(len(self._node.ranks))
        return outcome

    def _described(self, error: BaseException, number: int, name: str) -> ReknitError:
        """Return what the others hear of an error, and see to it that the rank above hears it too."""
        if isinstance(error, ReknitError):
            return error
        if self._above is None:
            return faults.misdecided(number, name, error)
        left = faults.left(number, name, self._node.rank)
        self._above.send(Report(self._node.job, self._node.rank, number, name, error=left.to_wire()))
        return left
