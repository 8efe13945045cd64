"""Checksums of stored bytes: one xxh3-64 digest per block (docs/decisions/0002)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

if TYPE_CHECKING:
    import numpy as np
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


Nbytes = TypeVar("Nbytes", int, "NDArray[np.int64]")


def num_blocks(nbytes: Nbytes, block_nbytes: int = BLOCK_NBYTES) -> Nbytes:
    """Return the number of blocks of a file of `nbytes` bytes: 0 if empty; the last block may be shorter."""
    return -(-nbytes // block_nbytes)


def block_digests(data: Bytes, block_nbytes: int = BLOCK_NBYTES) -> list[int]:
    """Return the digests of all blocks of a whole file (contiguous, of any element type)."""
    buffer: Any = data
    view = memoryview(buffer)
    if not view.nbytes:
        return []  # memoryview.cast refuses shapes with a zero in them
    view = view.cast("B")
    return [digest(view[start : start + block_nbytes]) for start in range(0, view.nbytes, block_nbytes)]
