"""Copies of live memory in an arena, made at once or, where memory stays unchanged, during training."""

from __future__ import annotations

import logging
from bisect import bisect_right
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from reknit.engine.memory.devices import BounceBuffers, Staging, changes, copied_later
from reknit.engine.memory.elements import Range, Sample, stage
from reknit.engine.memory.images import Sources
from reknit.engine.memory.workers import arena_spans, run_jobs
from reknit.environment import num_threads
from reknit.errors import StateError, shortage
from reknit.types.devices import device_of, is_queued, memory_of
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.memory.images import Copy, EntryRow, Image
    from reknit.engine.memory.workers import Arena, Span
    from reknit.options import SaveOptions
    from reknit.types.devices import Barrier
    from reknit.types.shard import Holdings, Shard


logger = logging.getLogger("reknit")

SMALL_NBYTES = 64 << 10
"""Up to this size entries are copied before save returns: watching them would take as long."""

_CLONES_NBYTES = 64 << 20
"""Device memory per process that copies of such entries may take."""


class Deferred:
    """The part of a save whose memory changes only after a thread has reached a barrier.

    The images are split into three lists.  The entries of `now` may change at any time.  Devices can copy the
    entries of `queued` on their own, and a thread of the host can copy the entries of `later`.  Barriers are
    not trusted: changes show in the versions that torch counts, and in a sample of the bytes.
    """

    def __init__(self, holdings: Holdings, images: Sequence[Image]) -> None:
        barriers = [barrier for barrier in holdings.barriers if barrier.stands()]
        try:
            self._divide(holdings, images, barriers, _CLONES_NBYTES)
        except RuntimeError as error:
            if shortage(error) is None:
                raise
            # A sample needs memory of the device; copies to the host need none.
            logger.info("a lazy save copies all of its tensors before it returns: %s", error)
            self._divide(holdings, images, (), 0)

    def _divide(
        self, holdings: Holdings, images: Sequence[Image], barriers: Iterable[Barrier], room: int
    ) -> None:
        guard = _Guard(barriers)
        self._watched: list[tuple[Shard, Barrier, int | None]] = []
        ranges: list[Range] = []
        sources, clones = images[0].sources if images else Sources(()), dict[int, Any]()
        runs = sources.addresses.tolist()

        def group_of(entry: EntryRow) -> str:
            nonlocal room
            run = runs[entry.shard]
            if run and entry.nbytes <= SMALL_NBYTES:
                return "now"
            source = sources[entry.shard]
            barrier = guard.before(source, entry, run)
            if barrier is None and run:
                return "now"
            if barrier is None:
                if is_queued(source) and source.nbytes <= min(SMALL_NBYTES, room):
                    room -= source.nbytes
                    clones[entry.shard] = source.clone()  # faster than waiting for the device
                    return "queued"
                if device_of(source) is not None and not is_queued(source):
                    _log_at_once(source.device.type)
                return "now"
            shard = holdings.shards[entry.shard]
            self._watched.append((shard, barrier, changes(shard.data)))
            ranges.append(Range(source, entry.first, entry.numel))
            return "later" if run or not is_queued(source) else "queued"

        groups = [np.array([group_of(entry) for entry in image.entries.rows()]) for image in images]
        sources = sources.instead(clones)
        self.now, self.queued, self.later = (
            [
                structs.replace(image, sources=sources, entries=image.entries.select(group == name))
                for image, group in zip(images, groups, strict=True)
            ]
            for name in ("now", "queued", "later")
        )
        self._sample = Sample(ranges)

    def __len__(self) -> int:
        return len(self._watched)

    def hold(self, wait: Callable[[], object]) -> None:
        """Block threads that reach the barriers until `wait` returns."""
        for barrier in {barrier for _, barrier, _ in self._watched}:
            barrier.hold(wait)

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since; their barriers are not used again."""
        counted = {n for n, (shard, _, count) in enumerate(self._watched) if changes(shard.data) != count}
        found = [self._watched[n] for n in sorted(counted.union(self._sample.changed()))]
        for _, barrier, _ in found:
            barrier.distrust()
        return list(dict.fromkeys(full_name(shard.item, shard.fqn) for shard, _, _ in found))


@cache
def _log_at_once(device_type: str) -> None:
    logger.info(
        "torch has no streams for %s: its tensors are copied before save returns, also with "
        "SaveOptions(stage='lazy')",
        device_type,
    )


class _Guard:
    """Finds the barrier that guards some memory."""

    def __init__(self, barriers: Iterable[Barrier]) -> None:
        self._ranges: dict[Any, list[tuple[int, int, Barrier]]] = {}
        for barrier in barriers:
            for memory, start, nbytes in barrier.memory():
                self._ranges.setdefault(memory, []).append((start, nbytes, barrier))
        for ranges in self._ranges.values():
            ranges.sort(key=itemgetter(0, 1))

    def before(self, source: Any, entry: EntryRow, run: int) -> Barrier | None:
        """Return the barrier that guards all bytes of an entry, or None if they must be copied now.

        `run` is the address of a source that is one run of host memory, else 0.
        """
        if not self._ranges or entry.nbytes <= SMALL_NBYTES or not (run or copied_later(source)):
            return None
        memory, first_byte = ("cpu", run) if run else memory_of(source)
        start = first_byte + entry.first * (entry.nbytes // entry.numel)
        ranges = self._ranges.get(memory, [])
        number = bisect_right(ranges, start, key=itemgetter(0)) - 1
        if number < 0:
            return None
        first, nbytes, barrier = ranges[number]
        return barrier if start + entry.nbytes <= first + nbytes else None


_SCRATCH_NBYTES = 4096


class Snapshot:
    """The files of one save on their way from live memory to an arena.

    `save` receives the number of each filled span, and is None before there is an agent.
    """

    def __init__(
        self, images: Sequence[Image], lease: Lease, save: TrainerSave | None, options: SaveOptions
    ) -> None:
        self._lease, self._memory = lease, lease.arena.bytes
        self._save = save
        self._options = options
        self._images = images
        self.spans = arena_spans([image.nbytes for image in images], lease.nbytes)
        self.streamed = any(span.after >= 0 for span in self.spans)

    def take(self) -> None:
        """Copy all spans; when this returns, the live memory may change."""
        if self.spans:  # a replica that owns no bytes has no spans
            self._copy_all(self._images, self._staging(), report=True)
            self._complete()

    def report_taken(self) -> None:
        """Replace the headers of `take` by headers of the same size, and report all spans."""
        for number, span in enumerate(self.spans):
            image = self._images[span.file]
            header_nbytes = min(len(image.header) - span.start, span.nbytes)
            if header_nbytes > 0:
                image.fill(span.start, self._memory[span.at : span.at + header_nbytes])
            self._report(number)

    def begin(self, deferred: Deferred) -> Staging:
        """Copy the memory that may change at any time; `settle` copies the deferred memory later."""
        assert self._save is not None
        deferred.hold(self._save.pending.wait_staged)
        staging = self._staging()
        self._copy_all(deferred.now, staging, report=False)
        return staging

    def settle(self, deferred: Deferred, staging: Staging) -> None:
        """Copy the deferred memory; call it in any thread, since copies to unpinned memory may take long.

        Raises `StateError` when memory was changed before its copy was made.
        """
        self._queue(deferred.queued, staging)
        self._wait(staging)
        self.copy_on_host(deferred.later, report=True)
        if changed := deferred.changed():
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise StateError(
                f"{changed[0]}{more} was changed while it was staged lazily, and not by a step of its "
                "optimizer; nothing was committed",
                phase="stage",
                remedy="call pending.staged() before such a change, or save with "
                "SaveOptions(stage='eager'); the next saves copy the tensors of this optimizer before they "
                "return",
            )
        self._complete()

    def copy_on_host(self, images: Sequence[Image], *, report: bool) -> None:
        """Copy images whose memory is on the host; `report` all spans but the last to the agent."""
        last = len(self.spans) - 1

        def work(number: int, _: Arena) -> None:
            self._copy(number, images)
            if report:
                self._report(number)

        run_jobs(
            range(last),
            work,
            threads=min(num_threads(self._options.threads), last),
            arena_nbytes=_SCRATCH_NBYTES,
            budget_nbytes=self._options.inflight_nbytes,
        )
        self._copy(last, images)

    def _copy_all(self, images: Sequence[Image], staging: Staging, *, report: bool) -> None:
        """Copy images, and wait for the copies."""
        if all(image.sources.on_host(image.entries.shard) for image in images):
            self.copy_on_host(images, report=report)
            return
        self._queue(images, staging)
        self._wait(staging)
        for number in range(len(self.spans) - 1) if report and not self.streamed else ():
            self._report(number)

    def _staging(self) -> Staging:
        """Return the staging from devices, whose copies wait for the work queued so far."""
        sources = self._images[0].sources.on_devices
        device = next((source.device for source in sources if is_queued(source)), None)
        by_way = None
        if not self._lease.pin(sources) and device is not None:
            by_way = BounceBuffers.pinned(self._lease.nbytes, device, self._options.timeout_s)
        return Staging(sources, by_way)

    def _queue(self, images: Sequence[Image], staging: Staging) -> None:
        """Queue all copies from devices, beside their other work; with a ring, wait for each copy."""
        with self._kept_from_others(staging):
            for number in range(len(self.spans)):
                self._copy(number, images, staging.add)
                if self.streamed and number < len(self.spans) - 1:
                    self._wait(staging)
                    self._report(number)

    def _wait(self, staging: Staging) -> None:
        """Wait for all queued copies."""
        with self._kept_from_others(staging):
            staging.wait(self._options.timeout_s)

    @contextmanager
    def _kept_from_others(self, staging: Staging) -> Iterator[None]:
        """Withhold the arena after an error in the block, while a device may still write to it."""
        try:
            yield
        except BaseException:
            self._lease.under_way = staging.under_way
            raise

    def _copy(self, number: int, images: Sequence[Image], copy: Copy = stage) -> None:
        """Copy the part of the images in one span, once its place is free."""
        span: Span = self.spans[number]
        if span.after >= 0:
            assert self._save is not None
            self._save.wait_freed(span.after, self._options.timeout_s)
        images[span.file].fill(span.start, self._memory[span.at : span.at + span.nbytes], copy)

    def _complete(self) -> None:
        """Report the last span, now that the whole state is staged unchanged."""
        self._report(len(self.spans) - 1)

    def _report(self, number: int) -> None:
        if self._save is not None:
            self._save.report_filled(number)
