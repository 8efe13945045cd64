"""Large values of a file, built piece by piece while the memory of the file goes back to the system."""

from __future__ import annotations

import codecs
import io
import mmap
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE_NBYTES = 1 << 20
_PIECE_NBYTES = 4 << 20
ARRAY, BYTEARRAY, TAGGED = 7, 24, 25
"""Extensions whose bytes are built as an array of bytes, and as a `bytearray`; the last one on request."""


def file_memory(nbytes: int) -> bytearray | mmap.mmap:
    """Return new memory for a file that is decoded once.

    On Linux, `decode_blobs` gives the pages of a large file back to the system while it reads them.
    """
    if nbytes < LARGE_NBYTES or not sys.platform.startswith("linux"):
        return bytearray(nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class LargeValues:
    """Builds large values out of the bytes of a file, each from the bytes after those of the one before."""

    writable = False
    """Whether the binaries of tagged values are a `bytearray`, which an array can have as its memory."""

    def __init__(self, data: bytes | mmap.mmap | memoryview) -> None:
        self._data = data
        self._given = 0

    def binary(self, start: int, nbytes: int, code: int) -> Any:
        """Return a binary, in the form in which the extension `code` builds its value from it."""
        pieces = self._pieces(start, nbytes)
        if code == ARRAY:
            array, place = np.empty(nbytes, np.uint8), 0
            for piece in pieces:
                array[place : place + len(piece)] = np.frombuffer(piece, np.uint8)
                place += len(piece)
            return array
        if code == BYTEARRAY or (self.writable and code == TAGGED):
            grown = bytearray()
            for piece in pieces:
                grown += piece
            return grown
        # This grows where it is, and gives its memory away as the result.
        buffer = io.BytesIO()
        for piece in pieces:
            buffer.write(piece)
        return buffer.getvalue()

    def text(self, start: int, nbytes: int) -> str:
        """Return a text.  Raises `UnicodeDecodeError`."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = ""
        for piece in self._pieces(start, nbytes):
            text += decoder.decode(piece)  # grows where it is
        return text + decoder.decode(b"", final=True)

    def give_back(self, stop: int) -> None:
        """Give back the memory of all bytes before `stop`, if that is enough to be worth a call."""
        if stop - self._given >= _PIECE_NBYTES and isinstance(self._data, mmap.mmap):
            stop -= stop % mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, self._given, stop - self._given)
            self._given = stop

    def _pieces(self, start: int, nbytes: int) -> Iterator[memoryview]:
        view, stop = memoryview(self._data), start + nbytes
        for place in range(start, stop, _PIECE_NBYTES):
            yield view[place : min(place + _PIECE_NBYTES, stop)]
            self.give_back(min(place + _PIECE_NBYTES, stop))
