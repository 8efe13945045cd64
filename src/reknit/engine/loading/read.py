"""Reads of byte ranges: into the target if possible, verified, and repaired from another copy."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.loading.deliver import Deliverer, ReadSpan, put, spans_of
from reknit.engine.memory.devices import Transfer
from reknit.engine.memory.workers import Gate, run_jobs
from reknit.engine.stored.file_checks import check_size, corrupt_block, of_others
from reknit.environment import num_threads
from reknit.errors import (
    CorruptError,
    DeadlineError,
    ReknitError,
    StorageError,
    StorageNotFoundError,
    UsageError,
)
from reknit.events.phase import Stopwatch
from reknit.format.checksum import digest
from reknit.options import LoadOptions
from reknit.planner.load import Granularity, plan_load
from reknit.storage.base import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from reknit.engine.memory.workers import Arena
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.events.phase import Recorder
    from reknit.storage.base import Storage
    from reknit.types.box import Box
    from reknit.types.shard import LoadPlan


logger = logging.getLogger("reknit")

UNREADABLE = (StorageError, DeadlineError)
"""The errors of a store that cannot return the requested bytes."""


class Repairer:
    """Finds good copies of blocks in the replicas of a checkpoint, in their order; thread-safe.

    `nbytes` counts the bytes read from replicas.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._replicas = checkpoint.replicas
        self._lock = threading.Lock()
        self._repaired: set[str] = set()
        """Files of which a replica had a good block."""
        self.nbytes = 0
        self._unsound: dict[str, str] = {}
        """The faults in the sizes of files by path, empty for a right size."""

    @property
    def able(self) -> bool:
        """Return whether there are replicas at all."""
        return bool(self._replicas)

    def require_sound(self, path: str) -> None:
        """Raise `StorageError` for a file of another size than it was saved with, if there are replicas.

        Its bytes may then have moved, so that each block has to be compared with its digest.
        """
        if not self.able:
            return
        with self._lock:
            known = self._unsound.get(path)
        if known is None:
            try:
                check_size(self._checkpoint.source, self._checkpoint.files[path])
                known = ""
            except (CorruptError, StorageError) as error:
                known = error.message
            with self._lock:
                self._unsound[path] = known
        if known:
            raise StorageError(known)

    def reread(self, path: str, block: int, error: ReknitError) -> NDArray[np.uint8]:
        """Return the saved bytes of a block of a failed read; the block may be intact, and another damaged.

        Raises `error` as `replaced` does.
        """
        data, fault = self._read(self._checkpoint.source, path, block)
        return self.replaced(path, block, error) if fault else data

    def replaced(self, path: str, block: int, error: ReknitError) -> NDArray[np.uint8]:
        """Return the saved bytes of a block, from a replica.

        If no replica has them, raises `error`, which names the tried replicas.
        """
        tried = []
        for replica in self._replicas:
            data, fault = self._read(replica, path, block)
            if not fault:
                self._note(path, replica, error)
                return data
            tried.append(f"{replica.url} ({fault}){of_others(replica)}")
        error.message += f"; no replica has them: {', '.join(tried)}"
        raise error

    def _read(self, storage: Storage, path: str, block: int) -> tuple[NDArray[np.uint8], str]:
        """Read a block and return its error, if any."""
        file, block_nbytes = self._checkpoint.files[path], self._checkpoint.manifest.block_nbytes
        start = block * block_nbytes
        data = np.empty(min(block_nbytes, file.nbytes - start), np.uint8)
        try:
            storage.read_into(path, start, [data.data])
        except UNREADABLE as error:
            return data, error.message
        with self._lock:
            self.nbytes += len(data)
        return data, "" if digest(data) == file.digests[block] else "damaged as well"

    def _note(self, path: str, replica: Storage, error: ReknitError) -> None:
        """Log the first block of a file that comes from a replica."""
        with self._lock:
            first = path not in self._repaired
            self._repaired.add(path)
        if first:
            logger.warning(
                "%s: taken from the replica %s, as may be more of this file", error.message, replica.url
            )


LOCAL_DISK = Reading()

_MOST_NAMES = 5
"""Tensors that an error names."""


def granularity(options: LoadOptions, block_nbytes: int, reading: Reading = LOCAL_DISK) -> Granularity:
    """Return the cuts of reads: at digest blocks if these are verified, else as the storage prefers."""
    size = max(reading.piece_nbytes // block_nbytes, 1) * block_nbytes
    if options.verify != "off":
        return Granularity(block_nbytes, 0, size)
    gap = reading.gap_nbytes if options.gap_nbytes is None else options.gap_nbytes
    return Granularity(1, gap, size, reading.waste)


def plan_reads(checkpoint: OpenCheckpoint, boxes: Sequence[tuple[int, Box]]) -> LoadPlan:
    """Return the reads for boxes of tensors, given by number, with the usual options from a local disk."""
    cut = granularity(LoadOptions(), checkpoint.manifest.block_nbytes)
    sizes = [checkpoint.files[path].nbytes for path in checkpoint.index.files]
    return plan_load(checkpoint.index, boxes, sizes, cut)


def read_boxes(
    opened: OpenCheckpoint, boxes: Sequence[tuple[int, Box, Any]], options: LoadOptions, recorder: Recorder
) -> None:
    """Fill arrays with boxes of tensors, given by number.  Raises `CorruptError`, `StorageError`."""
    opened.read(lambda _: RangeReader(opened, boxes, options).run(recorder))


class RangeReader:
    """Fills boxes of tensors from a checkpoint; every method may run in many threads at once.

    `boxes` are the number of a tensor in the index, a box of it, and the live array to fill; `cast` holds the
    positions in `boxes` of converted boxes.  `moved` is called with the bytes of each finished read of the
    plan, whichever rank read it.  `cut` decides the cuts of reads; by default the options and storage decide.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        boxes: Sequence[tuple[int, Box, Any]],
        options: LoadOptions,
        *,
        cast: frozenset[int] = frozenset(),
        moved: Callable[[int], None] = lambda _: None,
        cut: Granularity | None = None,
    ) -> None:
        index = checkpoint.index
        if checkpoint.manifest.other is not None:
            options = replace(options, verify="off")
        self.options = options
        """The options, without verification for the files of other programs, which have no digests."""
        self.block_nbytes = checkpoint.manifest.block_nbytes
        """Size of a digest block: a verified read begins and ends with one, or with the file."""
        cut = cut or granularity(options, self.block_nbytes, checkpoint.source.reading)
        self.cell_nbytes = cut.nbytes
        """The largest size of a read of the plan, which does not cross a multiple of it."""
        sizes = [checkpoint.files[path].nbytes for path in index.files]
        self.plan = plan_load(index, [(tensor, box) for tensor, box, _ in boxes], sizes, cut)
        self.checkpoint, self._moved = checkpoint, moved
        self._deliverer = Deliverer(index, self.plan, boxes, cast)
        self.transfer = Transfer(self._deliverer.on_devices, "what is loaded", options.timeout_s)
        """The copies to devices: the other methods are called within this context."""
        # A worker reads into one buffer while a device copies from the other, if there is room for two.
        wide = self.transfer.is_needed and options.inflight_nbytes >= 2 * self.cell_nbytes
        self._num_buffers = 2 if wide else 1
        self.arena_nbytes = self.cell_nbytes * self._num_buffers
        """Size of an arena in which a worker can carry out any read of the plan."""
        self._repairer = Repairer(checkpoint)
        self._clocks = {name: Stopwatch() for name in ("read", "verify", "deliver")}
        self._gate = Gate()
        self._lock = threading.Lock()
        self._nbytes_read = 0
        self._under_way: dict[int, str] = {}
        self.touched = 0
        """Number of reads that may have changed bytes of a target."""

    def jobs(self, reads: Iterable[int]) -> Sequence[int]:
        """Return the numbers of some reads of the plan and of all strided reads, which no other rank can use.

        `read` takes each, with an arena of `arenas` that has at least `arena_nbytes`.
        """
        first = len(self.plan.read_file)
        return [*reads, *range(first, first + len(self.plan.strided.piece))]

    def arenas(self, nbytes: int) -> AbstractContextManager[Arena]:
        """Lend a worker an arena of `arena_nbytes`, or a smaller arena in proportion to smaller reads."""
        return self.transfer.arenas(nbytes, self._num_buffers)

    @property
    def nbytes_read(self) -> int:
        """Bytes that have left storage so far, replicas included."""
        return self._nbytes_read + self._repairer.nbytes

    def run(self, recorder: Recorder, timeout_s: float | None = None) -> None:
        """Carry out all reads of the plan, and `record` them.

        After an error targets may be partly written.  After `timeout_s` a `DeadlineError` names the files
        that are being read; then only reads straight into a target may still arrive.
        """
        plan = self.plan
        largest = int(max(n.max(initial=1) for n in (plan.read_nbytes, plan.strided.nbytes)))
        try:
            with self.transfer:
                try:
                    run_jobs(
                        self.jobs(range(len(plan.read_file))),
                        self.read,
                        threads=num_threads(self.options.threads),
                        arena_nbytes=largest * self._num_buffers,
                        budget_nbytes=self.options.inflight_nbytes,
                        arenas=self.arenas,
                        timeout_s=timeout_s,
                        what=self.under_way,
                    )
                except BaseException:
                    self.abandon()
                    raise
        except ReknitError as error:
            error.sign(phase="read")
            raise
        finally:
            self.record(recorder)

    def read(self, number: int, arena: Arena) -> None:
        """Read, verify and deliver one of `jobs`.  The arena holds at least as many bytes as the read."""
        if number >= len(self.plan.read_file):
            self._read_strided(number - len(self.plan.read_file), arena)
            return
        path, start, nbytes = self._place(number)
        scratch = arena.view(nbytes)
        pieces = self._deliverer.pieces(number)
        spans, indirect = spans_of(pieces, start, scratch)
        self._fill(path, start, spans, live=len(indirect) < len(pieces))
        with self._delivering(path, start, nbytes, arena):
            self._deliverer.deliver(indirect, start, scratch)
        self._moved(nbytes)

    def fetch(self, path: str, start: int, buffer: NDArray[np.uint8]) -> None:
        """Fill `buffer` with whole digest blocks of a file from `start` on, verified unless that is off."""
        self._fill(path, start, [ReadSpan(start, buffer)])

    def wrong(self, path: str, start: int, data: NDArray[np.uint8]) -> list[tuple[int, int]]:
        """Return the ranges of a file's bytes, from `start` on, whose digests are wrong; none unverified."""
        if self.options.verify == "off":
            return []
        with self._clocks["verify"].timed(len(data)):
            blocks = self._damaged(path, start, [ReadSpan(start, data)])
        end, size = start + len(data), self.block_nbytes
        return [(block * size, min((block + 1) * size, end)) for block in blocks]

    def deliver(self, number: int, start: int, data: NDArray[np.uint8], arena: Arena) -> None:
        """Copy the boxes of read `number` from `data`, which has the file's bytes from `start` on.

        `data` covers the read; it is not verified.  The arena is as for `read`.
        """
        path, first, nbytes = self._place(number)
        data = data[first - start : first - start + nbytes]
        if self.transfer.is_needed:
            # Devices copy from pinned memory, so that `data` is free without a wait for them.
            data, given = arena.view(nbytes), data
            np.copyto(data, given)
        with self._delivering(path, first, nbytes, arena):
            self._deliverer.deliver(self._deliverer.pieces(number), first, data)
        self._moved(nbytes)

    def abandon(self) -> None:
        """Give up: bytes that are still being read are not delivered, unless straight into a target."""
        self._gate.close()

    def under_way(self) -> str:
        """Name the files that are being read at this moment, for an error."""
        with self._lock:
            files = sorted(set(self._under_way.values()))
        return f"reading {', '.join(files) or 'files'} of {self.checkpoint.storage.url}"

    def record(self, recorder: Recorder) -> None:
        """Record the phases read, verify and deliver, each with its time in all threads and its bytes."""
        for name, clock in self._clocks.items():
            recorder.add(name, clock.started, clock.seconds, clock.nbytes)

    def _place(self, number: int) -> tuple[str, int, int]:
        """Return the path, start and size of a read."""
        plan = self.plan
        path = self.checkpoint.index.files[plan.read_file[number]]
        return path, int(plan.read_start[number]), int(plan.read_nbytes[number])

    def _read_strided(self, number: int, arena: Arena) -> None:
        """Read the runs of a strided read into the target, or into scratch memory to deliver them."""
        strided, files = self.plan.strided, self.checkpoint.index.files
        path, run = files[strided.file[number]], int(strided.run_nbytes[number])
        starts, direct = self._deliverer.run_starts(number), self._deliverer.direct_runs(number)
        buffer = arena.view(len(starts) * run) if direct is None else direct
        try:
            self._repairer.require_sound(path)
            with self._reading(path, len(buffer), live=direct is not None):
                self.checkpoint.source.read_runs(path, starts, run, buffer.data)
        except UNREADABLE as error:
            if not self._repairer.able:
                raise
            self._reread_strided(number, path, error)
        else:
            if direct is None:
                with self._delivering(path, int(strided.start[number]), int(strided.nbytes[number]), arena):
                    self._deliverer.deliver_runs(number, buffer)
        self._moved(len(buffer))

    def _fill(self, path: str, start: int, spans: Sequence[ReadSpan], *, live: bool = False) -> None:
        """Read the bytes of a file from `start` on into `spans`, also of targets if `live`; verify them."""
        nbytes = sum(len(span.buffer) for span in spans)
        try:
            self._repairer.require_sound(path)
            with self._reading(path, nbytes, live=live):
                self.checkpoint.source.read_into(path, start, [span.buffer.data for span in spans])
        except UNREADABLE as error:
            if not self._repairer.able:
                raise
            self._reread(path, start, spans, error)
            return
        if self.options.verify == "off":
            return
        with self._clocks["verify"].timed(nbytes), self._signed("verify", path):
            for block in self._damaged(path, start, spans):
                damage = self._corrupt(path, block)
                if not self._repairer.able:
                    raise damage
                self._put(path, block, self._repairer.replaced(path, block, damage), spans)

    @contextmanager
    def _reading(self, path: str, nbytes: int, *, live: bool) -> Iterator[None]:
        """Time and count a call of the storage; raise an error after it if the load was abandoned."""
        thread = threading.get_ident()
        with self._lock:
            self._under_way[thread] = path
            self.touched += live
        try:
            with self._clocks["read"].timed(nbytes), self._signed("read", path):
                yield
        except StorageNotFoundError:  # the target is as it was
            with self._lock:
                self.touched -= live
            raise
        finally:
            with self._lock:
                del self._under_way[thread]
            self._gate.check()
        with self._lock:
            self._nbytes_read += nbytes

    @contextmanager
    def _signed(self, phase: str, path: str) -> Iterator[None]:
        """Add the place to errors that pass."""
        try:
            yield
        except ReknitError as error:
            error.sign(phase=phase, path=f"{self.checkpoint.storage.url}/{path}")
            raise

    def _reread(self, path: str, start: int, spans: Sequence[ReadSpan], error: ReknitError) -> None:
        """Fill spans block by block, from replicas where necessary, since reading them at once failed."""
        self._gate.check()
        stop = spans[-1].start + len(spans[-1].buffer)
        for block in range(start // self.block_nbytes, -(-stop // self.block_nbytes)):
            self._put(path, block, self._repairer.reread(path, block, error), spans)

    def _reread_strided(self, number: int, path: str, error: ReknitError) -> None:
        """Deliver a strided read from the blocks around it, since reading its runs failed."""
        strided = self.plan.strided
        start, data = int(strided.start[number]), np.empty(int(strided.nbytes[number]), np.uint8)
        self._reread(path, start, [ReadSpan(start, data)], error)
        with self._delivering(path, start, len(data)):
            self._deliverer.deliver_strided(number, start, data)

    def _put(self, path: str, block: int, data: NDArray[np.uint8], spans: Sequence[ReadSpan]) -> None:
        """Copy the parts of a block into its spans."""
        self.touched += 1
        with self._gate.passing():
            put(data, block * self.block_nbytes, spans)

    def _damaged(self, path: str, start: int, spans: Sequence[ReadSpan]) -> list[int]:
        """Return the blocks with a wrong digest; spans begin and end at blocks, or the end of the file."""
        file = self.checkpoint.files[path]
        block_nbytes = self.block_nbytes
        stop = spans[-1].start + len(spans[-1].buffer) if spans else start
        if start % block_nbytes or (stop % block_nbytes and stop != file.nbytes):
            raise UsageError(f"bytes {start}:{stop} of {path} are not whole blocks, and cannot be verified")
        parts: dict[int, list[NDArray[np.uint8]]] = {}
        for begin, buffer in spans:
            position = 0
            while position < len(buffer):
                block = (begin + position) // block_nbytes
                end = min(len(buffer), (block + 1) * block_nbytes - begin)
                parts.setdefault(block, []).append(buffer[position:end])
                position = end
        # The last block first: it was read last, so its bytes are still in the processor's cache.
        return sorted(
            block
            for block, buffers in reversed(parts.items())
            if digest(*(buffer.data for buffer in buffers)) != file.digests[block]
        )

    @contextmanager
    def _delivering(self, path: str, start: int, nbytes: int, arena: Arena | None = None) -> Iterator[None]:
        """Deliver bytes of a file from `start` on, which are in an arena of `arenas` or stay elsewhere."""

        def name() -> str:
            return ", ".join(self._names(path, start, start + nbytes)[:_MOST_NAMES]) or path

        self.touched += 1
        with (
            self._clocks["deliver"].timed(),
            self._signed("deliver", path),
            self._gate.passing(),
            self.transfer.copying(arena, name),
        ):
            yield

    def _names(self, path: str, low: int, high: int) -> list[str]:
        """Return the names of tensors in bytes `low` up to `high` of a file."""
        files = self.checkpoint.index.files
        names = self._deliverer.names(files.index(path), low, high) if path in files else []
        return [self.checkpoint.shown(name) for name in names]

    def _corrupt(self, path: str, block: int) -> CorruptError:
        """Return the error of a block whose digest is wrong."""
        low = block * self.block_nbytes
        names = self._names(path, low, low + self.block_nbytes)
        return corrupt_block(self.checkpoint.files[path], block, self.block_nbytes, names)
