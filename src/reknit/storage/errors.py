"""Errors that all stores share."""

from __future__ import annotations

from reknit.errors import StorageError, StorageNotFoundError


class FaultError(OSError):
    """An error of the system with a remedy that its place in the code adds."""

    def __init__(self, number: int, fault: str, full: str, remedy: str) -> None:
        super().__init__(number, fault, full)
        self.remedy = remedy


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
SPELLING = "check how it is spelled, and whether another process moved or deleted it"
"""The remedy for a file that is not there."""


def missing(url: str) -> StorageNotFoundError:
    """Return the error of a file that is not there."""
    return StorageNotFoundError(f"there is no file {url}", remedy=SPELLING, path=url)


def shorter(url: str, start: int, end: int, nbytes: int) -> StorageError:
    """Return the error of a file that ends before the bytes `start` to `end` that are wanted of it."""
    return StorageError(
        f"{url} is shorter than expected: wanted bytes {start} to {end}, but it has {nbytes}",
        remedy="the file was truncated; verify the checkpoint, and load another one if this is damaged",
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
