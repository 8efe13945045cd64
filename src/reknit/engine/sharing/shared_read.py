"""Ranks that want the same bytes come to terms: what each of them would read, and who reads what for whom."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from reknit.engine import messages
from reknit.engine.memory.workers import within
from reknit.engine.sharing.exchange import Exchange, Sharing
from reknit.engine.sharing.host_exchange import BUCKET_NBYTES
from reknit.engine.sharing.host_link import HostLink
from reknit.monitor.phase import Stopwatch
from reknit.options import host_name, num_threads
from reknit.planner.sharing import WORTH_NBYTES, Costs, Division, FetchTable, Reads, divide, fetch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.comm.base import Group
    from reknit.engine.loading.read import RangeReader
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions

_COPY_RATE = 3e9
"""Bytes per second out of another rank's ring that are reckoned with, while all ranks copy."""
_NETWORK_RATE = 1e9
"""Bytes per second between hosts that are reckoned with: what a rank gets of a 10-gigabit link."""

_MOST_SLOTS = 8
"""Fetches that a rank reads ahead of those that take them."""


@dataclass(frozen=True, slots=True)
class SharedRead:
    """One rank's side of the terms; `files` are the paths of the files that the reader's plan numbers."""

    group: Group
    carrier: Carrier | None
    reader: RangeReader
    files: Sequence[str]
    link: HostLink | None
    options: LoadOptions

    @classmethod
    def begin(
        cls,
        group: Group,
        carrier: Callable[[], Carrier] | None,
        reader: RangeReader,
        files: Sequence[str],
        options: LoadOptions,
    ) -> SharedRead:
        """Return this rank's side, which `close` ends; `carrier` makes what reaches other hosts, if any."""
        link = None
        if HostLink.available():
            with suppress(OSError):  # a sandbox may refuse it, and alone a rank reads what it needs, too
                link = HostLink(group.rank)
        return cls(group, None if carrier is None else carrier(), reader, files, link, options)

    def offer(self) -> messages.Offer:
        """Return what this rank would read alone, and by which ways it can be reached."""
        return messages.Offer(
            host=(self.link and _host()) or secrets.token_hex(8),
            link="" if self.link is None else self.link.address,
            carries=self.carrier is not None,
            cell=self.reader.cell_nbytes,
            verify=self.options.verify,
            read_rate=self._read_rate() if self.options.share == "auto" else 0.0,
            files=list(self.files),
            columns=[messages.packed(column, "i8") for column in self._reads()],
        )

    def run(self, share: messages.SharePlan, recorder: Recorder, timeout_s: float) -> int:
        """Read together with the others, as the root decided; return the bytes that came from them.

        Raises `StoppedError` when another rank gave up, which then says why.
        """
        part = FetchTable(*(messages.unpacked(c, "i8") for c in share.columns))
        rows: list[list[int]] = [[] for _ in part.number]
        private: list[int] = []
        for number, row in enumerate(fetch_of(self._reads(), part).tolist()):
            (rows[row] if row >= 0 else private).append(number)
        sharing = Sharing(
            part,
            share.num_turns,
            rows,
            [self.files[file] for file in part.file.tolist()],
            share.peers,
            self.reader.cell_nbytes,
            max(min(_MOST_SLOTS, self.options.inflight_nbytes // self.reader.cell_nbytes // 4), 1),
        )
        exchange = Exchange(
            self.group.rank,
            sharing,
            self.reader,
            self.reader.jobs(private),
            self.link,
            self.carrier if share.num_turns else None,
            lambda: self.group.broken,
            timeout_s,
        )
        # One thread may wait for storage, while another copies what others have read.
        try:
            threads = max(2, num_threads(self.options.threads))
            exchange.run(threads, self.reader.cell_nbytes, self.options.inflight_nbytes)
        finally:
            self.reader.record(recorder)
        return exchange.nbytes_received

    def close(self) -> None:
        """Let nobody connect any more."""
        if self.link is not None:
            self.link.close()

    def _reads(self) -> Reads:
        """Return the reads that others may want as well."""
        plan = self.reader.plan
        # What combs read are runs far apart: hardly anybody else's, and many.
        return Reads(plan.read_file, plan.read_start, plan.read_nbytes)

    def _read_rate(self) -> float:
        """Measure how fast this rank reads while the others do the same, in bytes per second."""
        plan = self.reader.plan
        if int(plan.read_nbytes.sum()) < WORTH_NBYTES:
            return 0.0
        # A large read, for a small one tells of what each call costs, and not the first, which may be cached.
        largest = np.flatnonzero(plan.read_nbytes == plan.read_nbytes.max())
        read = largest[len(largest) // 2]
        # One block is enough, and hardly counts among the bytes that are read.
        nbytes = min(int(plan.read_nbytes[read]), self.reader.block_nbytes)
        memory, reading = np.ones(nbytes, np.uint8), Stopwatch()
        path, start = self.files[plan.read_file[read]], int(plan.read_start[read])

        def fetch() -> None:
            with reading.lap():  # without the time that the thread takes to start
                self.reader.fetch(path, start, memory)

        within(self.options.timeout_s, self.reader.under_way, fetch)
        return len(memory) / max(reading.seconds, 1e-9)


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
            [messages.packed(column, "i8") for column in columns],
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
    file, start, nbytes = (messages.unpacked(column, "i8") for column in offer.columns)
    file = files[file]
    order = np.lexsort((start, file))
    return Reads(file[order], start[order], nbytes[order])


def _host() -> str | None:
    """Return what ranks have in common that can share memory: kernel, network namespace and user."""
    if (name := host_name()) is not None:
        return name
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}-{os.geteuid()}"
    except OSError:  # a system without /proc, or with one that is closed: who else is here cannot be told
        return None
