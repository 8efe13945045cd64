"""A save's two messages on their way to the root, level by level in one process."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.comm.group import Topology
from reknit.engine import messages
from reknit.engine.memory.images import Sources
from reknit.engine.memory.write import Written
from reknit.engine.saving.coordinator import receipt
from reknit.engine.saving.layout import FileCut, layout_digest, outline
from reknit.engine.saving.packing import Sections, claims, merge_claims, merge_receipts
from reknit.engine.saving.part import EQUAL, EncodedHoldings
from reknit.format import paths
from reknit.format.checksum import BLOCK_NBYTES
from reknit.types.shard import Holdings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.planning.jobs import Job

PER_HOST, FAN_OUT = 8, 16
WRITE_ID = "0a1b2c3d" * 4
SHARED_VALUES = 20
"""The number of values besides tensors that all ranks hold alike: step, learning rate, and so on."""
CUT = FileCut(16 << 30)
AT_ONCE = 64
"""Ranks that a worker makes at once."""


class Rank(NamedTuple):
    """The messages of one rank to the root, and the CPU seconds of its plan and of its receipt.

    `silent` is its receipt for a second save by the same plan.
    """

    claims: bytes
    receipt: bytes
    silent: bytes
    plan_s: float
    receipt_s: float
    num_chunks: int


def rank_of(job: Job, rank: int, *, silent: bool) -> Rank:
    """Return the messages and times of one rank with its shards, some shared values, and its own RNG."""
    holdings = Holdings(("model", "optimizer", "rng", "extra"), tuple(job.shards(rank)), ())
    begin = time.process_time()
    digest = layout_digest(holdings, CUT)
    plan = outline(holdings, rank, CUT)
    planned = time.process_time()
    files = [(image.path, image.nbytes) for image in plan.images(WRITE_ID, Sources(()))]
    files += [(paths.blob_path("rng", rank, WRITE_ID, own=0), 5000)] + [
        (paths.blob_path("extra", rank, WRITE_ID), 2000)
    ] * (rank == 0)
    random = np.random.default_rng(rank)
    written = [
        Written(path, nbytes, random.integers(0, 1 << 64, -(-nbytes // BLOCK_NBYTES), np.uint64))
        for path, nbytes in files
    ]
    own = [{"rank": rank}]
    where: Any = SimpleNamespace(
        group=SimpleNamespace(rank=rank), storage=SimpleNamespace(url="file:///job/step")
    )
    sending = time.process_time()
    reported = receipt(
        where, holdings.items, written, plan=digest, columns=plan.columns, places=own, copies=EQUAL
    )
    receipt_s = time.process_time() - sending
    again = (
        receipt(where, holdings.items, written, plan=digest, columns=None, places=own, copies=EQUAL).pack()
        if silent
        else b""
    )
    claimed = claims(rank, messages.RankClaims(WRITE_ID, 1, digest, _NO_SHARDS, _SHARED))
    return Rank(
        claimed.pack(), reported.pack(), again, planned - begin, receipt_s, len(plan.columns.tensor) // 8
    )


def _some(job: Job, silent: bool, ranks: range) -> list[Rank]:
    return [rank_of(job, rank, silent=silent) for rank in ranks]


def _ranks(job: Job, silent: bool, workers: int) -> Iterator[Rank]:
    """Yield the messages of all ranks, from the last to the first."""
    parts = [range(high - 1, max(high - AT_ONCE, 0) - 1, -1) for high in range(job.ranks, 0, -AT_ONCE)]
    if workers == 1 or len(parts) == 1:
        yield from (rank for part in parts for rank in _some(job, silent, part))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn) as pool:
        for ranks in pool.map(partial(_some, job, silent), parts):
            yield from ranks


_NO_SHARDS = EncodedHoldings(Holdings((), (), ()), (), []).shard_claims()
_SHARED = [messages.EncodedBlob("extra", 7919 * n, None, b"x" * 50) for n in range(SHARED_VALUES)]


@dataclass
class Climb:
    """One round on its way up: the messages that reach the root, and the costs of the way."""

    merge: Callable[[Sequence[Any]], Any]
    kind: Any = Sections
    at_root: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    largest_fan_in_nbytes: int = 0
    busiest_s: float = 0.0

    def join(self, parts: list[bytes]) -> bytes:
        """Merge the message of a rank with those of its children into one, as an inner node does."""
        below = sum(map(len, parts[1:]))
        self.nbytes += below
        self.largest_fan_in_nbytes = max(self.largest_fan_in_nbytes, below)
        if len(parts) == 1 or not any(parts):  # a leaf, or no second save
            return parts[0]
        begin = time.process_time()
        merged: bytes = self.merge(self.kind.unpack(parts)).pack()
        self.busiest_s = max(self.busiest_s, time.process_time() - begin)
        return merged

    def end(self, parts: list[bytes]) -> None:
        """Keep the messages that reach the root."""
        self.at_root = parts
        self.nbytes += sum(map(len, parts[1:]))

    def reported(self) -> dict[str, Any]:
        """Return the costs in bytes and seconds."""
        into_root = sum(map(len, self.at_root[1:]))
        return {
            "up_in_all_nbytes": self.nbytes,
            "into_root_nbytes": into_root,
            "largest_fan_in_nbytes": max(self.largest_fan_in_nbytes, into_root),
            "busiest_inner_node_s": round(self.busiest_s, 4),
        }


@dataclass
class Climbed:
    """The messages of all ranks, and their costs; `silent` has receipts of a second save by the same plan."""

    claims: Climb
    receipts: Climb
    silent: Climb
    plan_s: list[float]
    receipt_s: list[float]
    num_chunks: int


def climb(job: Job, *, silent: bool, workers: int = 1) -> Climbed:
    """Let every rank plan, and merge their messages up to the root, with `silent` also for a second save."""
    topology = Topology([rank // PER_HOST for rank in range(job.ranks)], FAN_OUT)
    rounds = (Climb(merge_claims), Climb(merge_receipts), Climb(merge_receipts))
    reported = Climbed(*rounds, [], [], 0)
    waiting: dict[int, list[bytes]] = {}
    everyone = _ranks(job, silent, workers)
    for number, rank in zip(range(job.ranks - 1, -1, -1), everyone, strict=True):  # children come first
        reported.plan_s.append(rank.plan_s)
        reported.receipt_s.append(rank.receipt_s)
        reported.num_chunks += rank.num_chunks
        below = [waiting.pop(child) for child in topology.children(number)]
        own = (rank.claims, rank.receipt, rank.silent)
        parts = [[mine, *(child[k] for child in below)] for k, mine in enumerate(own)]
        if number:
            waiting[number] = [one.join(mine) for one, mine in zip(rounds, parts, strict=True)]
        else:
            for one, mine in zip(rounds, parts, strict=True):
                one.end(mine)
    return reported
