"""Page-aligned host memory that is the image of a range of a file."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Arena:
    """`nbytes` bytes of anonymous, page-aligned memory; pages are touched once and then reused."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def view(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes."""
        return self.bytes[:nbytes]
