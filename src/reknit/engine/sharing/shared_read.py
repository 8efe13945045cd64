"""One rank's side of a shared read: its offer to the root, and its part in the root's decision."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from reknit.engine import round_messages
from reknit.engine.memory.workers import within
from reknit.engine.packed_columns import packed, unpacked
from reknit.engine.sharing.exchange import Exchange, Sharing
from reknit.engine.sharing.host_exchange import largest
from reknit.engine.sharing.host_link import HostLink
from reknit.environment import host_name, num_threads
from reknit.monitor.phase import Stopwatch
from reknit.planner.sharing import WORTH_NBYTES, FetchTable, Reads, fetch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.engine.sharing.exchange import PlanReader
    from reknit.engine.sharing.host_exchange import Carrier
    from reknit.monitor.phase import Recorder
    from reknit.options import LoadOptions

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

    def offer(self) -> round_messages.Offer:
        """Return the ranges that this rank would read alone, and its address for other ranks."""
        return round_messages.Offer(
            host=(self.link and host_id()) or secrets.token_hex(8),
            link="" if self.link is None else self.link.address,
            carries=None if self.carrier is None else self.carrier.kind,
            cell=self.reader.cell_nbytes,
            verify=self.options.verify,
            read_rate=self._read_rate() if self.options.share == "auto" else 0.0,
            files=list(self.files),
            columns=[packed(column, "i8") for column in self._reads()],
        )

    def reserve(self, share: round_messages.SharePlan) -> None:
        """Take the memory that exchanges with other hosts need, while no rank waits for this one in them.

        Raises `ShortageError` where a device does not have it.
        """
        if self.carrier is not None and share.num_turns:
            sizes = largest(self.group.rank, _part(share), share.num_steps)
            self.carrier.reserve(sizes.sent, sizes.received)

    def run(self, share: round_messages.SharePlan, recorder: Recorder, timeout_s: float) -> int:
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
            with reading.lap():  # without the time that the thread takes to start
                self.reader.fetch(path, start, memory)

        within(self.options.timeout_s, self.reader.under_way, fetch)
        return len(memory) / max(reading.seconds, 1e-9)


def _part(share: round_messages.SharePlan) -> FetchTable:
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
