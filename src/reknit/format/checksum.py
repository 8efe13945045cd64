"""Are these the bytes that were written?  One xxh3-64 digest per block (docs/decisions/0002)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from reknit.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Bytes = Buffer | NDArray[Any]
    """Contiguous memory of any element type."""

BLOCK_NBYTES = 4 << 20
"""Bytes per block in every checkpoint that is written; a reader takes the number from the manifest."""


def digest(*buffers: Bytes) -> int:
    """Return the xxh3-64 of the buffers laid end to end, without copying them.

    A buffer is contiguous and of any element type.  The GIL is released while a large one is digested.
    """
    pieces: tuple[Any, ...] = buffers
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def num_blocks(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """Return how many blocks a file of `nbytes` bytes has; the last may be shorter, an empty file has 0."""
    return -(-nbytes // block_nbytes)


def block_digests(data: Bytes, block_nbytes: int = BLOCK_NBYTES) -> list[int]:
    """Return the digests of all blocks of a whole file."""
    digester = BlockDigester(block_nbytes)
    digester.update(data)
    return digester.finish()


def check_block(expected: int, *buffers: Bytes, path: str, block: int) -> None:
    """Raise `CorruptError` when the buffers, laid end to end, are not block `block` of the file `path`."""
    found = digest(*buffers)
    if found != expected:
        raise CorruptError(
            f"block {block} of {path} is damaged: digest {found:016x}, the manifest says {expected:016x}",
            remedy="load another checkpoint, or restore this file from a copy",
            path=path,
        )


class BlockDigester:
    """Digests a file's blocks while its bytes pass by in order, in pieces of any size."""

    def __init__(self, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._block_nbytes = block_nbytes
        self._digests: list[int] = []
        self._state = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: Bytes) -> None:
        """Take the next bytes (contiguous, of any element type)."""
        view = _as_bytes(data)
        start = 0
        while start < view.nbytes:
            piece = view[start : start + self._block_nbytes - self._filled]
            if piece.nbytes == self._block_nbytes:
                self._digests.append(digest(piece))
            else:
                self._add_partial(piece)
            start += piece.nbytes

    def finish(self) -> list[int]:
        """Return the digests of all blocks, the last and perhaps shorter one included."""
        if self._filled:
            self._close_block()
        return list(self._digests)

    def _add_partial(self, piece: memoryview) -> None:
        self._state.update(piece)
        self._filled += piece.nbytes
        if self._filled == self._block_nbytes:
            self._close_block()

    def _close_block(self) -> None:
        self._digests.append(self._state.intdigest())
        self._state.reset()
        self._filled = 0


def _as_bytes(data: Bytes) -> memoryview:
    buffer: Any = data
    view = memoryview(buffer)
    # memoryview.cast refuses shapes with a zero in them
    return view.cast("B") if view.nbytes else memoryview(b"")
