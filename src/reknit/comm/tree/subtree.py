"""A rank and its descendants: merge their requests, split their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.comm.rank_messages import Parcel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reknit.comm.group import Merge
    from reknit.comm.rank_messages import Heading, Report
    from reknit.comm.topology import Topology


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
