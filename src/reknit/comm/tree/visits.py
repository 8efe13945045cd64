"""The calls of children that are not answered yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.comm import round_errors
from reknit.errors import from_wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.rank_messages import Heading, Report
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
