"""The files of a save in an arena: which spans are filled, and which are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine.memory.arena import SPAN_NBYTES, lay_out

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.background import messages as say
    from reknit.processes.shared_memory import SharedMemory


class ArenaImage:
    """The files of a save in an arena, and what of them is still to be filled, and to be written."""

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
        """Return bytes of the arena that are those from `start` on of the span's file."""
        low = self._spans[span].at + start - self._spans[span].start
        return self._arena.bytes[low : low + nbytes]
