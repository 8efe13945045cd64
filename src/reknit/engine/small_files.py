"""Write files that are whole in memory, and delete those of a save that failed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from reknit.engine.memory.workers import run_jobs
from reknit.errors import ReknitError
from reknit.format.checksum import block_digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.storage.base import Storage


class Written(NamedTuple):
    """A file that storage has, and the digests of its blocks."""

    path: str
    nbytes: int
    digests: NDArray[np.uint64]


def write_bytes(storage: Storage, path: str, data: bytes, *, keep: bool = False) -> Written:
    """Write one file that is whole in memory; an error leaves it behind only if `keep`, and finished."""
    writer = storage.create(path, len(data))
    try:
        writer.write(0, memoryview(data))
        writer.finish()
    except BaseException:
        writer.abort()
        if not keep:
            discard(storage, path)  # finished perhaps, and only the answer was lost
        raise
    return Written(path, len(data), np.array(block_digests(data), np.uint64))


def write_small(
    storage: Storage, files: Sequence[tuple[str, bytes]], written: list[Written], *, threads: int
) -> None:
    """Write files that are whole in memory, `threads` at once, and add them to `written`, in their order.

    After an error `written` has the files that are in storage.
    """
    done: dict[int, Written] = {}

    def write(number: int, _: object = None) -> None:
        path, data = files[number]
        try:
            done[number] = write_bytes(storage, path, data)
        except ReknitError as error:
            error.sign(path=f"{storage.url}/{path}")
            raise

    try:
        if (threads := min(threads, len(files))) > 1:
            run_jobs(range(len(files)), write, threads=threads, arena_nbytes=1, budget_nbytes=threads)
        else:
            for number in range(len(files)):
                write(number)
    finally:
        written += [done[number] for number in sorted(done)]


def discard(storage: Storage, path: str) -> None:
    """Delete a file of a save that failed; where even that fails, the next save to this path does it."""
    with suppress(ReknitError):
        storage.delete(path)
