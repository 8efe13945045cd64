"""Shared file descriptors: closed once, and never while a thread uses them."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit.storage.local.nofollow import open_regular
from reknit.storage.local.posix import expect_sequence, identity

if TYPE_CHECKING:
    from collections.abc import Iterator


class Descriptor:
    """An open descriptor.  After `retire` it accepts no new users, and the last user closes it.

    Closing at once would be worse than an error.  The kernel gives the same number to the next opened file,
    and a thread that is still in `pwrite` would write into that file.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0
        """Number of users at this moment."""
        self._retired = False
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Become a user; false when the descriptor is retired."""
        with self._lock:
            if self._retired:
                return False
            self.users += 1
            return True

    def release(self) -> None:
        """Stop being a user."""
        with self._lock:
            self.users -= 1
            last = self._retired and self.users == 0
        if last:
            os.close(self.fd)

    def retire(self) -> None:
        """Close the descriptor once it has no users.  Raises `OSError` when closing fails."""
        with self._lock:
            last = not self._retired and self.users == 0
            self._retired = True
        if last:
            os.close(self.fd)


class ReadCache:
    """The most recently read files of a store, kept open so that many ranged reads open each file once.

    A path may later name another file than the opened file: it was replaced, or removed and written anew,
    perhaps by another machine.  So each use compares the two: a `stat` instead of an `open`.  The comparison
    is exact, because an open file's inode is not given to another file.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        # A store that was not closed leaves no open files behind: some programs can have at most 1024.
        weakref.finalize(self, _retire_all, self._open).atexit = False

    @contextmanager
    def reading(self, root: str, path: str) -> Iterator[int]:
        """Yield a descriptor of the file that is now at `path` below a root.  Raises `OSError`."""
        full = os.path.join(root, path)
        descriptor = self._acquire(root, path, full)
        try:
            yield descriptor.fd
        except OSError:
            self.drop(full)  # a stale handle of a network file system stays stale: open anew next time
            raise
        finally:
            descriptor.release()

    def drop(self, full: str) -> None:
        """Forget a file."""
        with self._lock:
            descriptor = self._open.pop(full, None)
        if descriptor is not None:
            descriptor.retire()

    def close(self) -> None:
        """Forget every file; a later use opens it again."""
        with self._lock:
            dropped = list(self._open.values())
            self._open.clear()
        for descriptor in dropped:
            descriptor.retire()

    def _acquire(self, root: str, path: str, full: str) -> Descriptor:
        with self._lock:
            known = self._open.get(full)
            if known is not None:
                self._open.move_to_end(full)
        if known is not None and known.acquire():
            try:
                same = identity(known.fd) == identity(full, links=True)
            except OSError:
                known.release()
                raise
            if same:
                return known
            known.release()
            self.drop(full)
        fd = open_regular(root, path)
        expect_sequence(fd)
        return self._admit(full, fd)

    def _admit(self, full: str, fd: int) -> Descriptor:
        fresh = Descriptor(fd)
        fresh.acquire()
        with self._lock:
            outdated = [self._open.pop(full)] if full in self._open else []
            self._open[full] = fresh
            while len(self._open) > self._limit:
                outdated.append(self._open.popitem(last=False)[1])
        for descriptor in outdated:
            descriptor.retire()
        return fresh


def _retire_all(descriptors: OrderedDict[str, Descriptor]) -> None:
    for descriptor in descriptors.values():
        descriptor.retire()
