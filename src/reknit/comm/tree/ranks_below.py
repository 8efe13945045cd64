"""The ranks below a rank: their reports that are not answered yet, their requests, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.comm import round_errors
from reknit.comm.rank_messages import Parcel
from reknit.errors import from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reknit.comm.group import Merge
    from reknit.comm.rank_messages import Heading, Report
    from reknit.comm.topology import Topology
    from reknit.errors import ReknitError


@dataclass(eq=False, slots=True)
class _Visit:
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
        """Return the ranks that have reached each state of a round, and the missing ranks."""
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
