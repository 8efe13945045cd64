"""One rank's side of a shared read: its offer to the root, and its part in the root's decision."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from reknit.engine import messages
from reknit.engine.memory.workers import within
from reknit.engine.sharing.exchange import Exchange, Sharing
from reknit.engine.sharing.host_exchange import BUCKET_NBYTES, largest
from reknit.engine.sharing.tracker import HostLink
from reknit.environment import host_name, num_threads
from reknit.events.phase import Stopwatch
from reknit.planner.columns import columns_of, distinct, packed, unpacked
from reknit.planner.sharing import (
    WORTH_NBYTES,
    Costs,
    Division,
    Reads,
    Wants,
    divide,
    fetch_of,
    lists_of,
    part_of,
    runs,
)
from reknit.types.small import spelled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reknit.comm.group import Group
    from reknit.engine.sharing.exchange import PlanReader
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.events.phase import Recorder
    from reknit.options import LoadOptions
    from reknit.planner.columns import RankColumns


logger = logging.getLogger("reknit")

_COPY_RATE = 3e9
"""Estimate: bytes per second that a rank copies out of another rank's ring, while all ranks copy."""
_NETWORK_RATE = 1e9
"""Estimate: bytes per second between hosts, for each rank: its part of a 10-gigabit link."""


def share_out(offers: RankColumns, size: int, options: LoadOptions) -> list[messages.SharePlan | None]:
    """Decide, on the root, which rank reads a range for which ranks; None for a rank that reads alone."""
    answers: list[messages.SharePlan | None] = [None] * size
    if len(offers.ranks) < size:
        return answers
    cell, unverified, rates = offers.lists["terms"].flat().reshape(-1, 3).T
    is_timed = options.share == "auto"
    if (cell != cell[0]).any() or (unverified != unverified[0]).any() or (is_timed and not rates.any()):
        return answers
    costs = Costs(float(np.median(rates[rates > 0])), _COPY_RATE, _NETWORK_RATE) if is_timed else None
    reads, hosts = offers.lists["reads"], offers.lists["host"].flat()
    wants = Wants.collected(offers.tables["reads"], reads.flat(), np.repeat(offers.ranks, reads.counts))
    together = [wants]
    if hosts.any() and not _carried(offers):
        together = [wants.only(hosts == host) for host in distinct(hosts)]
    # A rank receives into two buckets, and sends from one or two.
    bucket = max(min(BUCKET_NBYTES, options.inflight_nbytes // 8), int(cell[0]))
    for part in together:
        division = divide(part, hosts, cell_nbytes=int(cell[0]), bucket_nbytes=bucket, costs=costs)
        plan = _plan(division, offers)
        for rank in range(size) if plan.num_turns else distinct(division.rank):
            answers[rank] = plan
    return answers


def _plan(division: Division, offers: RankColumns) -> messages.SharePlan:
    """Return a division as a message, with the addresses of ranks that share bytes within their host."""
    bounds = runs(division.member_of, division.host)
    near = np.repeat(np.diff(bounds) > 1, np.diff(bounds))
    links, names = offers.lists["link"].flat(), offers.tables["link"]
    return messages.SharePlan(
        division.num_turns,
        division.num_steps,
        [packed(column, kind) for column, kind in zip(division[:-1], _KINDS, strict=True)],
        {rank: names[links[rank]] for rank in distinct(division.rank[near])},
    )


def division_of(share: messages.SharePlan) -> Division:
    """Return the division that a plan has as a message."""
    parts = (unpacked(data, kind).astype(np.int64) for data, kind in zip(share.columns, _KINDS, strict=True))
    return Division._make((*parts, share.num_steps))


_KINDS = ("i4", "i8", "i8", "i4", "i4", "i4", "i4", "i4", "i4", "i4")
"""The types of the columns of a division."""


def _carried(offers: RankColumns) -> bool:
    """Return whether all ranks can send bytes to other hosts, in the same way; log the reason if not."""
    column, names = offers.lists["carries"], offers.tables["carries"]
    kinds = [names[number[0]] if len(number) else None for number in column.lists()]
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


_MOST_SLOTS = 8
"""Fetches that a rank reads before others have taken them."""


class SharedRead(Struct, frozen=True):
    """One rank's side of a shared read; `files` are those of the plan: their common numbers, and paths."""

    group: Group
    carrier: Carrier | None
    reader: PlanReader
    files: Mapping[int, str]
    link: HostLink | None
    options: LoadOptions

    @classmethod
    def begin(
        cls,
        group: Group,
        carrier: Callable[[], Carrier] | None,
        reader: PlanReader,
        files: Mapping[int, str],
        options: LoadOptions,
    ) -> SharedRead:
        """Return this rank's side, which `close` ends; `carrier` makes the transport to other hosts."""
        carries, link = None if carrier is None else carrier(), None
        if HostLink.available():
            with suppress(OSError):  # a sandbox may refuse it; without a link the rank reads alone
                link = HostLink(group.rank)
        return cls(group=group, carrier=carries, reader=reader, files=files, link=link, options=options)

    def offer(self) -> RankColumns:
        """Return the ranges that this rank would read alone, and its ways to share them, as columns.

        Ranks with equal `host` reach each other by `link`.  `carries` has the way of bytes to other hosts, if
        there is a process group.  That is a type of device, or nothing if the group has no backend for one
        that is there.  `terms` are the size of the cells that reads keep to, whether they are not verified,
        and the measured bytes per second, 0 if they were not measured.
        """
        reads, rate = self._reads(), self._read_rate() if self.options.share == "auto" else 0
        order = np.lexsort((reads.start, reads.file))
        tables: dict[str, Sequence[Any]] = {
            "host": [(self.link and host_id()) or secrets.token_hex(8)],
            "link": ["" if self.link is None else self.link.address],
            "carries": [] if self.carrier is None else [self.carrier.kind],
            "reads": lists_of(Reads(*(column[order] for column in reads))),
        }
        terms = [self.reader.cell_nbytes, self.options.verify == "off", rate]
        return columns_of(self.group.rank, tables, {"terms": (terms, "")})

    def reserve(self, share: messages.SharePlan) -> None:
        """Take the memory that exchanges with other hosts need, while no rank waits for this one in them.

        Raises `ShortageError` where a device does not have it.
        """
        if self.carrier is not None and share.num_turns:
            part = part_of(division_of(share), self.group.rank)
            most = largest(self.group.rank, part, share.num_steps)
            self.carrier.reserve(most.sent, most.received)

    def run(self, share: messages.SharePlan, recorder: Recorder, timeout_s: float) -> int:
        """Read together with the others, as the root decided; return the bytes that came from them.

        Raises `StoppedError` when another rank gave up, which then says why.
        """
        part = part_of(division_of(share), self.group.rank)
        rows: list[list[int]] = [[] for _ in part.number]
        private: list[int] = []
        for number, row in enumerate(fetch_of(self._reads(), part).tolist()):
            (rows[row] if row >= 0 else private).append(number)
        sharing = Sharing(
            part=part,
            num_turns=share.num_turns,
            num_steps=share.num_steps,
            rows=rows,
            paths=[self.files[file] for file in part.file.tolist()],
            peers={taker: share.links[taker] for taker in distinct(part.taker)},
            cell_nbytes=self.reader.cell_nbytes,
            num_slots=max(min(_MOST_SLOTS, self.options.inflight_nbytes // self.reader.cell_nbytes // 4), 1),
        )
        exchange = Exchange(
            rank=self.group.rank,
            sharing=sharing,
            work=self.reader,
            private=[partial(self.reader.read, job) for job in self.reader.jobs(private)],
            link=self.link,
            carrier=self.carrier if share.num_turns else None,
            broken=lambda: self.group.broken,
            timeout_s=timeout_s,
        )
        # One thread may wait for storage, while another copies fetches of other ranks.
        try:
            threads = max(2, num_threads(self.options.threads))
            with self.reader.transfer:
                budget = self.options.inflight_nbytes
                exchange.run(threads, self.reader.arena_nbytes, budget, self.reader.arenas)
        finally:
            self.reader.record(recorder)
            if self.carrier is not None:
                self.carrier.release()
        return exchange.nbytes_received

    def close(self) -> None:
        """Refuse further connections, and give memory back."""
        if self.link is not None:
            self.link.close()
        if self.carrier is not None:
            self.carrier.release()

    def _reads(self) -> Reads:
        """Return the reads that others may want as well: not strided reads, which are many and small."""
        plan = self.reader.plan
        numbers = np.array(list(self.files), np.int64)
        return Reads(numbers[plan.read_file], plan.read_start, plan.read_nbytes)

    def _read_rate(self) -> int:
        """Measure how fast this rank reads while the others do the same, in bytes per second."""
        plan = self.reader.plan
        if int(plan.read_nbytes.sum()) < WORTH_NBYTES:
            return 0
        # Not a small read, whose time is that of the call, and not the first one, which may be cached.
        largest = np.flatnonzero(plan.read_nbytes == plan.read_nbytes.max())
        read = largest[len(largest) // 2]
        # One block is enough, and hardly counts among the bytes that are read.
        nbytes = min(int(plan.read_nbytes[read]), self.reader.block_nbytes)
        memory, reading = np.ones(nbytes, np.uint8), Stopwatch()
        path, start = list(self.files.values())[plan.read_file[read]], int(plan.read_start[read])

        def fetch() -> None:
            with reading.timed():  # without the time that the thread takes to start
                self.reader.fetch(path, start, memory)

        within(self.options.timeout_s, self.reader.under_way, fetch)
        return max(1, int(len(memory) / max(reading.seconds, 1e-9)))


def host_id() -> str | None:
    """Return a key that ranks which can share memory have in common: kernel, network namespace and user."""
    if (name := host_name()) is not None:
        return name
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.geteuid()}"
    except OSError:  # no /proc, or a closed one: which ranks share this host is not known
        return None
