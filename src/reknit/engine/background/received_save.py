"""The state of a save in an agent, while it is received from the trainer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from reknit.engine.background import agent_messages as say
from reknit.engine.memory.arena import SPAN_NBYTES, lay_out
from reknit.errors import typed
from reknit.monitor.phase import now

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.memory.arena import Arena
    from reknit.engine.saving.save_job import SaveJob
    from reknit.errors import ReknitError
    from reknit.processes.channel import Channel
    from reknit.processes.shared_memory import SharedMemory


class ArenaImage:
    """The files of a save in an arena, with the spans that are still to be filled, and to be written."""

    def __init__(self, planned: say.Planned, arena: SharedMemory) -> None:
        self.planned = planned
        self._arena = arena
        self._spans = lay_out([nbytes for _, _, nbytes in planned.files], planned.ring)
        self._number = {(span.file, span.start): k for k, span in enumerate(self._spans)}
        self.is_ring = any(span.after >= 0 for span in self._spans)
        self.to_fill = set(range(len(self._spans)))
        self.to_write = [span.nbytes for span in self._spans]

    def span(self, file: int, start: int) -> int:
        """Return the number of the span that holds byte `start` of a file."""
        return self._number[file, start // SPAN_NBYTES * SPAN_NBYTES]

    def view(self, span: int, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the bytes in the arena of the span's file from `start` on."""
        low = self._spans[span].at + start - self._spans[span].start
        return self._arena.bytes[low : low + nbytes]


class ReceivedSave:
    """A save, shared by the thread that receives from the trainer and the threads that write and commit.

    Once `error` is set, threads no longer wait for the trainer, and all ranks receive the error in the next
    round.
    """

    def __init__(self, begin: say.Begin, job: SaveJob, channel: Channel) -> None:
        self.begin, self.job = begin, job
        self.number = begin.number
        self.since = now()
        self.error: ReknitError | None = None
        self.image: ArenaImage | None = None
        self._channel = channel
        self._changed = threading.Condition()
        self._staged = False

    @property
    def url(self) -> str:
        """The URL of the checkpoint."""
        return self.begin.url

    @property
    def staged(self) -> bool:
        """Whether the save no longer needs the trainer."""
        with self._changed:
            return self._staged

    def plan(self, planned: say.Planned, arena: SharedMemory) -> None:
        """Take the files of the save, and the arena that will hold them."""
        with self._changed:
            self.image = ArenaImage(planned, arena)
            self._staged = not self.image.to_fill
            self._changed.notify_all()

    def fill(self, span: int) -> None:
        """Record that a span holds its bytes."""
        with self._changed:
            if self.image is not None:
                self.image.to_fill.discard(span)
                self._staged = not self.image.to_fill
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Fail the save, unless it has failed, and wake the threads that wait for the trainer."""
        with self._changed:
            self.error = self.error or typed(error)
            self._changed.notify_all()

    def fetch(self, file: int, start: int, nbytes: int, _: Arena) -> NDArray[np.uint8]:
        """Return a piece of a file from the arena, as soon as the trainer has filled it."""
        image = self.image
        assert image is not None
        span = image.span(file, start)
        with self._changed:
            self._changed.wait_for(lambda: span not in image.to_fill or self.error is not None)
            if self.error is not None:
                raise self.error
        return image.view(span, start, nbytes)

    def free(self, file: int, start: int, nbytes: int) -> None:
        """Report a span to the trainer when all of it is written, so that its place can be filled again."""
        image = self.image
        assert image is not None
        span = image.span(file, start)
        with self._changed:
            image.to_write[span] -= nbytes
            free = image.to_write[span] == 0
        if free:
            self._channel.try_send(say.Freed(self.number, span))
