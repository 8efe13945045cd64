"""The cost of planning a load for the root and every rank: each rank's offer, and the root's `share_out`.

The index is that of a save of the same or another job.  Every rank selects its rows, plans its reads and
offers them; the code is that of a load.  Hosts have 8 ranks, and a process group carries bytes between them.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.planning.tree import PER_HOST, WRITE_ID
from reknit.engine import messages
from reknit.engine.loading.contents import Reach, kept
from reknit.engine.loading.match import Fill
from reknit.engine.loading.read import granularity
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.packing import Sections, merge_claims, merge_receipts
from reknit.engine.sharing.shared_read import share_out
from reknit.engine.stored.manifest_content import receipts_to_manifest
from reknit.format.checksum import BLOCK_NBYTES
from reknit.options import LoadOptions
from reknit.planner.columns import packed, unpacked
from reknit.planner.load import plan_load
from reknit.planner.sharing import FetchTable, Reads, fetch_of
from reknit.types.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.planning.jobs import Job
    from benchmarks.planning.tree import Climbed
    from reknit.engine.messages import Offer, SharePlan
    from reknit.types.manifest import Index

OPTIONS = LoadOptions(share="always")
CUT = granularity(OPTIONS, BLOCK_NBYTES)
AT_ONCE = 16
"""Ranks that a worker plans at once."""


@dataclass(frozen=True)
class Saved:
    """The index of a save, the size of each of its files, and the bytes that each rank wrote."""

    index: Index
    file_nbytes: dict[str, int]
    written_nbytes: list[int]


class Offered(NamedTuple):
    """The offer of a rank, the CPU seconds of its plan, its rows of the index, and the bytes that it reads.

    `first_nbytes` are the bytes of its shards of which it is the first replica.
    """

    offer: Offer
    plan_s: float
    num_rows: int
    nbytes: int
    first_nbytes: int


class Loading(NamedTuple):
    """The planning of a load: the bytes that each rank reads alone and shared, CPU seconds, and counts."""

    alone_nbytes: list[int]
    shared_nbytes: list[int]
    plan_s: list[float]
    num_rows: list[int]
    share_out_s: float
    unique_nbytes: int
    num_reads: int
    first_nbytes: list[int]


def saved(climbed: Climbed) -> Saved:
    """Return the result of the root's part of a save."""
    coordinator = Coordinator()
    coordinator.assign(None, [merge_claims(Sections.unpack(climbed.claims.at_root))])
    reported, chunks = merge_receipts(Sections.unpack(climbed.receipts.at_root))
    index = coordinator.assembled(reported, chunks).named(WRITE_ID)
    content = receipts_to_manifest(reported, WRITE_ID)
    written = np.bincount(content.ranks, content.files.nbytes).astype(np.int64)
    sizes = dict(zip(content.files.paths, content.files.nbytes.tolist(), strict=True))
    return Saved(index, sizes, written.tolist())


def load(job: Job, source: Saved, *, workers: int) -> Loading:
    """Let every rank plan and offer its reads of a checkpoint, and the root divide them."""
    ranks = list(_offers(job, source, workers))
    offers = [rank.offer for rank in ranks]
    begin = time.process_time()
    plans = share_out(offers, OPTIONS)
    share_out_s = time.process_time() - begin
    shared = [
        _after(rank, plan, number) for number, (rank, plan) in enumerate(zip(ranks, plans, strict=True))
    ]
    return Loading(
        alone_nbytes=[rank.nbytes for rank in ranks],
        shared_nbytes=shared,
        plan_s=[rank.plan_s for rank in ranks],
        num_rows=[rank.num_rows for rank in ranks],
        share_out_s=share_out_s,
        unique_nbytes=_unique(offers),
        first_nbytes=[rank.first_nbytes for rank in ranks],
        num_reads=sum(len(unpacked(offer.columns[0], "i8")) for offer in offers),
    )


def offered(job: Job, source: Saved, rank: int) -> Offered:
    """Return the offer of a rank that wants the same boxes as it would save."""
    index = source.index
    shards = job.shards(rank)
    fills = [
        Fill(f"{each.item}/{each.fqn}", index.ids[each.item, each.fqn], each.box, None, cast=False)
        for each in shards
    ]
    begin = time.process_time()
    rows = kept(index, Reach.of(index, fills, _NOTHING))
    sizes = [source.file_nbytes[path] for path in rows.files]
    plan = plan_load(rows, [(fill.tensor, fill.box) for fill in fills], sizes, CUT)
    columns = (plan.read_file, plan.read_start, plan.read_nbytes)
    offer = messages.Offer(
        host=str(rank // PER_HOST),
        link=str(rank),
        carries="cpu",
        cell=CUT.nbytes,
        verify=OPTIONS.verify,
        read_rate=0.0,
        files=list(rows.files),
        columns=[packed(column, "i8") for column in columns],
    )
    plan_s = time.process_time() - begin
    first = sum(
        each.box.numel * each.spec.itemsize
        for each in shards
        if each.replicas is None or each.replicas[0] == rank
    )
    return Offered(offer, plan_s, len(rows.tensor), int(plan.read_nbytes.sum()), first)


_NOTHING = Wanted(())
_JOBS: list[tuple[Job, Saved]] = []
"""In a worker: the job and the checkpoint, sent once."""


def _begin(job: Job, source: Saved) -> None:
    _JOBS[:] = [(job, source)]


def _some(ranks: range) -> list[Offered]:
    job, source = _JOBS[0]
    return [offered(job, source, rank) for rank in ranks]


def _offers(job: Job, source: Saved, workers: int) -> Iterator[Offered]:
    parts = [range(low, min(low + AT_ONCE, job.ranks)) for low in range(0, job.ranks, AT_ONCE)]
    if workers == 1:
        _begin(job, source)
        yield from (rank for part in parts for rank in _some(part))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _begin, (job, source)) as pool:
        for ranks in pool.map(_some, parts):
            yield from ranks


def _after(rank: Offered, plan: SharePlan | None, number: int) -> int:
    """Return the bytes that a rank reads from storage by the root's plan."""
    if plan is None:
        return rank.nbytes
    part = FetchTable(*(unpacked(column, "i8") for column in plan.columns))
    reads = Reads(*(unpacked(column, "i8") for column in rank.offer.columns))
    private = fetch_of(reads, part) < 0
    return int(reads.nbytes[private].sum() + part.nbytes[part.reader == number].sum())


def _unique(offers: list[Offer]) -> int:
    """Return the number of bytes that at least one rank wants."""
    numbers: dict[str, int] = {}
    ranges = []
    for offer in offers:
        own = np.array([numbers.setdefault(path, len(numbers)) for path in offer.files], np.int64)
        file, start, nbytes = (unpacked(column, "i8") for column in offer.columns)
        ranges.append(np.stack((own[file], start, start + nbytes)))
    file, start, stop = np.unique(np.concatenate(ranges, axis=1), axis=1)
    reach = np.zeros(len(file), np.int64)
    base = file * (int(stop.max()) + 1)
    reach[1:] = np.maximum.accumulate(base + stop)[:-1]
    return int(np.maximum(base + stop - np.maximum(base + start, reach), 0).sum())
