"""Copy live memory to an arena, at once or while training continues."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit.engine.memory.arena import lay_out
from reknit.engine.memory.elements import stage
from reknit.engine.memory.staging import BounceBuffers, Staging
from reknit.engine.memory.workers import run_jobs
from reknit.environment import num_threads
from reknit.errors import StateError
from reknit.types.devices import is_queued

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.engine.background.trainer.deferred import Deferred
    from reknit.engine.background.trainer.trainer_save import TrainerSave
    from reknit.engine.memory.arena import Arena, Span
    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.memory.file_image import Copy, Image
    from reknit.options import SaveOptions

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
        self.spans = lay_out([image.nbytes for image in images], lease.nbytes)
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
