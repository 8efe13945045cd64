"""Errors that all stores share."""

from __future__ import annotations

import os

from reknit.errors import StorageError, StorageNotFoundError, UsageError


class FaultError(OSError):
    """An error of the system with a remedy that its place in the code adds."""

    def __init__(self, number: int, fault: str, full: str, remedy: str) -> None:
        super().__init__(number, fault, full)
        self.remedy = remedy


class ForkGuard:
    """Refuses processes that were forked after a request, whose client has threads in their parent alone."""

    def __init__(self, what: str) -> None:
        """Guard the requests to `what`, such as "an object store"."""
        self._what = what
        self._used_by: list[int] = []
        """The process that sent the first request, if any."""

    def check(self, url: str) -> None:
        """Raise `UsageError` in a forked process, where a request would hang."""
        this = os.getpid()
        if not self._used_by:
            self._used_by.append(this)
        if self._used_by[0] != this:
            raise UsageError(
                f"{url} cannot be reached from this process: it was forked from process {self._used_by[0]}, "
                f"which has used {self._what} before, and the threads of its client are missing here",
                remedy="start this process with the method spawn or forkserver of multiprocessing, as "
                "DataLoader(multiprocessing_context='forkserver') does, or fork it before the first save "
                "or load",
                path=url,
            )


class ExistingError(StorageError):
    """The name is taken."""


def existing(url: str, action: str = "create") -> ExistingError:
    """Return the error of a file that would be written again."""
    return ExistingError(
        f"cannot {action} {url}: it exists",
        remedy=TAKEN,
        path=url,
    )


TAKEN = "files are never written twice: use another name, or delete the old one first"
"""The remedy for a name that is taken."""
SPELLING = "check how it is spelled; if it was there, it was moved or deleted, or the store has lost it"
"""The remedy for a file that is not there."""


def missing(url: str) -> StorageNotFoundError:
    """Return the error of a file that is not there."""
    return StorageNotFoundError(f"there is no file {url}", remedy=SPELLING, path=url)


def shorter(url: str, start: int, end: int, nbytes: int) -> StorageError:
    """Return the error of a file that ends before the bytes `start` to `end` that are wanted of it."""
    return StorageError(
        f"{url} is shorter than expected: wanted bytes {start} to {end}, but it has {nbytes}",
        remedy="its end is missing: verify the checkpoint, and load another one if this is damaged",
        path=url,
    )


def too_large(url: str, nbytes: int, limit: int) -> StorageError:
    """Return the error of a file that has more bytes than the caller allows."""
    return StorageError(
        f"{url} has {nbytes} bytes, more than the {limit} allowed here",
        remedy="no file of reknit is so large there: restore it, or load another checkpoint",
        path=url,
    )


def removed(url: str) -> StorageError:
    """Return the error of a writer that has lost its name."""
    return StorageError(
        f"{url} was removed or replaced while it was written",
        remedy="let only one job at a time write or clean up a checkpoint",
        path=url,
    )
