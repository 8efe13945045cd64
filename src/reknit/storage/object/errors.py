"""Translate errors of an object store's client to reknit's."""

from __future__ import annotations

import re
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

from obstore import exceptions

from reknit.errors import (
    ReknitError,
    ShortageError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
    shortage,
)
from reknit.storage.errors import ForkGuard, missing

if TYPE_CHECKING:
    from collections.abc import Iterator

_SECRETS = re.compile(r"(?i)\b(sig|signature|x-amz-[a-z-]+|x-goog-[a-z-]+|token)=[^&\s\"')]+")
_MESSAGE = re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>")
_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|The specified bucket does not exist", re.IGNORECASE)
_FULL = re.compile(
    r"status code: 507|QuotaExceeded|InsufficientStorage|StorageFull|quota.{0,20}exceeded|no space left",
    re.IGNORECASE | re.DOTALL,
)
_DENIED = re.compile(r"status code: 40[13]|AccessDenied|token request", re.IGNORECASE)
_CLOCK = re.compile(r"RequestTimeTooSkewed|RequestExpired|request time and the current time", re.IGNORECASE)
_BUSY = re.compile(r"status code: (429|503)|SlowDown|TooManyRequests|ServerBusy", re.IGNORECASE)
_NO_RANGES = re.compile(r"non-partial response", re.IGNORECASE)
_UNREACHED = re.compile(
    r"status code: 5(?!01)|HTTP error|error sending request|connect|timed? ?out|connection", re.IGNORECASE
)


forks = ForkGuard("an object store")


@contextmanager
def translated(action: str, url: str) -> Iterator[None]:
    """Translate the errors of the client to a `StorageError` about `url`."""
    forks.check(url)
    try:
        yield
    except (exceptions.BaseError, OSError, ValueError) as error:
        # The error itself shows the client's internals, and may show secrets.
        raise as_ours(action, url, error) from None
    except BaseException as error:
        # The client is written in Rust; unexpected errors come out as this type, which is not an `Exception`.
        if type(error).__name__ != "PanicException":
            raise
        failed = StorageError(f"the client failed to {action} {url}: {plain(error)}", path=url)
        raise shortage(RuntimeError(plain(error))) or failed from error


def as_ours(action: str, url: str, error: BaseException) -> ReknitError:
    """Return the `StorageError` or `ShortageError` for an error of the client."""
    text = str(error)
    if short := _shortage(error):
        short.sign(path=url)
        return short
    if _BUCKET.search(text):
        return StorageError(
            f"cannot {action} {url}: there is no such bucket",
            remedy="create the bucket, or correct the URL; the endpoint and the account come from the "
            "environment, see the documentation of this store",
            path=url,
        )
    if isinstance(error, FileNotFoundError):
        return missing(url)
    kind, remedy = _kind(error, text)
    return kind(f"cannot {action} {url}: {plain(error)}", remedy=remedy, path=url)


def _shortage(error: BaseException) -> ShortageError | None:
    """Return the `ShortageError` if the client failed because this process lacks a resource.

    If a socket could not be made, the client reports only that no request could be sent.  So this tries to
    make a socket.
    """
    if (short := shortage(error)) or not _UNREACHED.search(str(error)):
        return short
    try:
        socket.socket().close()
    except OSError as refused:
        return shortage(refused)
    return None


def gave_whole(error: BaseException) -> bool:
    """Return whether an endpoint sent a whole object in answer to a request for a range."""
    return _NO_RANGES.search(str(error)) is not None


def plain(error: BaseException) -> str:
    """Return the text of an error, without the client's internals and without secrets."""
    text = str(error).partition("\n\nDebug source")[0]
    if found := _MESSAGE.search(text):
        text = f"{text[: found.start()].partition('<?xml')[0]}{found[1]}: {found[2]}"
    return _SECRETS.sub(r"\1=***", " ".join(text.split()))[:500]


def _kind(error: BaseException, text: str) -> tuple[type[StorageError], str]:
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if _FULL.search(text):
        return StorageFullError, "free space: delete old checkpoints, or raise the quota"
    if _CLOCK.search(text):
        return (
            StoragePermissionError,
            "the clock of this host is wrong: set it (NTP), then try again",
        )
    if isinstance(error, denied) or _DENIED.search(text):
        return StoragePermissionError, (
            "check the credentials of the process (environment, role of the machine), and that they may "
            "list the bucket and read, write and delete below this prefix"
        )
    if _BUSY.search(text):
        return (
            StorageUnavailableError,
            "the store limits requests: save less often, with fewer threads, or retry",
        )
    if gave_whole(error):
        return StorageError, (
            "the endpoint returns whole objects for ranged reads, so nothing can be loaded from it; the "
            "saved files are intact: copy them to a folder or another store, and load from there"
        )
    if _UNREACHED.search(text):
        return StorageUnavailableError, (
            "check the endpoint and the network; if requests are slow, use smaller parts or more time with "
            "?part_mib= and ?timeout_s= in the URL"
        )
    return StorageError, "see the store's message; if the problem is temporary, try again"
