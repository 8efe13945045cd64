"""Replace damaged or unreadable blocks by the same blocks of another copy of the checkpoint."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from reknit.engine.record.file_checks import check_size
from reknit.engine.record.other_formats import of_others
from reknit.errors import CorruptError, DeadlineError, ReknitError, StorageError
from reknit.format.checksum import digest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

UNREADABLE = (StorageError, DeadlineError)
"""The errors of a store that cannot return the requested bytes."""


class Repairer:
    """Finds good copies of blocks in the replicas of a checkpoint, in their order; thread-safe.

    `nbytes` counts the bytes read from replicas.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._replicas = checkpoint.replicas
        self._lock = threading.Lock()
        self._repaired: set[str] = set()
        """Files of which a replica had a good block."""
        self.nbytes = 0
        self._unsound: dict[str, str] = {}
        """The faults in the sizes of files by path, empty for a right size."""

    @property
    def able(self) -> bool:
        """Return whether there are replicas at all."""
        return bool(self._replicas)

    def require_sound(self, path: str) -> None:
        """Raise `StorageError` for a file of another size than it was saved with, if there are replicas.

        Its bytes may then have moved, so that each block has to be compared with its digest.
        """
        if not self.able:
            return
        with self._lock:
            known = self._unsound.get(path)
        if known is None:
            try:
                check_size(self._checkpoint.source, self._checkpoint.files[path])
                known = ""
            except (CorruptError, StorageError) as error:
                known = error.message
            with self._lock:
                self._unsound[path] = known
        if known:
            raise StorageError(known)

    def reread(self, path: str, block: int, error: ReknitError) -> NDArray[np.uint8]:
        """Return the saved bytes of a block of a failed read; the block may be intact, and another damaged.

        Raises `error` as `replaced` does.
        """
        data, fault = self._read(self._checkpoint.source, path, block)
        return self.replaced(path, block, error) if fault else data

    def replaced(self, path: str, block: int, error: ReknitError) -> NDArray[np.uint8]:
        """Return the saved bytes of a block, from a replica.

        If no replica has them, raises `error`, which names the tried replicas.
        """
        tried = []
        for replica in self._replicas:
            data, fault = self._read(replica, path, block)
            if not fault:
                self._note(path, replica, error)
                return data
            tried.append(f"{replica.url} ({fault}){of_others(replica)}")
        error.message += f"; no replica has them: {', '.join(tried)}"
        raise error

    def _read(self, storage: Storage, path: str, block: int) -> tuple[NDArray[np.uint8], str]:
        """Read a block and return its error, if any."""
        file, block_nbytes = self._checkpoint.files[path], self._checkpoint.manifest.block_nbytes
        start = block * block_nbytes
        data = np.empty(min(block_nbytes, file.nbytes - start), np.uint8)
        try:
            storage.read_into(path, start, [data.data])
        except UNREADABLE as error:
            return data, error.message
        with self._lock:
            self.nbytes += len(data)
        return data, "" if digest(data) == file.digests[block] else "damaged as well"

    def _note(self, path: str, replica: Storage, error: ReknitError) -> None:
        """Log the first block of a file that comes from a replica."""
        with self._lock:
            first = path not in self._repaired
            self._repaired.add(path)
        if first:
            logger.warning(
                "%s: taken from the replica %s, as may be more of this file", error.message, replica.url
            )
