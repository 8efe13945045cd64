"""Find which ranks share a host: each rank puts its host into a store, rank 0 publishes the table.

Stores keep their values, and a job that was started again may find values of a dead run.  So rank 0 gives
each run a new name, and all other keys of the run begin with it.  A rank that reads the name of an old run
notices it in one of two ways.  The table of that run exists already, though this rank has not come yet; or
the name changes while the rank waits.  Then the rank begins again.
"""

from __future__ import annotations

import logging
import secrets
import struct
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from reknit.comm.group import Topology, doubling
from reknit.comm.meeting import rendezvous
from reknit.comm.meeting.rendezvous import (
    HostTable,
    RankEntry,
    Shape,
    base,
    decoded,
    error_to_wire,
    garbled,
    host_key,
)
from reknit.comm.round_errors import ALL_CALL, GRACE_S, NOTICE_S
from reknit.errors import CommError, DeadlineError, ProtocolError, UsageError, from_wire
from reknit.events.phase import Deadline, now
from reknit.types.small import spelled

if TYPE_CHECKING:
    from reknit.comm.meeting.rendezvous import Store
    from reknit.options import CommOptions

_log = logging.getLogger("reknit.comm")

_SLICES_S = (0.25, 4.0)
"""The first and the longest wait for other ranks before a look at whether the run has been replaced."""

_PAUSES_S = (0.02, 1.0)

_SPEAKERS = 8
"""So many ranks log that rank 0 does not come: there may be thousands, with the same message."""

_LONGEST_HOST = 1024

_STARTED = (
    "check that all ranks were started, with the same size, and meet under the same name in the same place"
)


def gather_shape(
    store: Store, rank: int, size: int, *, job: str, options: CommOptions, timeout_s: float
) -> Shape:
    """Return the shape of the group of `size` ranks that meet under the name `job`, once all have come.

    Raises `DeadlineError`, on every rank that came, which names the ranks that did not come within
    `timeout_s`.  Raises `ProtocolError` if ranks expect different groups, `CommError` if the store fails.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank must be within 0 .. size - 1, not {rank} of {size}")
    gathering = _Gathering(store, job, size, timeout_s)
    return gathering.lead(options) if rank == 0 else gathering.join(rank, options)


class _Gathering:
    """One rank's part in the exchange of hosts through a store."""

    def __init__(self, store: Store, job: str, size: int, timeout_s: float) -> None:
        self._store, self._job, self._size = store, job, size
        self._base = base(job)
        self._run_key = f"{self._base}/run"
        self._deadline, self._notice = Deadline(timeout_s), Deadline(NOTICE_S)
        self._here = msgspec.msgpack.encode(
            RankEntry(rendezvous.host(), size, rendezvous.reach(), rendezvous.process())
        )

    # Rank 0.

    def lead(self, options: CommOptions) -> Shape:
        """Begin a run, and return its shape once all ranks have come; publish the shape, or the error."""
        run, before = secrets.token_hex(16), self._last_generation()
        if (forget := getattr(self._store, "forget", None)) is not None:
            forget(f"{self._base}/")
        self._store.set(self._run_key, run.encode())
        try:
            self._store.set(host_key(self._job, run, 0), self._here)
            here = self._entries(run)
            numbers, together = _host_numbers(here)
            if self._current_run() != run:
                raise self._replaced()
            generation = options.generation
            if generation is None:  # higher than that of the run before, though a clock was set back since
                generation = max(int(now() * 1000), before + 1)
            packed = zlib.compress(struct.pack(f"<{len(numbers)}i", *numbers))
            table = HostTable(self._size, options.fan_out, generation, packed, together=together)
            self._store.set(self._table_key(run), msgspec.msgpack.encode(table))
        except BaseException as error:  # Ctrl-C too: the ranks that came must not wait
            with suppress(CommError):  # of a store that is gone; they find out by themselves
                table = HostTable(error=error_to_wire(error))
                self._store.set(self._table_key(run), msgspec.msgpack.encode(table))
            raise
        tree = Topology(numbers, options.fan_out)
        processes = {child: here[child].process for child in _local_children(tree, 0)}
        return Shape(run, tree, generation, together, processes)

    def _last_generation(self) -> int:
        """Return the generation of the last run in the store, -1 without one."""
        with suppress(ProtocolError):  # of an earlier version, perhaps
            run = self._current_run()
            if run is not None and (table := self._found(self._table_key(run))) is not None:
                return decoded(table, HostTable).generation
        return -1

    def _entries(self, run: str) -> list[RankEntry]:
        """Return the entries of all ranks, once all are there.  Raises `ProtocolError` if sizes differ."""
        keys = [host_key(self._job, run, rank) for rank in range(1, self._size)]
        here = [decoded(value, RankEntry) for value in (self._here, *self._gathered(keys, run))]
        wrong = [rank for rank, theirs in enumerate(here) if theirs.size != self._size]
        if wrong:
            raise ProtocolError(
                f"rank {wrong[0]} joins job {self._job!r} with size {here[wrong[0]].size}, rank 0 with size "
                f"{self._size}" + (f"; so do {len(wrong) - 1} more" if len(wrong) > 1 else ""),
                remedy="start every rank with the same size",
            )
        return here

    def _gathered(self, keys: list[str], run: str) -> list[bytes]:
        """Return the values of all keys.  Raises `DeadlineError`, which names the missing ranks."""
        noticed = False
        for slice_s in doubling(*_SLICES_S):
            until_notice_s = slice_s if noticed else self._notice.remaining()
            try:
                return self._get_many(keys, min(slice_s, until_notice_s, self._deadline.remaining()))
            except DeadlineError as error:
                if self._current_run() != run:
                    raise self._replaced() from error
                if self._deadline.passed():
                    raise self._incomplete(keys) from error
                if not noticed and self._notice.passed():
                    noticed = True
                    self._note_absence(0, spelled(self._missing(keys)[0]))
        raise AssertionError("the pauses have no end")

    def _get_many(self, keys: list[str], timeout_s: float) -> list[bytes]:
        many = getattr(self._store, "get_many", None)
        if many is not None and keys:
            values: list[bytes] = many(keys, timeout_s)
            return values
        deadline = Deadline(timeout_s)
        return [self._store.get(key, deadline.remaining()) for key in keys]

    def _note_absence(self, rank: int, absent: str) -> None:
        """Log, long before the deadline, the ranks that this rank waits for."""
        _log.warning(
            "rank %d has waited %g s for %s at the rendezvous of job %r: %s",
            *(rank, NOTICE_S, absent, self._job, ALL_CALL),
        )

    def _missing(self, keys: list[str]) -> tuple[list[int], int]:
        """Return the ranks that have published nothing, and how many ranks there was time to look at."""
        looking, missing, seen = Deadline(GRACE_S), [], 0
        for rank, key in enumerate(keys, start=1):
            if looking.passed():
                break
            seen += 1
            if self._found(key) is None:
                missing.append(rank)
        return missing, seen

    def _incomplete(self, keys: list[str]) -> DeadlineError:
        missing, seen = self._missing(keys)
        rest = (
            f" (of ranks 0-{seen}; the deadline passed before the others were checked)"
            if seen < len(keys)
            else ""
        )
        remedy = ALL_CALL if len(missing) == self._size - 1 else _STARTED
        return DeadlineError(
            f"{spelled(missing) if missing else 'some ranks'} did not come to the rendezvous of job "
            f"{self._job!r} within {self._deadline.seconds:g} s{rest}",
            remedy=remedy,
        )

    def _replaced(self) -> CommError:
        return CommError(
            f"another process has taken the place of rank 0 in the rendezvous of job {self._job!r}",
            remedy="let a job end before you restart it, and give concurrent jobs different names",
        )

    # All others.

    def join(self, rank: int, options: CommOptions) -> Shape:
        """Publish this rank's entry, and return the shape from rank 0; begin again after an old run."""
        old: str | None = None
        why_old = ""
        while True:
            run = self._newer_run(rank, old, why_old)
            if (table := self._found(self._table_key(run))) is not None:
                old, why_old = run, self._why_over(table, rank)
                continue
            self._store.set(host_key(self._job, run, rank), self._here)
            value = self._table(run)
            if value is not None and self._current_run() == run:
                shape = self._shape(decoded(value, HostTable), run, rank, options)
                return shape._replace(processes=self._processes(shape, rank))

    def _processes(self, shape: Shape, rank: int) -> dict[int, str]:
        """Return the processes of the ranks below this one on its host."""
        children = _local_children(shape.topology, rank)
        try:
            values = self._get_many([host_key(self._job, shape.run, child) for child in children], GRACE_S)
        except CommError:
            return {}  # then the end of such a process is noticed later
        return {
            child: decoded(value, RankEntry).process for child, value in zip(children, values, strict=True)
        }

    def _why_over(self, value: bytes, rank: int) -> str:
        """Return the reason why a late rank is not part of a run, as far as the table has it."""
        try:
            table = decoded(value, HostTable)
        except ProtocolError:
            return ""  # of an earlier version, perhaps; it is over in any case
        if table.error is not None:
            return f", which ended with: {from_wire(table.error).message}"
        if table.size != self._size:
            return f"; it has {table.size} ranks, and this one joins as rank {rank} of {self._size}"
        return ""

    def _newer_run(self, rank: int, old: str | None, why_old: str) -> str:
        """Return the name of a run that is not `old`, once rank 0 begins one."""
        pauses, silent = doubling(*_PAUSES_S), rank >= _SPEAKERS
        while True:
            wait_s = self._deadline.remaining()
            if not silent:
                wait_s = min(wait_s, self._notice.remaining())
            run = old
            try:
                run = self._store.get(self._run_key, wait_s).decode(errors="replace")
            except DeadlineError as error:
                if self._deadline.passed():
                    raise self._late("rank 0 did not come to") from error
            if run is not None and run != old:
                return run
            if not silent and self._notice.passed():
                silent = True
                self._note_absence(rank, "rank 0")
            if self._deadline.passed():
                left = f": it has only entries of an earlier run{why_old}"
                raise self._late("rank 0 did not come to", left)
            time.sleep(min(next(pauses), self._deadline.remaining()))

    def _table(self, run: str) -> bytes | None:
        """Return the table of a run, None if another run has replaced it."""
        patience = Deadline(self._deadline.remaining() + GRACE_S)  # for rank 0 to name the missing ranks
        for slice_s in doubling(*_SLICES_S):
            with suppress(DeadlineError):
                return self._store.get(self._table_key(run), min(slice_s, patience.remaining()))
            if self._current_run() != run:
                return None
            if patience.passed():
                raise self._late("rank 0 did not publish the members of")
        raise AssertionError("the pauses have no end")

    def _shape(self, table: HostTable, run: str, rank: int, options: CommOptions) -> Shape:
        """Return the shape in a table.  Raises the error in it, or `ProtocolError`."""
        if table.error is not None:
            raise from_wire(table.error)
        if table.size != self._size:
            raise ProtocolError(
                f"rank {rank} joins job {self._job!r} with size {self._size}, rank 0 with size {table.size}",
                remedy="start every rank with the same size",
            )
        if options.generation not in (None, table.generation):
            raise ProtocolError(
                f"rank {rank} is of generation {options.generation}, rank 0 of {table.generation}",
                remedy="give every rank of a run the same CommOptions.generation",
            )
        unpacker = zlib.decompressobj()
        try:
            packed = unpacker.decompress(table.hosts, 4 * table.size + 1)
            hosts = [number for (number,) in struct.iter_unpack("<i", packed)]
        except (zlib.error, struct.error) as error:
            raise garbled() from error
        if len(hosts) != table.size or table.fan_out < 1:
            raise garbled()
        return Shape(run, Topology(hosts, table.fan_out), table.generation, table.together)

    def _late(self, what: str, why: str = "") -> DeadlineError:
        return DeadlineError(
            f"{what} the rendezvous of job {self._job!r} within {self._deadline.seconds:g} s{why}",
            remedy=_STARTED,
        )

    # Keys of the store.

    def _table_key(self, run: str) -> str:
        return f"{self._base}/{run}/shape"

    def _current_run(self) -> str | None:
        """Return the name of the run that the store holds now."""
        value = self._found(self._run_key)
        return None if value is None else value.decode(errors="replace")

    def _found(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, 0)
        except DeadlineError:
            return None


def _host_numbers(here: list[RankEntry]) -> tuple[list[int], bool]:
    """Return the number of each rank's host, by first appearance, and whether all can share a socket."""
    numbers: dict[str, int] = {}
    hosts = [numbers.setdefault(entry.host[:_LONGEST_HOST], len(numbers)) for entry in here]
    reaches = {entry.reach for entry in here}
    return hosts, len(numbers) == len(reaches) == 1 and "" not in reaches


def _local_children(tree: Topology, rank: int) -> list[int]:
    return [child for child in tree.children(rank) if tree.hosts[child] == tree.hosts[rank]]
