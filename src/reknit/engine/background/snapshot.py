"""Copy live memory to an arena, at once or while training continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.memory.arena import lay_out
from reknit.engine.memory.staging import Staging, changes
from reknit.engine.memory.workers import run_jobs
from reknit.environment import num_threads
from reknit.errors import StateError
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena import Arena, Span
    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.memory.file_image import Image
    from reknit.options import SaveOptions
    from reknit.types.shard import Shard

SMALL_NBYTES = 64 << 10
"""Shards up to this size are copied at once, also lazily: what a forward pass changes is among them."""

_SCRATCH_NBYTES = 4096


class Snapshot:
    """The files of one save on their way from live memory to an arena.

    `sources` are the `bits` of the `shards`, from which the `images` are filled.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        sources: list[Any],
        images: Sequence[Image],
        lease: Lease,
        save: TrainerSave,
        options: SaveOptions,
    ) -> None:
        self._memory = lease.arena.bytes
        self._save = save
        self._options = options
        self.spans = lay_out([image.nbytes for image in images], lease.nbytes)
        self.streamed = any(span.after >= 0 for span in self.spans)
        self._images, self._sources = images, sources
        self._staging = Staging(self._sources)
        self._on_host = all(isinstance(source, np.ndarray) for source in self._sources)
        self._shards = shards
        self._watched: list[tuple[Shard, Any, int]] = []

    def take(self) -> None:
        """Copy everything; when this returns the live memory may be changed."""
        if not self._on_host:
            self._queue()
        self.settle()

    def prepare(self) -> None:
        """Copy what is small, and begin to copy the rest; `settle` finishes that.

        Where torch counts the changes of a tensor they are watched.  That is an alarm and no proof: fused
        optimizers and changes through a DTensor are not counted.
        """
        for number, shard in enumerate(self._shards):
            if shard.nbytes <= SMALL_NBYTES:
                source = self._sources[number]
                self._sources[number] = source.copy() if isinstance(source, np.ndarray) else source.clone()
            elif (version := changes(data := shard.data)) is not None:
                self._watched.append((shard, data, version))
        if not self._on_host:
            self._queue()

    def settle(self) -> None:
        """Finish what was begun, in whatever thread.

        Raises `StateError` when a tensor was changed before its copy was made.
        """
        if not self.spans:
            return  # a replica that owns nothing
        if self._on_host:
            self.copy_on_host()
        else:
            self._staging.wait()
            for number in () if self.streamed else range(len(self.spans) - 1):
                self._save.tell_filled(number)
        changed = [full_name(s.item, s.fqn) for s, data, version in self._watched if changes(data) != version]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise StateError(
                f"{changed[0]}{more} was changed while it was staged lazily; nothing was committed",
                phase="stage",
                remedy="call reknit.fence(optimizer) once, or pending.staged() before the state is changed",
            )
        self._save.tell_filled(len(self.spans) - 1)

    def copy_on_host(self) -> None:
        """Copy everything, and tell the agent of all but the last span, which completes the save."""
        last = len(self.spans) - 1

        def work(number: int, _: Arena) -> None:
            self._copy(number)
            self._save.tell_filled(number)

        run_jobs(
            range(last),
            work,
            threads=num_threads(self._options.threads),
            arena_nbytes=_SCRATCH_NBYTES,
            budget_nbytes=self._options.inflight_nbytes,
        )
        self._copy(last)

    def _queue(self) -> None:
        """Queue all copies from devices, to go on beside what the devices do; a ring waits for each."""
        try:
            for number in range(len(self.spans)):
                self._copy(number)
                if self.streamed and number < len(self.spans) - 1:
                    self._staging.wait()
                    self._save.tell_filled(number)
        except BaseException:
            self._staging.wait()  # the arena is somebody else's next
            raise

    def _copy(self, number: int) -> None:
        """Copy one span, as soon as its place is free."""
        span: Span = self.spans[number]
        if span.after >= 0:
            self._save.wait_freed(span.after, self._options.timeout_s)
        out = self._memory[span.at : span.at + span.nbytes]
        self._images[span.file].fill(span.start, out, self._staging.add)
