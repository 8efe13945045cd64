"""Rank 0 divides the ranges that several ranks want among readers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from reknit.engine import round_messages
from reknit.engine.packed_columns import packed, unpacked
from reknit.engine.sharing.host_exchange import BUCKET_NBYTES
from reknit.planner.columns import distinct
from reknit.planner.sharing import Costs, Division, FetchTable, Reads, divide
from reknit.types.rank_text import spelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.options import LoadOptions

logger = logging.getLogger("reknit")

_COPY_RATE = 3e9
"""Estimate: bytes per second that a rank copies out of another rank's ring, while all ranks copy."""
_NETWORK_RATE = 1e9
"""Estimate: bytes per second between hosts, for each rank: its part of a 10-gigabit link."""


def share_out(
    offers: Sequence[round_messages.Offer | None], options: LoadOptions
) -> list[round_messages.SharePlan | None]:
    """Decide, on the root, which rank reads a range for which ranks; None for a rank that reads alone."""
    alone: list[round_messages.SharePlan | None] = [None] * len(offers)
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
    num_steps = _num_steps(division, _bucket_nbytes(there, options))
    answers = alone
    for rank, part in enumerate(division.parts):
        if not len(part.number) and not division.num_turns:
            continue
        local = np.full(len(numbers), -1, np.int64)
        local[own[rank]] = np.arange(len(own[rank]))
        columns = part._replace(file=local[part.file])
        answers[rank] = round_messages.SharePlan(
            division.num_turns,
            num_steps,
            [packed(column, "i8") for column in columns],
            {taker: there[taker].link for taker in distinct(part.taker)},
        )
    return answers


def _divide(offers: Sequence[round_messages.Offer], reads: Sequence[Reads], options: LoadOptions) -> Division:
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
        cell, bucket = offers[0].cell, _bucket_nbytes(offers, options)
        return divide(reads, hosts, cell_nbytes=cell, bucket_nbytes=bucket, costs=costs)

    if len(names) == 1 or _carried([offer.carries for offer in offers]):
        return divided(reads)
    none = Reads(*(np.zeros(0, np.int64) for _ in range(3)))
    parts = [_no_part()] * len(offers)
    for host in range(len(names)):
        mine = [r if h == host else none for r, h in zip(reads, hosts, strict=True)]
        for rank, part in enumerate(divided(mine).parts):
            if hosts[rank] == host:
                parts[rank] = part
    return Division(tuple(parts), 0)


def _bucket_nbytes(offers: Sequence[round_messages.Offer], options: LoadOptions) -> int:
    # A rank receives into two buckets, and sends from one or two.
    return max(min(BUCKET_NBYTES, options.inflight_nbytes // 8), offers[0].cell)


def _carried(kinds: Sequence[str | None]) -> bool:
    """Return whether all ranks can send bytes to other hosts, in the same way; log the reason if not."""
    if len(set(kinds)) == 1:
        if kinds[0]:
            return True
        if kinds[0] is None:
            return False
        why = "the process group has no backend for a device that is there"
    else:
        shown = {kind: spelled(r for r, k in enumerate(kinds) if k == kind) for kind in kinds}
        ways = ", ".join(f"{kind or 'none'} on {ranks}" for kind, ranks in shown.items())
        why = f"the process group has backends for different devices: {ways}"
    logger.warning(
        "ranks of different hosts do not share their reads, and each host reads all bytes: %s", why
    )
    return False


def _num_steps(division: Division, bucket_nbytes: int) -> int:
    """Return in how many steps each exchange is held, so that no rank sends more than a bucket in one.

    A fetch that goes to many hosts has more bytes, since each of them gets a copy.
    """
    most = 1
    for part in division.parts:
        leaving = part.nbytes * np.diff(part.remote_first)
        sent = np.bincount(np.maximum(part.turn, 0), leaving, minlength=1)
        most = max(most, -(-int(sent.max()) // bucket_nbytes))
    return most


def _no_part() -> FetchTable:
    empty, first = np.zeros(0, np.int64), np.zeros(1, np.int64)
    return FetchTable(
        number=empty,
        file=empty,
        start=empty,
        nbytes=empty,
        source=empty,
        reader=empty,
        turn=empty,
        taker_first=first,
        taker=empty,
        remote_first=first,
        remote=empty,
    )


def _reads(offer: round_messages.Offer, files: NDArray[np.int64]) -> Reads:
    """Return the ranges that a rank would read, by the numbers of files that all ranks have in common."""
    file, start, nbytes = (unpacked(column, "i8") for column in offer.columns)
    file = files[file]
    order = np.lexsort((start, file))
    return Reads(file[order], start[order], nbytes[order])
