"""Write one file of a folder with several threads, until it is complete, past the page cache.

Direct I/O: large writes go from page-aligned memory to the disk, past the page cache.

A checkpoint is written once and seldom read soon: through the page cache, it would cost the machine a copy,
and other programs their pages.  Reads use the page cache, because the kernel's read-ahead beats direct reads
of a few megabytes.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from reknit.errors import StorageError
from reknit.storage.base import removed
from reknit.storage.local.files import Descriptor, identity, pwrite_all
from reknit.storage.local.folders import unlink_below
from reknit.storage.local.os_errors import translated
from reknit.storage.ranges import check_inside
from reknit.system import aside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.storage.local.folders import Folders


PAGE = 4096
LARGE_NBYTES = 1 << 20
"""Smaller writes are left to the page cache."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class DirectFile:
    """Direct writes to a file that is open as `fd`, from the first write that can use them.

    Only pages that one write fills are written directly.  So no page is written in both ways at once, for
    which the kernel has no guarantee.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._descriptor: Descriptor | None = None
        self._usable = bool(_DIRECT)
        self._lock = threading.Lock()

    def pwrite(self, start: int, data: memoryview) -> int:
        """Write directly as much of the beginning of `data` as possible, and return the number of bytes.

        That is all whole pages if `start` and the memory are page-aligned, and otherwise nothing.  Nor are
        there direct writes if the file system has refused one.
        """
        whole = data.nbytes // PAGE * PAGE
        if whole < LARGE_NBYTES or start % PAGE or np.frombuffer(data, np.uint8).ctypes.data % PAGE:
            return 0
        descriptor = self._acquire()
        if descriptor is None:
            return 0
        done = 0
        try:
            # Where a write ends within a page, that page is the first that takes the ordinary way, whole.
            while done < whole and (step := os.pwrite(descriptor.fd, data[done:whole], start + done)):
                done += step
                if step % PAGE:
                    break
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            self._usable = False
        finally:
            descriptor.release()
        return done // PAGE * PAGE

    def close(self) -> None:
        """Close the file once no thread writes; later writes are ordinary writes.  Raises `OSError`."""
        with self._lock:
            self._usable = False
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            descriptor.retire()

    def _acquire(self) -> Descriptor | None:
        with self._lock:
            if not self._usable:
                return None
            if self._descriptor is None:
                try:
                    fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | _DIRECT)
                    self._descriptor = Descriptor(aside(fd))
                except OSError:
                    # No direct writes, no /proc, no descriptor left: the ordinary way needs none of them.
                    self._usable = False
                    return None
            self._descriptor.acquire()
            return self._descriptor


def start_write_back(fd: int, start: int, nbytes: int) -> None:
    """Let the disk begin with bytes that went through the page cache, if they are many.

    Else the kernel would keep them until the sync at the end, and the disk would be idle until then.  This is
    only advice, and a failed write shows at the sync.
    """
    if nbytes >= LARGE_NBYTES and hasattr(os, "posix_fadvise"):
        # On Linux, pages that leave the cache are first written back, and no thread waits for that.
        with suppress(OSError):
            os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


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
