"""Rank 0 divides what several ranks want to read: who reads what for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reknit.engine import messages
from reknit.engine.columns import packed, unpacked
from reknit.engine.sharing.host_exchange import BUCKET_NBYTES
from reknit.planner.sharing import Costs, Division, FetchTable, Reads, divide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.options import LoadOptions

_COPY_RATE = 3e9
"""Estimate: bytes per second that a rank copies out of another rank's ring, while all ranks copy."""
_NETWORK_RATE = 1e9
"""Estimate: bytes per second between hosts, for each rank: its part of a 10-gigabit link."""


def share_out(
    offers: Sequence[messages.Offer | None], options: LoadOptions
) -> list[messages.SharePlan | None]:
    """Decide, on the root, who reads what for whom; None for a rank that reads alone."""
    alone: list[messages.SharePlan | None] = [None] * len(offers)
    there = [offer for offer in offers if offer is not None]
    if len(there) < len(offers) or len({(o.cell, o.verify == "off") for o in there}) > 1:
        return alone
    numbers: dict[str, int] = {}
    for offer in there:
        for path in offer.files:
            numbers.setdefault(path, len(numbers))
    own = [np.array([numbers[path] for path in offer.files], np.int64) for offer in there]
    reads = [_reads(offer, files) for offer, files in zip(there, own, strict=True)]
    division = _divide(there, reads, options)
    answers = alone
    for rank, part in enumerate(division.parts):
        if not len(part.number) and not division.num_turns:
            continue
        local = np.full(len(numbers), -1, np.int64)
        local[own[rank]] = np.arange(len(own[rank]))
        columns = part._replace(file=local[part.file])
        answers[rank] = messages.SharePlan(
            division.num_turns,
            [packed(column, "i8") for column in columns],
            {int(taker): there[taker].link for taker in np.unique(part.taker)},
        )
    return answers


def _divide(offers: Sequence[messages.Offer], reads: Sequence[Reads], options: LoadOptions) -> Division:
    """Divide the reads among all ranks, or on each host alone where nothing carries bytes between hosts."""
    costs = None
    if options.share == "auto":
        rates = [offer.read_rate for offer in offers if offer.read_rate]
        if not rates:
            return Division(tuple(_no_part() for _ in offers), 0)
        costs = Costs(float(np.median(rates)), _COPY_RATE, _NETWORK_RATE)
    names = list(dict.fromkeys(offer.host for offer in offers))
    hosts = [names.index(offer.host) for offer in offers]

    def divided(reads: Sequence[Reads]) -> Division:
        cell = offers[0].cell
        # Of what may be in flight a rank needs two buckets to receive, and one or two to send from.
        bucket = max(min(BUCKET_NBYTES, options.inflight_nbytes // 8), cell)
        return divide(reads, hosts, cell_nbytes=cell, bucket_nbytes=bucket, costs=costs)

    if all(offer.carries for offer in offers) or len(names) == 1:
        return divided(reads)
    none = Reads(*(np.zeros(0, np.int64) for _ in range(3)))
    parts = [_no_part()] * len(offers)
    for host in range(len(names)):
        mine = [r if h == host else none for r, h in zip(reads, hosts, strict=True)]
        for rank, part in enumerate(divided(mine).parts):
            if hosts[rank] == host:
                parts[rank] = part
    return Division(tuple(parts), 0)


def _no_part() -> FetchTable:
    empty, first = np.zeros(0, np.int64), np.zeros(1, np.int64)
    return FetchTable(empty, empty, empty, empty, empty, empty, empty, first, empty, first, empty)


def _reads(offer: messages.Offer, files: NDArray[np.int64]) -> Reads:
    """Return what a rank would read, by the numbers of files that all ranks have in common."""
    file, start, nbytes = (unpacked(column, "i8") for column in offer.columns)
    file = files[file]
    order = np.lexsort((start, file))
    return Reads(file[order], start[order], nbytes[order])
