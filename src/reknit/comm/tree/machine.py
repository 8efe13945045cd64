"""The state machine of one rank in the rounds of a tree, without any input or output of its own.

A `RoundMachine` has no threads, no clock and no network.  Its inputs are method calls.  Each returns the
effects that it causes, in order, and the driver of the machine carries them out: in a process, or in a
simulated world.  Rounds are counted by every rank alone, so a rank that failed a round is in step again in
the next.  A message that repeats or comes after the end of its round changes nothing, in any order.  Once
broken, a machine stays broken: no round can succeed without the lost rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from reknit.comm import round_errors
from reknit.comm.rank_messages import Heading, Hello, Parcel, too_large
from reknit.errors import ProtocolError, ReknitError, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reknit.comm.group import Call, Merge, Topology
    from reknit.comm.rank_messages import Outcome, Report


class SendReport(Struct, frozen=True):
    """To do: send a report to the rank above."""

    report: Report


class SendOutcome(Struct, frozen=True):
    """To do: send a child the outcome of a round, as the answer to its report of that round."""

    child: int
    outcome: Outcome


class Refuse(Struct, frozen=True):
    """To do: answer the report that just arrived, if its sender waits, with the reason for its refusal.

    If messages may arrive twice, there is nothing to do, since the child's first report was taken.
    """

    error: ReknitError


class Decide(Struct, frozen=True):
    """To do, on rank 0: find the answers for all ranks, and call `RoundMachine.decided` with them."""

    number: int
    requests: list[bytes]


class RoundDone(Struct, frozen=True):
    """To do: end this rank's round; `outcome` holds its own answer alone, or the error to raise."""

    number: int
    outcome: Outcome


class Warn(Struct, frozen=True):
    """To do: log, as a warning, that other ranks have not made the call that this round opens."""

    text: str


class Notify(Struct, frozen=True):
    """To do: send the parent or a child the error that broke the group (its `RoundMachine.break_off`)."""

    rank: int
    error: ReknitError


Effect: TypeAlias = SendReport | SendOutcome | Refuse | Decide | RoundDone | Warn | Notify


class _Visit(Struct, eq=False):
    """A child's report, until its round is over here; `left` is set once the child has stopped waiting."""

    report: Report
    left: ReknitError | None = None


class Visits:
    """At most one report of each child: its last, until that is answered."""

    def __init__(self) -> None:
        self._open: dict[int, _Visit] = {}
        self._latest: dict[int, int] = {}

    def take_back(self, report: Report) -> bool:
        """Return whether a report withdraws the report before it, since its sender does not wait any more."""
        visit = self._open.get(report.sender)
        if visit is None or visit.left is not None or visit.report.number != report.number:
            return False
        if report.error is None or visit.report.error is not None:
            return False
        visit.left = from_wire(report.error)
        return True

    def first(self, report: Report) -> bool:
        """Return whether this is the child's first report of its round, and of no earlier round."""
        new = report.number > self._latest.get(report.sender, -1)
        if new:
            self._latest[report.sender] = report.number
        return new

    def begin(self, report: Report) -> None:
        """Keep a report until its round ends here."""
        self._open[report.sender] = _Visit(report)

    def leave(self, child: int, number: int) -> bool:
        """Note that a child does not wait any more, and return whether it was waiting."""
        visit = self._open.get(child)
        if visit is None or visit.left is not None or visit.report.number != number:
            return False
        visit.left = round_errors.gave_up(visit.report, child)
        return True

    def end(self, ends: Callable[[int], bool]) -> list[Report]:
        """Remove and return the reports of rounds whose numbers `ends` selects."""
        ended = [visit.report for visit in self._open.values() if ends(visit.report.number)]
        for report in ended:
            del self._open[report.sender]
        return ended

    def reports(self, heading: Heading) -> dict[int, Report]:
        """Return the reports of a round."""
        number = heading.number
        return {child: visit.report for child, visit in self._open.items() if visit.report.number == number}

    def obstacle(self, heading: Heading, rank: int) -> ReknitError | None:
        """Return the first error that a child reports or causes, in a round that `rank` is in."""
        for child, visit in self._open.items():
            report = visit.report
            if report.number > heading.number:
                return round_errors.skipped_round(heading, child, report, rank)
            if report.number == heading.number and visit.left is not None:
                return visit.left
            if report.number == heading.number and report.error is not None:
                return from_wire(report.error)
        return None


def astray(heading: Heading, reports: dict[int, Report]) -> bool:
    """Return whether a rank that reported, or a rank below it, is in another round than that of `heading`.

    A report that only lacks a rank does not count: it was sent at a deadline, and other deadlines are near.
    """
    here = heading.place
    return any(report.place != here or report.places.keys() - {here} for report in reports.values())


def agree(heading: Heading, reports: dict[int, Report]) -> bool:
    """Return whether all ranks that reported, and all ranks below them, are in the place of `heading`."""
    return all(report.whole and report.place == heading.place for report in reports.values())


class Subtree:
    """The ranks that one rank speaks for: `ranks` in ascending order, and `below` those of each child."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.rank = rank
        self.ranks = topology.subtree(rank)
        self.below = {child: topology.subtree(child) for child in topology.children(rank)}

    def fits(self, report: Report) -> bool:
        """Return whether a child's report has one payload for each of its ranks, or one merged payload."""
        count = len(report.requests.which)
        return not report.whole or count in (1, len(self.below[report.sender]))

    def together(self, own: bytes, reports: Mapping[int, Report], merge: Merge | None) -> Parcel:
        """Return the requests of all ranks, for a round to which every child reported in full.

        Raises `ProtocolError` when a child did not merge where this rank does, or the other way round.
        """
        if merge is not None:
            merged = [reports[child].requests.payloads(1)[0] for child in self.below]
            return Parcel.of([merge([own, *merged]) if merged else own])
        requests = {self.rank: own}
        for child, ranks in self.below.items():
            requests.update(zip(ranks, reports[child].requests.payloads(len(ranks)), strict=True))
        return Parcel.of(requests[rank] for rank in self.ranks)

    def whereabouts(
        self, heading: Heading, reports: Mapping[int, Report]
    ) -> tuple[dict[str, list[int]], list[int]]:
        """Return the ranks that have reached each state of a round, and the ranks that are missing."""
        places = {heading.place: [self.rank]}
        missing: list[int] = []
        for child, ranks in self.below.items():
            report = reports.get(child)
            if report is None:
                missing.extend(ranks)
                continue
            whole = {report.place: list(ranks)}
            for place, ranks_there in (whole if report.whole else report.places).items():
                places.setdefault(place, []).extend(ranks_there)
            missing.extend(report.missing)
        return places, missing

    def shares(self, answers: Iterable[bytes]) -> dict[int, Parcel]:
        """Return the answers for each child's subtree, and for this rank under its own number."""
        answer_of = dict(zip(self.ranks, answers, strict=True))
        shares = {child: Parcel.of(answer_of[rank] for rank in ranks) for child, ranks in self.below.items()}
        shares[self.rank] = Parcel.of([answer_of[self.rank]])
        return shares


class _Round(Struct, eq=False):
    """The round that this rank is in: it collects reports, then decides, or waits for the outcome.

    `until` is the deadline of that state, `notice_at` the time of a notice that ranks are missing; `settling`
    is set once reports show that the round must fail, `hopeless` once the parent has received that.
    """

    heading: Heading
    call: Call
    until: float
    outcome_due: float
    notice_at: float
    state: Literal["collect", "decide", "wait"] = "collect"
    settling: bool = False
    hopeless: bool = False


class RoundMachine:
    """The rounds of one rank; `number` is that of its next round, or of the one it is in.

    `hello` is the first message of the rank to its parent.

    `now`, in every input, is the time in seconds by any clock that never goes back, the same in all inputs.
    """

    def __init__(self, rank: int, topology: Topology, *, job: str, generation: int, max_nbytes: int) -> None:
        self.rank, self.hello = rank, Hello(job, generation, rank, topology.digest)
        self.number = 0
        self.broken: ReknitError | None = None
        self._subtree = Subtree(rank, topology)
        self._parent = topology.parent(rank)
        self._max_nbytes = max_nbytes
        # The deeper a rank, the sooner it reports the missing ranks below, and the longer it waits for the
        # outcome.  The deadline of the rank above lies between, so it can name the guilty ranks.
        self._slack_s = min(round_errors.SETTLE_S, round_errors.GRACE_S / max(1, topology.height))
        self._above, self._beneath = topology.depth(rank), topology.height - topology.depth(rank)
        self._height = topology.height
        self._round: _Round | None = None
        self._visits = Visits()
        self._last_error: ReknitError | None = None

    @property
    def next_at(self) -> float:
        """The time at which `tick` is due, or infinity."""
        held = self._round
        if held is None:
            return math.inf
        return min(held.until, held.notice_at) if held.state == "collect" else held.until

    @property
    def idle(self) -> bool:
        """Whether this rank is in no round."""
        return self._round is None

    # Inputs from the rank itself.

    def enter(self, call: Call, now: float) -> list[Effect]:
        """Begin this rank's next round; raises `ProtocolError` while it is in one."""
        if self._round is not None:
            raise round_errors.concurrent_rounds(self.rank)
        timeout_s = min(call.timeout_s, round_errors.FOREVER_S)
        heading = Heading(self.hello.job, self.hello.generation, self.number, call.name, call.subject)
        self._round = _Round(
            heading,
            call,
            until=now + timeout_s + self._slack_s * self._beneath,
            outcome_due=now + timeout_s + self._slack_s * (self._height + self._above),
            notice_at=now + round_errors.NOTICE_S if call.opens else math.inf,
        )
        if self.broken is not None:
            return self._finish(self._round, self.broken)
        return self._advance(now)

    def decided(self, number: int, answers: Sequence[bytes] | ReknitError, now: float) -> list[Effect]:
        """Take the answers to a `Decide`; for a round that is over, they are too late."""
        held = self._round
        if held is None or held.heading.number != number or held.state != "decide":
            return []
        if isinstance(answers, ReknitError):
            return self._finish(held, answers)
        if len(answers) != len(self._subtree.ranks):
            return self._finish(
                held, round_errors.wrong_answer_count(held.heading, len(answers), len(self._subtree.ranks))
            )
        # A rank may not have waited for the answer.
        objection = self.broken or self._visits.obstacle(held.heading, self.rank)
        return self._finish(held, answers if objection is None else objection)

    def leave(self, error: BaseException, now: float) -> list[Effect]:
        """End this rank's round since it stopped waiting (Ctrl-C, a bug), with an error for all ranks."""
        held = self._round
        if held is None:
            return []
        if isinstance(error, ReknitError):
            reported: ReknitError = error
        elif self._parent is None:
            reported = round_errors.decide_failed(held.heading, error)
        else:
            reported = round_errors.gave_up(held.heading, self.rank)
        return [*self._give_up(held, reported), *self._finish(held, reported)]

    # Inputs from the ranks below.

    def receive_report(self, report: Report, now: float) -> list[Effect]:
        """Take a child's report; refuse a report that is repeated or does not fit this round."""
        child, held = report.sender, self._round
        refusal = self._misfit(report)
        if refusal is not None:
            return [Refuse(refusal)]
        if self._visits.take_back(report):
            return self._advance(now)
        if not self._visits.first(report):
            return [Refuse(round_errors.late_message(report, child))]
        in_it = held is not None and held.heading.number == report.number
        if report.number < self.number:
            last = self._last_error if report.number == self.number - 1 else None
            return [
                SendOutcome(child, report.outcome(error=last or round_errors.late_message(report, child)))
            ]
        # While this rank is in that round, only the end of the round counts.  The rank above may have decided
        # it, sent the outcome here, and closed; then the child is to have its answer too.
        if self.broken is not None and not in_it:
            return [SendOutcome(child, report.outcome(error=self.broken))]
        self._visits.begin(report)
        return self._advance(now)

    def child_left(self, child: int, number: int, now: float) -> list[Effect]:
        """Note that the call with a child's report ended before its outcome was sent."""
        return self._advance(now) if self._visits.leave(child, number) else []

    # Inputs from the rank above.

    def receive_outcome(self, outcome: Outcome, now: float) -> list[Effect]:
        """Take the outcome of the round that this rank reported; any other changes nothing."""
        held = self._round
        if held is None or held.state != "wait" or outcome.number != held.heading.number:
            return []
        if round_errors.wrong_job(self.rank, outcome, self.hello) is not None:
            return []
        if outcome.error is not None:
            return self._finish(held, from_wire(outcome.error))
        try:
            if outcome.place != held.heading.place:
                raise ProtocolError(f"an outcome of {outcome.label} arrived in {held.heading.label}")
            answers = outcome.answers.payloads(len(self._subtree.ranks))
        except ProtocolError as error:
            return self._finish(held, error)
        return self._finish(held, answers)

    def unanswered(self, number: int, error: ReknitError, now: float) -> list[Effect]:
        """Fail the round that this rank reported, since the call with the report ended without an outcome."""
        held = self._round
        if held is None or held.state != "wait" or held.heading.number != number:
            return []
        error = self.broken or error  # the error that broke the group is the better reason
        return [*self._give_up(held, error), *self._finish(held, error)]

    # Inputs from anywhere.

    def break_off(self, error: ReknitError, now: float, origin: int | None = None) -> list[Effect]:
        """Fail every round from now on, since a rank is gone or closed; `origin` reported it."""
        if self.broken is not None:
            return []
        self.broken = error
        around = [*(() if self._parent is None else (self._parent,)), *self._subtree.below]
        effects: list[Effect] = [Notify(rank, error) for rank in around if rank != origin]
        held = self._round
        for report in self._visits.end(lambda number: held is None or number != held.heading.number):
            effects.append(SendOutcome(report.sender, report.outcome(error=error)))
        # The decision of rank 0 may be a commit.  All ranks receive its outcome as long as
        # the rank above them is there; if it is not, the end of the call to it says so.
        if held is not None and held.state == "collect":
            effects += self._finish(held, error)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Act on the deadlines that have passed."""
        effects, held = self._advance(now), self._round
        if held is None or held.state != "collect" or now < held.notice_at:
            return effects
        held.notice_at = math.inf
        came = self._visits.reports(held.heading)
        absent = {child: len(ranks) - 1 for child, ranks in self._subtree.below.items() if child not in came}
        return [*effects, Warn(round_errors.awaited(held.heading, [self.rank], absent))]

    # The effects of these calls.

    def _advance(self, now: float) -> list[Effect]:
        """Advance the round as far as the messages received so far allow."""
        held = self._round
        if held is None or held.state == "decide":
            return []
        obstacle = self._visits.obstacle(held.heading, self.rank)
        if held.state == "wait":
            if now >= held.until:
                assert self._parent is not None
                late = self.broken or round_errors.no_answer(held.heading, self._parent, held.call.timeout_s)
                return [
                    *self._give_up(held, round_errors.gave_up(held.heading, self.rank)),
                    *self._finish(held, late),
                ]
            return [] if obstacle is None else self._give_up(held, obstacle)
        if obstacle is not None:
            return self._fail(held, obstacle)
        reports = self._visits.reports(held.heading)
        if len(reports) < len(self._subtree.below):
            if not held.settling and astray(held.heading, reports):
                held.settling, held.until = True, min(held.until, now + round_errors.SETTLE_S)
            if now < held.until:
                return []
        return self._conclude(held, reports)

    def _conclude(self, held: _Round, reports: dict[int, Report]) -> list[Effect]:
        """Bring a round that waits for no more reports before rank 0, or fail it."""
        heading, call = held.heading, held.call
        if len(reports) < len(self._subtree.below) or not agree(heading, reports):
            places, missing = self._subtree.whereabouts(heading, reports)
            if self._parent is None:
                return self._finish(held, round_errors.failed_round(heading, places, missing, call.timeout_s))
            held.hopeless = True
            return self._send(held, heading.report(self.rank, places=places, missing=missing))
        try:
            requests = self._subtree.together(call.request, reports, call.merge)
        except ReknitError as error:
            return self._fail(held, error)
        except Exception as error:  # a bug in `merge` must reach all ranks, which wait for an answer
            return self._fail(held, round_errors.merge_failed(heading, self.rank, error))
        if self._parent is None:
            held.state, held.until = "decide", math.inf
            return [Decide(heading.number, requests.payloads(len(requests.which)))]
        what = f"the requests of rank {self.rank} and the ranks below it to {heading.place} are too large"
        too_much = too_large(what, requests.nbytes, self._max_nbytes)
        if too_much is not None:
            return self._fail(held, too_much)
        return self._send(held, heading.report(self.rank, requests, opens=call.opens))

    def _fail(self, held: _Round, error: ReknitError) -> list[Effect]:
        """Send an error to all ranks, this one included."""
        if self._parent is None:
            return self._finish(held, error)
        held.hopeless = True
        return self._send(held, held.heading.report(self.rank, error=error))

    def _send(self, held: _Round, report: Report) -> list[Effect]:
        held.state, held.until = "wait", held.outcome_due
        return [SendReport(report)]

    def _give_up(self, held: _Round, error: ReknitError) -> list[Effect]:
        """Send the parent an error that was not in the report, or comes before it."""
        if self._parent is None or held.hopeless or self.broken is not None:
            return []
        held.hopeless = True
        return [SendReport(held.heading.report(self.rank, error=error))]

    def _finish(self, held: _Round, end: Sequence[bytes] | ReknitError) -> list[Effect]:
        """End the round, with the answers for this rank and those below it or with an error."""
        heading, shares, error = held.heading, {}, None
        if isinstance(end, ReknitError):
            error = end
        else:
            shares = self._subtree.shares(end)
            error = self._excess(heading, shares)
        effects: list[Effect] = []
        for report in self._visits.end(lambda number: number == heading.number):
            share = shares.get(report.sender) if error is None else None
            effects.append(SendOutcome(report.sender, report.outcome(share, error)))
        own = shares.get(self.rank) if error is None else None
        effects.append(RoundDone(heading.number, heading.outcome(own, error)))
        self._round, self._last_error = None, error
        self.number += 1
        return effects

    def _excess(self, heading: Heading, shares: dict[int, Parcel]) -> ReknitError | None:
        """Return the error that prevents sending the answers, or None."""
        for child, share in shares.items():
            what = f"the answers of {heading.place} for rank {child} and the ranks below it are too large"
            if child != self.rank and (error := too_large(what, share.nbytes, self._max_nbytes)) is not None:
                return error
        return None

    def _misfit(self, report: Report) -> ReknitError | None:
        """Return the error of a report that does not fit this round, or None."""
        child = report.sender
        refusal = round_errors.wrong_job(child, report, self.hello)
        if refusal is not None:
            return refusal
        if child not in self._subtree.below:
            return ProtocolError(f"rank {child} does not report to rank {self.rank}")
        if not self._subtree.fits(report):
            return ProtocolError(f"a report of rank {child} does not fit the ranks below it")
        return None
