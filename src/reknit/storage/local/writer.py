"""Write one file of a folder with several threads, until it is complete."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.errors import StorageError
from reknit.storage.errors import removed
from reknit.storage.local.descriptors import Descriptor
from reknit.storage.local.direct import DirectFile, start_write_back
from reknit.storage.local.nofollow import unlink_below
from reknit.storage.local.os_errors import translated
from reknit.storage.local.posix import identity, pwrite_all
from reknit.storage.ranges import check_inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.storage.local.folders import Folders


class LocalWriter:
    """A file that is being written to a folder."""

    def __init__(self, root: str, path: str, fd: int, nbytes: int, folders: Folders) -> None:
        self._root, self._below = root, path
        self._path = os.path.join(root, path)
        self._nbytes = nbytes
        self._folders = folders
        self._entry = folders.note_entry()
        self._descriptor = Descriptor(fd)
        self._direct = DirectFile(fd)
        self._identity = identity(fd)
        self._written = 0
        self._whole = False
        self._lock = threading.Lock()

    def write(self, start: int, data: memoryview) -> None:
        """Write all of `data` at byte `start`; no lock is held meanwhile."""
        data = data.cast("B")
        check_inside(start, data.nbytes, self._nbytes, self._path)
        with self._using("write"):
            # Without a sync at the end the page cache is quicker; with it, the way past the cache is.
            done = self._direct.pwrite(start, data) if self._folders.durable else 0
            pwrite_all(self._descriptor.fd, start + done, data[done:])
            if self._folders.durable:
                start_write_back(self._descriptor.fd, start + done, data.nbytes - done)
            with self._lock:
                self._written += data.nbytes

    def finish(self) -> None:
        """Make the file whole and durable.  After a failure it can only be aborted.

        A failed `fsync` is never repeated: the kernel may have dropped the pages that it could not write, and
        would report success the second time.
        """
        with self._using("finish"):
            self._descriptor.retire()
            self._direct.close()
            self._check_whole()
            if self._folders.durable:
                os.fsync(self._descriptor.fd)
        # Closed by now; on NFS it is the close that reports a failed write.
        with translated("finish", self._path):
            self._folders.sync(os.path.dirname(self._path), self._entry)
        self._whole = True

    def abort(self) -> None:
        """Remove the file, unless it is finished; may be repeated."""
        if self._whole:
            return
        # Nothing is lost when a store that is failing keeps an unfinished file: no manifest will name it.
        # The descriptor goes last: an inode that is still open cannot belong to somebody else's new file.
        ours, self._identity = self._identity, None
        with suppress(OSError):
            if ours is not None and identity(self._path) == ours:
                unlink_below(self._root, self._below)
        for opened in (self._direct.close, self._descriptor.retire):
            with suppress(OSError):
                opened()
        self._folders.prune(self._root, self._below)

    @contextmanager
    def _using(self, action: str) -> Iterator[None]:
        if not self._descriptor.acquire():
            raise StorageError(f"cannot {action} {self._path}: it is finished or aborted", path=self._path)
        with translated(action, self._path):
            try:
                yield
            finally:
                self._descriptor.release()

    def _check_whole(self) -> None:
        if identity(self._path) != self._identity:
            self._identity = None  # another file of this name is not this writer's to remove
            raise removed(self._path)
        if self._descriptor.users > 1:
            fault = "another thread is still writing"
        elif self._written != self._nbytes or os.fstat(self._descriptor.fd).st_size != self._nbytes:
            fault = f"{self._written} of {self._nbytes} bytes were written"
        else:
            return
        raise StorageError(f"cannot finish {self._path}: {fault}", path=self._path)
