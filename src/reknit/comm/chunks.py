"""Split a message into a stream of chunks, so that only reknit's own size limit applies."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from reknit.errors import CommError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CHUNK_NBYTES = 1 << 20
"""The largest chunk."""

_TOTAL = struct.Struct("<Q")

FIRST_NBYTES = CHUNK_NBYTES - _TOTAL.size
"""The largest message that is a single chunk."""


def divided(message: bytes) -> Iterator[bytes]:
    """Yield the chunks of a message, at least one; the first begins with the size of the message."""
    view, end = memoryview(message), FIRST_NBYTES
    yield _TOTAL.pack(len(view)) + view[:end]
    while end < len(view):
        yield bytes(view[end : end + CHUNK_NBYTES])
        end += CHUNK_NBYTES


def joined(chunks: Iterable[bytes], max_nbytes: int) -> bytes:
    """Return the message that was divided into `chunks`.

    Raises `CommError` for one larger than `max_nbytes`, before any of it is collected, and `ProtocolError`
    for a stream that is cut off or too long.  Errors of the stream itself pass through.
    """
    stream = iter(chunks)
    first = next(stream, b"")
    if len(first) < _TOTAL.size:
        raise ProtocolError("a message is empty")
    (total,) = _TOTAL.unpack_from(first)
    if total > max_nbytes:
        raise CommError(
            f"a message of {total} bytes is larger than this rank's limit of {max_nbytes}",
            remedy="give every rank the same CommOptions.max_message_nbytes",
        )
    found, nbytes = [memoryview(first)[_TOTAL.size :]], len(first) - _TOTAL.size
    for chunk in stream:
        nbytes += len(chunk)
        if nbytes > total or not chunk:
            break
        found.append(memoryview(chunk))
    if nbytes != total:
        raise ProtocolError(
            f"a message of {total} bytes came with {nbytes}: truncated, or mixed up with another"
        )
    return b"".join(found)
