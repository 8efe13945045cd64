"""Checksums of stored bytes (docs/decisions/0002), limits of files read whole, and format versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from reknit.errors import VersionError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Bytes = Buffer | NDArray[Any]
    """Contiguous memory of any element type."""


MAX_INDEX_NBYTES = 1 << 30
"""The index, with the table of files in it."""

MAX_BLOBS_NBYTES = (1 << 32) - 1
"""A file of values, which is also the longest single value that msgpack holds."""


FORMAT_VERSION = 1
"""The version that is written."""

OLDEST_READABLE = 1
"""Versions from this one up to `FORMAT_VERSION` are read, for ever."""

FILE_TABLE = "file_table"
"""The manifest lists the index only, and the index lists all other files."""

MOVED = "moved"
"""All files but the manifest are at another place, which the manifest names."""

TOMBSTONE = "tombstone"
"""There is no checkpoint: the file only keeps a late commit from making one."""

FEATURES = frozenset({FILE_TABLE, MOVED})
"""Names in ``requires`` of a manifest: features that a reader must support to read the checkpoint."""


def check_version(version: int, requires: Iterable[str] = ()) -> None:
    """Raise `VersionError` when this reknit cannot read a checkpoint of `version` that needs `requires`."""
    if not OLDEST_READABLE <= version <= FORMAT_VERSION:
        raise VersionError(
            f"the checkpoint has format version {version}; "
            f"this reknit reads {OLDEST_READABLE} to {FORMAT_VERSION}",
            remedy="install a newer reknit: every later one reads every earlier version",
        )
    unknown = sorted(set(requires) - FEATURES)
    if unknown:
        raise VersionError(
            f"the checkpoint needs features that this reknit does not support: {', '.join(unknown)}",
            remedy="install the reknit that wrote it, or a newer one",
        )


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
