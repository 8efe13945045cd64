"""Errors that all stores share."""

from __future__ import annotations

from reknit.errors import StorageError, StorageNotFoundError


class ExistingError(StorageError):
    """The name is taken."""


def existing(url: str, action: str = "create") -> ExistingError:
    """Return the error of a file that would be written again."""
    return ExistingError(
        f"cannot {action} {url}: it exists",
        remedy="files are never written twice: use another name, or delete the old one first",
        path=url,
    )


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
    return StorageError(f"{url} has {nbytes} bytes, more than the {limit} allowed here", path=url)


def removed(url: str) -> StorageError:
    """Return the error of a writer that has lost its name."""
    return StorageError(f"{url} was removed or replaced while it was written", path=url)
