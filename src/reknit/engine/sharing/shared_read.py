"""One rank's side of a shared read: its offer to the root, and its part in the root's decision."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from reknit.engine import messages
from reknit.engine.memory.workers import within
from reknit.engine.sharing.exchange import Exchange, Sharing
from reknit.engine.sharing.host_exchange import BUCKET_NBYTES, largest
from reknit.engine.sharing.tracker import HostLink
from reknit.environment import host_name, num_threads
from reknit.events.phase import Stopwatch
from reknit.planner.columns import distinct, packed, unpacked
from reknit.planner.sharing import WORTH_NBYTES, Costs, Division, FetchTable, Reads, divide, fetch_of
from reknit.types.small import spelled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.comm.group import Group
    from reknit.engine.sharing.exchange import PlanReader
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.events.phase import Recorder
    from reknit.options import LoadOptions


logger = logging.getLogger("reknit")

_COPY_RATE = 3e9
"""Estimate: bytes per second that a rank copies out of another rank's ring, while all ranks copy."""
_NETWORK_RATE = 1e9
"""Estimate: bytes per second between hosts, for each rank: its part of a 10-gigabit link."""


def share_out(
    offers: Sequence[messages.Offer | None], options: LoadOptions
) -> list[messages.SharePlan | None]:
    """Decide, on the root, which rank reads a range for which ranks; None for a rank that reads alone."""
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
    num_steps = _num_steps(division, _bucket_nbytes(there, options))
    answers = alone
    for rank, part in enumerate(division.parts):
        if not len(part.number) and not division.num_turns:
            continue
        local = np.full(len(numbers), -1, np.int64)
        local[own[rank]] = np.arange(len(own[rank]))
        columns = part._replace(file=local[part.file])
        answers[rank] = messages.SharePlan(
            division.num_turns,
            num_steps,
            [packed(column, "i8") for column in columns],
            {taker: there[taker].link for taker in distinct(part.taker)},
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


def _bucket_nbytes(offers: Sequence[messages.Offer], options: LoadOptions) -> int:
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


def _reads(offer: messages.Offer, files: NDArray[np.int64]) -> Reads:
    """Return the ranges that a rank would read, by the numbers of files that all ranks have in common."""
    file, start, nbytes = (unpacked(column, "i8") for column in offer.columns)
    file = files[file]
    order = np.lexsort((start, file))
    return Reads(file[order], start[order], nbytes[order])


_MOST_SLOTS = 8
"""Fetches that a rank reads before others have taken them."""


class SharedRead(Struct, frozen=True):
    """One rank's side of a shared read; `files` are the paths of the files that the reader's plan numbers."""

    group: Group
    carrier: Carrier | None
    reader: PlanReader
    files: Sequence[str]
    link: HostLink | None
    options: LoadOptions

    @classmethod
    def begin(
        cls,
        group: Group,
        carrier: Callable[[], Carrier] | None,
        reader: PlanReader,
        files: Sequence[str],
        options: LoadOptions,
    ) -> SharedRead:
        """Return this rank's side, which `close` ends; `carrier` makes the transport to other hosts."""
        carries, link = None if carrier is None else carrier(), None
        if HostLink.available():
            with suppress(OSError):  # a sandbox may refuse it; without a link the rank reads alone
                link = HostLink(group.rank)
        return cls(group=group, carrier=carries, reader=reader, files=files, link=link, options=options)

    def offer(self) -> messages.Offer:
        """Return the ranges that this rank would read alone, and its address for other ranks."""
        return messages.Offer(
            host=(self.link and host_id()) or secrets.token_hex(8),
            link="" if self.link is None else self.link.address,
            carries=None if self.carrier is None else self.carrier.kind,
            cell=self.reader.cell_nbytes,
            verify=self.options.verify,
            read_rate=self._read_rate() if self.options.share == "auto" else 0.0,
            files=list(self.files),
            columns=[packed(column, "i8") for column in self._reads()],
        )

    def reserve(self, share: messages.SharePlan) -> None:
        """Take the memory that exchanges with other hosts need, while no rank waits for this one in them.

        Raises `ShortageError` where a device does not have it.
        """
        if self.carrier is not None and share.num_turns:
            sizes = largest(self.group.rank, _part(share), share.num_steps)
            self.carrier.reserve(sizes.sent, sizes.received)

    def run(self, share: messages.SharePlan, recorder: Recorder, timeout_s: float) -> int:
        """Read together with the others, as the root decided; return the bytes that came from them.

        Raises `StoppedError` when another rank gave up, which then says why.
        """
        part = _part(share)
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
            peers=share.peers,
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
                budget, arenas = self.options.inflight_nbytes, self.reader.arenas
                exchange.run(threads, self.reader.arena_nbytes, budget, arenas)
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
        return Reads(plan.read_file, plan.read_start, plan.read_nbytes)

    def _read_rate(self) -> float:
        """Measure how fast this rank reads while the others do the same, in bytes per second."""
        plan = self.reader.plan
        if int(plan.read_nbytes.sum()) < WORTH_NBYTES:
            return 0.0
        # Not a small read, whose time is that of the call, and not the first one, which may be cached.
        largest = np.flatnonzero(plan.read_nbytes == plan.read_nbytes.max())
        read = largest[len(largest) // 2]
        # One block is enough, and hardly counts among the bytes that are read.
        nbytes = min(int(plan.read_nbytes[read]), self.reader.block_nbytes)
        memory, reading = np.ones(nbytes, np.uint8), Stopwatch()
        path, start = self.files[plan.read_file[read]], int(plan.read_start[read])

        def fetch() -> None:
            with reading.timed():  # without the time that the thread takes to start
                self.reader.fetch(path, start, memory)

        within(self.options.timeout_s, self.reader.under_way, fetch)
        return len(memory) / max(reading.seconds, 1e-9)


def _part(share: messages.SharePlan) -> FetchTable:
    return FetchTable(*(unpacked(column, "i8") for column in share.columns))


def host_id() -> str | None:
    """Return a key that ranks which can share memory have in common: kernel, network namespace and user."""
    if (name := host_name()) is not None:
        return name
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.geteuid()}"
    except OSError:  # no /proc, or a closed one: which ranks share this host is not known
        return None
