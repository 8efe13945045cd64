"""The rounds of one rank in a process: drives its machine for the rank's thread and its server's threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from reknit.comm import round_errors
from reknit.comm.meeting.rendezvous import has_ended
from reknit.comm.tree.machine import Decide, Notify, Refuse, RoundDone, SendOutcome, SendReport, Warn
from reknit.errors import ProtocolError, ReknitError, from_wire
from reknit.events.phase import monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.comm.group import Call
    from reknit.comm.rank_messages import Hello, News, Outcome, Report
    from reknit.comm.tree.machine import Effect, RoundMachine

    OnEnd = Callable[[Outcome | ReknitError], object]


_log = logging.getLogger("reknit.comm")


class Above(Protocol):
    """The interface of the parent rank that rounds use; no method blocks."""

    def ask(self, report: Report, timeout_s: float, on_end: OnEnd) -> None:
        """Send a report; `on_end` is called once, in another thread, with its outcome or an error."""

    def send(self, report: Report) -> None:
        """Send a report of failure without waiting for its outcome."""

    def drop(self) -> None:
        """Cancel the call of `ask` if it is still open."""

    def notify(self, error: ReknitError) -> None:
        """Send the parent the error that broke the group."""


class Visit(Struct, eq=False):
    """One call of a child that waits here: its report, and then its outcome, or that the child hung up."""

    report: Report
    outcome: Outcome | None = None
    hung_up: bool = False

    @property
    def over(self) -> bool:
        """Whether the child does not wait any more."""
        return self.outcome is not None or self.hung_up

    @property
    def child(self) -> int:
        """The rank that waits."""
        return self.report.sender

    @property
    def number(self) -> int:
        """The round in which it waits."""
        return self.report.number


class Rounds:
    """The rounds of one rank, one after another, and the calls of the ranks below it."""

    def __init__(
        self, machine: RoundMachine, children: Sequence[int], processes: Mapping[int, str] | None = None
    ) -> None:
        """Make the rounds of a machine; `processes` are the processes of its children, if they have names."""
        self.rank = machine.rank
        self._machine = machine
        self._children = frozenset(children)
        self._processes = processes or {}
        self._above: Above | None = None
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._call: Call | None = None
        """The round that is open."""
        self._asked = -1
        self._has_reported = False
        self.changed = threading.Condition()  # guards all from here on
        self._noted = -1  # the last round of which this rank's absence was logged
        self._visits: dict[int, Visit] = {}
        self._attached: set[int] = set()
        self._due: deque[SendReport | Decide | Warn | RoundDone] = deque()
        self.on_change: Callable[[], object] = int
        """The function to call when there may be a message for a child; it never waits."""

    def connect(self, above: Above) -> None:
        """Take the connection to the parent, and send it the error if the group is broken already."""
        with self.changed:
            self._above, broken = above, self._machine.broken
        if broken is not None:
            above.notify(broken)

    # Called by the rank itself.

    def gather(self, call: Call) -> list[bytes] | None:
        """Enter the next round, as `Group.gather` says."""
        if not self._turn.acquire(blocking=False):
            raise round_errors.concurrent_rounds(self.rank, inside=self._holder == threading.get_ident())
        self._call, self._holder, self._has_reported = call, threading.get_ident(), False
        self._put(self._machine.enter, call)
        if self.rank > 0:
            return None
        effect = self._awaited()
        if isinstance(effect, Decide):
            if (broken := self._machine.broken) is None:
                self._asked = effect.number
                return effect.requests
            self._put(self._machine.decided, effect.number, broken)
            effect = self._awaited()
        raise from_wire(self._ended(effect).error or {})  # no round has an answer before a decision

    def give(self, answers: Sequence[bytes] | None) -> bytes:
        """End the round, as `Group.give` says."""
        if answers is not None:
            self._put(self._machine.decided, self._asked, answers)
        outcome = self._ended(self._awaited())
        if outcome.error is not None:
            raise from_wire(outcome.error)
        return outcome.answers.payloads(1)[0]

    def abandon(self, call: Call, error: BaseException) -> None:
        """End the round of `call`, as `Group.leave` says."""
        if self._call is not call:
            return
        try:
            self._put(self._machine.leave, error)
            self.on_change()  # Ctrl-C may have come between an outcome and this call
            for effect in self._rest():
                if isinstance(effect, SendReport):
                    self._report(effect.report, again=True)
        finally:
            self._release()

    def _awaited(self) -> Decide | RoundDone:
        """Do the part of this rank until rank 0 has to decide, or the round is over."""
        while not isinstance(effect := self._next(), (Decide, RoundDone)):
            if isinstance(effect, Warn):
                _log.warning("%s", effect.text)
            else:
                self._report(effect.report, again=self._has_reported)
                self._has_reported = True
        return effect

    def _ended(self, done: Decide | RoundDone) -> Outcome:
        """Let the next round begin, and return the outcome of this one."""
        assert isinstance(done, RoundDone)
        self._release()
        return done.outcome

    def _release(self) -> None:
        self._call = self._holder = None
        try:
            if self._above is not None:
                self._above.drop()
        finally:
            self._turn.release()

    def _next(self) -> SendReport | Decide | Warn | RoundDone:
        """Wait for the next effect that the rank's own thread must carry out, and return it."""
        while True:
            with self.changed:
                absent = [child for child in self._children - self._attached if child in self._processes]
                look_s = round_errors.LOOK_S if absent else round_errors.FOREVER_S
                wait_s = min(self._machine.next_at - monotonic(), look_s)
                if not self._due and wait_s > 0:
                    self.changed.wait(wait_s)
                if not self._due and self._machine.next_at <= monotonic():
                    self._take(self._machine.tick(monotonic()))
                if self._due:
                    return self._due.popleft()
                broken = self._machine.broken is not None
            for child in absent if not broken else ():
                if has_ended(self._processes[child]):
                    self.break_off(round_errors.process_ended(child), child)

    def _rest(self) -> list[SendReport | Decide | Warn | RoundDone]:
        """Return the effects that remain after the round has ended."""
        with self.changed:
            rest = list(self._due)
            self._due.clear()
            return rest

    def _report(self, report: Report, *, again: bool) -> None:
        """Send a report; a second report in a round only says that the round must fail."""
        above = self._above
        assert above is not None
        if again:
            above.send(report)
            return

        def on_end(end: Outcome | ReknitError) -> None:
            if not isinstance(end, ReknitError):
                self._put(self._machine.receive_outcome, end)
                wire = end.error
                end = from_wire(wire) if wire else ProtocolError("the rank above answered something else")
            # No more can come: this has no effect when that was the outcome.
            self._put(self._machine.unanswered, report.number, end)

        with self.changed:
            due_s = self._machine.next_at - monotonic()
        # The machine gives up first; the limit is for a process that is stopped.
        above.ask(report, min(due_s + round_errors.GRACE_S, round_errors.FOREVER_S), on_end)

    # Called for the children, from threads of the server.

    def known(self, theirs: Hello) -> int:
        """Return the rank that sent a hello; raises `ProtocolError` unless it belongs to this group."""
        self._check_job(theirs.rank, theirs)
        if theirs.topology != self._machine.hello.topology:
            raise round_errors.wrong_topology(theirs.rank, self.rank)
        return theirs.rank

    def greet(self, theirs: Hello) -> int:
        """Return the child that sends a hello.

        Raises `ProtocolError` if it is not a child here, or another process had its rank before.
        """
        child = self.known(theirs)
        with self.changed:
            if child not in self._children:
                raise ProtocolError(f"rank {child} does not report to rank {self.rank}")
            if child in self._attached:
                raise round_errors.duplicate_rank(child)
        return child

    def attach(self, theirs: Hello) -> int:
        """Return the child that is connected: from now on, its end breaks the group.

        Raises `ProtocolError`, as `greet` does.
        """
        with self.changed:
            child = self.greet(theirs)
            self._attached.add(child)
            self.changed.notify_all()
        return child

    def missing_below(self, timeout_s: float) -> list[int]:
        """Wait until all children are connected; return the children that are not, after `timeout_s`."""
        with self.changed:
            self.changed.wait_for(lambda: self._attached >= self._children, timeout_s)
            return sorted(self._children - self._attached)

    def receive_news(self, news: News) -> None:
        """Take the error that broke the group from below.  Raises `ProtocolError` for another group."""
        self._check_job(news.sender, news)
        self.break_off(from_wire(news.error), news.sender)

    def _check_job(self, rank: int, message: Hello | News) -> None:
        if (refusal := round_errors.wrong_job(rank, message, self._machine.hello)) is not None:
            raise refusal

    def attend(self, report: Report) -> Visit:
        """Take a child's report; raises `ReknitError` and changes nothing if it does not fit this round."""
        visit = Visit(report)
        with self.changed:
            effects = self._machine.receive_report(report, monotonic())
            for effect in effects:
                if isinstance(effect, Refuse):
                    raise effect.error
            before = self._visits.get(visit.child)
            if before is not None and before.number == visit.number:
                visit.outcome = report.outcome()  # it took back its report, and waits for nothing more
            else:
                self._hang_up(before)
                self._visits[visit.child] = visit
            self._take(effects)
        return visit

    def answer(self, visit: Visit) -> Outcome | None:
        """Wait for the end of the visit's round, and return the child's outcome; None if the child hung up.

        Logs that the children have waited for long.
        """
        with self.changed:
            if visit.report.opens and not self.changed.wait_for(lambda: visit.over, round_errors.NOTICE_S):
                self.note_own_absence(visit)
            self.changed.wait_for(lambda: visit.over)
            return visit.outcome

    def note_own_absence(self, visit: Visit) -> None:
        """Log, once for all children, that they have waited for long and this rank has not made the call."""
        with self.changed:
            if not self._machine.idle or not self._noted < visit.number == self._machine.number:
                return
            self._noted = visit.number
            waiting = sorted(child for child, other in self._visits.items() if other.number == visit.number)
        _log.warning("%s", round_errors.awaited(visit.report, waiting, {self.rank: 0}))

    def leave(self, visit: Visit) -> None:
        """Note that the child's call ended; if that was before its outcome, the round cannot end well."""
        with self.changed:
            if visit.outcome is None:
                self._hang_up(visit)
                self._take(self._machine.child_left(visit.child, visit.number, monotonic()))

    # Called by anyone.

    def break_off(self, error: ReknitError, origin: int | None = None) -> None:
        """Fail every round from now on with `error`, unless the group is broken; notify the neighbours.

        The ranks below receive the error from the threads in `until_broken`; `origin` is the rank that sent
        it here.
        """
        with self.changed:
            effects = self._machine.break_off(error, monotonic(), origin)
            self._take(effects)
            above = self._above
        notified = [effect.rank for effect in effects if isinstance(effect, Notify)]
        if above is not None and not self._children.issuperset(notified):
            above.notify(error)

    def until_broken(self) -> ReknitError:
        """Wait until the group is broken, and return the error that broke it."""
        with self.changed:
            while self._machine.broken is None:
                self.changed.wait()
            return self._machine.broken

    @property
    def broken(self) -> ReknitError | None:
        """The error that broke the group, or None."""
        with self.changed:
            return self._machine.broken

    def _put(self, receive: Callable[..., list[Effect]], *what: object) -> None:
        with self.changed:
            self._take(receive(*what, monotonic()))

    def _take(self, effects: list[Effect]) -> None:
        """Answer the children that wait, and leave the rest to the rank's own thread; with the lock held."""
        any_outcome = False
        for effect in effects:
            if isinstance(effect, SendOutcome):
                any_outcome = True
                visit = self._visits.get(effect.child)
                if visit is not None and visit.number == effect.outcome.number:
                    del self._visits[effect.child]
                    visit.outcome = effect.outcome
            elif isinstance(effect, (SendReport, Decide, Warn, RoundDone)):
                self._due.append(effect)
        self.changed.notify_all()
        if any_outcome or self._machine.broken is not None:
            self.on_change()

    def _hang_up(self, visit: Visit | None) -> None:
        if visit is not None:
            visit.hung_up = True
            self.changed.notify_all()
