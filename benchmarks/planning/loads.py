"""The cost of planning a load for the root, its tree, and every rank.

The index is that of a save of the same or another job.  Every rank selects its rows, plans its reads and
offers them; the offers are merged level by level, as hosts of 8 ranks with a fan-out of 16 would.  The root
reads them, divides the reads and makes its answers, and ranks work out their parts; the code is that of a
load.  Between hosts a process group carries bytes.

Pipeline stages share no bytes.  So the offers of a large job can be made of those of one of its stages, with
other ranks, hosts and files in each copy.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
from msgspec import structs
from msgspec.structs import replace

from benchmarks.planning.tree import FAN_OUT, PER_HOST, WRITE_ID, Climb
from reknit.comm.group import Topology
from reknit.engine import messages
from reknit.engine.loading.contents import Reach, kept
from reknit.engine.loading.match import Fill
from reknit.engine.loading.read import granularity
from reknit.engine.loading.root import LoadRequests, merge_requests
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.packing import Sections, merge_claims, merge_receipts
from reknit.engine.sharing import shared_read
from reknit.engine.sharing.shared_read import division_of, share_out
from reknit.engine.stored.manifest_content import receipts_to_manifest
from reknit.format.checksum import BLOCK_NBYTES
from reknit.options import LoadOptions
from reknit.planner.columns import NOTHING
from reknit.planner.load import plan_load
from reknit.planner.sharing import Division, Reads, Wants, fetch_of, part_of
from reknit.types.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.planning.jobs import Job
    from benchmarks.planning.tree import Climbed
    from reknit.planner.columns import RankColumns
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

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each file."""
        return {path: number for number, path in enumerate(self.file_nbytes)}


class Offered(NamedTuple):
    """The request of a rank, the CPU seconds of its plan, its rows of the index, and the bytes that it reads.

    `first_nbytes` are the bytes of its shards of which it is the first replica.
    """

    request: bytes
    plan_s: float
    num_rows: int
    nbytes: int
    first_nbytes: int


class Loading(NamedTuple):
    """The planning of a load: the bytes that each rank reads alone and shared, CPU seconds, and counts.

    The root reads requests (`read_s`), divides (`share_out_s`) and makes its answers (`answer_s`), of
    `answer_nbytes` bytes altogether.  A rank works out its part in `part_s`, the median of some ranks.
    """

    alone_nbytes: list[int]
    shared_nbytes: list[int]
    plan_s: list[float]
    num_rows: list[int]
    read_s: float
    share_out_s: float
    answer_s: float
    answer_nbytes: int
    part_s: float
    requests: dict[str, Any]
    unique_nbytes: int
    first_nbytes: list[int]

    @property
    def root_s(self) -> float:
        """The CPU seconds of the root."""
        return self.read_s + self.share_out_s + self.answer_s


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


def load(job: Job, source: Saved, *, workers: int, stages: int = 1) -> Loading:
    """Let every rank plan and offer its reads of a checkpoint, and the root divide them.

    The job can be one of several equal stages, of which `alone_nbytes` and the like count one.
    """
    ranks, climb = _climb(job, source, workers)
    at_root = climb.at_root if stages == 1 else _copies(climb.at_root, len(source.file_nbytes), stages)
    clock = [time.process_time()]
    merged = merge_requests(LoadRequests.unpack(at_root))
    clock.append(time.process_time())
    assert merged.offers is not None
    plans = share_out(merged.offers.of_ranks, len(merged.requests), OPTIONS)
    clock.append(time.process_time())
    distinct = {id(plan): plan for plan in plans}
    answers = [messages.encode(messages.LoadDecision([], [], share=plan)) for plan in distinct.values()]
    clock.append(time.process_time())
    (division,) = (division_of(plan) for plan in distinct.values() if plan is not None)
    parts = []
    for number in range(0, job.ranks, max(job.ranks // 16, 1)):
        begin = time.process_time()
        part_of(division, number)
        parts.append(time.process_time() - begin)
    read_s, share_out_s, answer_s = (end - begin for begin, end in pairwise(clock))
    shared, unique = _shared(merged.offers.of_ranks, division, len(merged.requests))
    return Loading(
        alone_nbytes=[rank.nbytes for rank in ranks],
        shared_nbytes=shared,
        plan_s=[rank.plan_s for rank in ranks],
        num_rows=[rank.num_rows for rank in ranks],
        read_s=read_s,
        share_out_s=share_out_s,
        answer_s=answer_s,
        answer_nbytes=sum(map(len, answers)),
        part_s=statistics.median(parts),
        requests=climb.reported() | {"into_root_nbytes": sum(map(len, at_root[1:]))},
        unique_nbytes=unique,
        first_nbytes=[rank.first_nbytes for rank in ranks],
    )


def _climb(job: Job, source: Saved, workers: int) -> tuple[list[Offered], Climb]:
    """Return the offers of all ranks, and the climb of their messages."""
    topology = Topology([rank // PER_HOST for rank in range(job.ranks)], FAN_OUT)
    climb = Climb(merge_requests, LoadRequests)
    waiting: dict[int, bytes] = {}
    ranks = []
    everyone = _offers(job, source, workers)
    for number, rank in zip(range(job.ranks - 1, -1, -1), everyone, strict=True):  # children come first
        ranks.append(rank._replace(request=b""))
        parts = [rank.request, *(waiting.pop(child) for child in topology.children(number))]
        if number:
            waiting[number] = climb.join(parts)
        else:
            climb.end(parts)
    return ranks[::-1], climb


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
    reader: Any = SimpleNamespace(plan=plan, cell_nbytes=CUT.nbytes)
    group: Any = SimpleNamespace(rank=rank)
    carrier: Any = SimpleNamespace(kind="cpu")
    link: Any = SimpleNamespace(address=f"{rank:064}")
    files = {source.numbers[path]: path for path in rows.files}
    with mock.patch.object(shared_read, "host_name", return_value=str(rank // PER_HOST)):
        offer = shared_read.SharedRead(group, carrier, reader, files, link, OPTIONS).offer()
    problem = messages.LoadRequest(rank, [], [], [], [], num_tensors=len(fills), num_filled=len(fills))
    request = LoadRequests([problem], Sections(offer, NOTHING)).pack()
    plan_s = time.process_time() - begin
    first = sum(
        each.box.numel * each.spec.itemsize
        for each in shards
        if each.replicas is None or each.replicas[0] == rank
    )
    return Offered(request, plan_s, len(rows.tensor), int(plan.read_nbytes.sum()), first)


_NOTHING = Wanted(())
_JOBS: list[tuple[Job, Saved]] = []
"""In a worker: the job and the checkpoint, sent once."""


def _begin(job: Job, source: Saved) -> None:
    _JOBS[:] = [(job, source)]


def _some(ranks: range) -> list[Offered]:
    job, source = _JOBS[0]
    return [offered(job, source, rank) for rank in ranks]


def _copies(at_root: list[bytes], files: int, stages: int) -> list[bytes]:
    """Return the requests of all stages, given those of one."""
    stage = merge_requests(LoadRequests.unpack(at_root))
    assert stage.offers is not None
    offers, size = stage.offers.of_ranks, len(stage.requests)
    copies = []
    for number in range(stages):
        reads = [np.frombuffer(each, "<i8").reshape(-1, 3) for each in offers.tables["reads"]]
        tables = {
            **offers.tables,
            "host": [f"{number}/{host}" for host in offers.tables["host"]],
            "link": [f"{int(link) + size * number:064}" for link in offers.tables["link"]],
            "reads": [(rows + np.array([files * number, 0, 0])).tobytes() for rows in reads],
        }
        columns = structs.replace(offers, ranks=offers.ranks + size * number, tables=tables)
        requests = [replace(request, rank=request.rank + size * number) for request in stage.requests]
        copies.append(LoadRequests(requests, Sections(columns, NOTHING)).pack())
    return copies


def _offers(job: Job, source: Saved, workers: int) -> Iterator[Offered]:
    """Yield the offers of all ranks, from the last to the first."""
    parts = [range(high - 1, max(high - AT_ONCE, 0) - 1, -1) for high in range(job.ranks, 0, -AT_ONCE)]
    if workers == 1:
        _begin(job, source)
        yield from (rank for part in parts for rank in _some(part))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _begin, (job, source)) as pool:
        for ranks in pool.map(_some, parts):
            yield from ranks


def _shared(offers: RankColumns, division: Division, ranks: int) -> tuple[list[int], int]:
    """Return the bytes that each rank reads by the root's plan, and the number of different bytes."""
    lists = offers.lists["reads"]
    wants = Wants.collected(offers.tables["reads"], lists.flat(), np.repeat(offers.ranks, lists.counts))
    private = fetch_of(Reads(*wants[:3]), division) < 0
    alone = np.bincount(wants.of, wants.nbytes * private, len(wants.first) - 1)
    read = np.bincount(wants.rank, np.repeat(alone, np.diff(wants.first)), ranks)
    read += np.bincount(division.reader, division.nbytes, ranks)
    file, start, stop = np.unique(np.stack((*wants[:2], wants.start + wants.nbytes)), axis=1)
    reach = np.zeros(len(file), np.int64)
    base = file * (int(stop.max()) + 1)
    reach[1:] = np.maximum.accumulate(base + stop)[:-1]
    unique = int(np.maximum(base + stop - np.maximum(base + start, reach), 0).sum())
    return read.astype(np.int64).tolist(), unique
