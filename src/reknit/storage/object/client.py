"""URLs of object stores, and clients for them, whose errors become those of reknit."""

from __future__ import annotations

import re
import socket
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from reknit.errors import (
    ReknitError,
    ShortageError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
    UsageError,
    shortage,
)
from reknit.options import MIB
from reknit.storage.base import ForkGuard, missing
from reknit.storage.paths import check_path, mebibytes, require, url_options

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
        return (StoragePermissionError, "the clock of this host is wrong: set it (NTP), then try again")
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


Fallback = Literal["refuse", "lock"]
Client = S3Store | GCSStore | AzureStore

_KINDS: dict[str, type[Client]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_SLOWEST = 128 << 10
"""Bytes per second: a slower part counts as stuck."""
_SMALLEST_PART = 5 * MIB
"""The smallest part that S3 takes, except as the last."""
_FEW = 4
"""Most repetitions of a request that `wrappers.retrying` repeats as well: they take a second or two."""
_LONGEST_S = 180.0
"""The longest time after its first try in which the client repeats a request."""
_BACKOFF: Any = {
    "init_backoff": timedelta(seconds=0.1),
    # Each pause is random, up to four times the pause before, but on the average only twice.  With shorter
    # pauses, the client would use up all its tries in two seconds while no server answers.
    "base": 4,
    "max_backoff": timedelta(seconds=10),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectOptions:
    """Options of an object store; each can be set in the URL, after a question mark.

    `conditional`: for an endpoint without conditional writes, ``"refuse"`` to commit there, or ``"lock"``
    with an object.  `part_nbytes` (in a URL ``part_mib``): size of one part of a multipart upload and of one
    read request.  Files of at most one part are uploaded in one request; parts are larger where a file would
    have more than 10,000.  `concurrency`: parts of one file in flight at once.  `timeout_s`: longest time for
    one request; None for 30 seconds plus the time of a part at 128 KiB/s.  `retries`: how often the client
    repeats a failed request of an upload, within three minutes.  It repeats other requests at most four
    times, but never a conditional write or a deletion; after that, `retry_s` applies.  `endpoint`, `region`:
    override the environment variables of the same meaning.  `unsigned`: sign S3 requests without their
    bodies, which halves the processor time; digests check the stored bytes in any case.
    """

    conditional: Fallback = "refuse"
    part_nbytes: int = 8 * MIB
    concurrency: int = 8
    timeout_s: float | None = None
    retries: int = 20
    endpoint: str | None = None
    region: str | None = None
    unsigned: bool = True

    def __post_init__(self) -> None:
        require(
            self.conditional in get_args(Fallback),
            f"conditional is 'refuse' or 'lock', not {self.conditional!r}",
        )
        require(self.part_nbytes > 0, f"a part has at least one byte, not {self.part_nbytes}")
        require(self.concurrency >= 1, f"concurrency is at least 1, not {self.concurrency}")
        require(self.timeout_s is None or self.timeout_s > 0, "timeout_s must be positive")
        require(self.retries >= 0, "retries must not be negative")

    @property
    def request_s(self) -> float:
        """The longest that one request may take, in seconds."""
        return 30.0 + self.part_nbytes / _SLOWEST if self.timeout_s is None else self.timeout_s


@dataclass(frozen=True, slots=True)
class Bucket:
    """The place in a URL: a bucket (a container in Azure), and a prefix that ends in a slash or is empty."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """As a user would write it, without options."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def parse_url(url: str) -> tuple[Bucket, ObjectOptions]:
    """Return the place and the options of ``scheme://bucket/prefix?option=value``.  Raises `UsageError`."""
    head, _, query = url.partition("?")
    scheme, _, rest = head.partition("://")
    bucket, _, prefix = rest.strip("/").partition("/")
    scheme = scheme.lower()
    if scheme not in _KINDS or not bucket:
        raise UsageError(f"{url!r} names no bucket", remedy=f"write {scheme}://bucket/folder")
    if prefix:
        check_path(prefix, f"{scheme}://{bucket}")
    found = url_options(url, query, ObjectOptions, part_mib=lambda text: max(mebibytes(text), _SMALLEST_PART))
    return Bucket(scheme, bucket, f"{prefix}/" if prefix else ""), ObjectOptions(**found)


def connect(place: Bucket, options: ObjectOptions, *, uploading: bool = False, once: bool = False) -> Client:
    """Return the client of a bucket.  Nothing is sent yet.

    A client for `uploading` repeats requests as often as the options say, because its callers cannot repeat a
    part of an upload.  Other clients leave most retries to their callers, which can log that they wait.  A
    client that sends a request `once` leaves all to them, so that they count each attempt without an answer.

    The client takes endpoint, account and credentials from the environment (AWS_*, GOOGLE_*, AZURE_*), or
    from its machine.  Raises `UsageError` for values that the client does not accept.

    A process forked after the client's first request must not use the client: its threads are missing there,
    and it waits for them forever.
    """
    client_options: dict[str, Any] = {
        "allow_http": True,  # a user who writes http:// into the endpoint wants it
        "timeout": timedelta(seconds=options.request_s),
    }
    given: dict[str, Any] = {
        "client_options": client_options,
        "retry_config": {
            "max_retries": 0 if once else options.retries if uploading else min(options.retries, _FEW),
            "retry_timeout": timedelta(seconds=_LONGEST_S),
            "backoff": _BACKOFF,
        },
    }
    if place.scheme == "s3":
        # Objects are deleted one by one here, and not every endpoint can delete many.
        given |= {"unsigned_payload": options.unsigned, "disable_bulk_delete": True}
    elif options.region is not None:
        raise UsageError(f"region is an option of s3:// alone, not of {place.url}")
    if options.region is not None:
        given["region"] = options.region
    if options.endpoint is not None:
        given["base_url" if place.scheme == "gs" else "endpoint"] = options.endpoint
    try:
        return _KINDS[place.scheme](place.bucket, **given)
    except (exceptions.BaseError, ValueError, OSError) as error:
        raise UsageError(
            f"cannot connect to {place.url}: {plain(error)}",
            remedy="set the environment variables that the documentation of this store lists",
        ) from error


def moment_of(client: Client, prefix: str) -> float:
    """Return the present time by the clock of a bucket: the date of an object that is written for it."""
    key = f"{prefix}.{uuid.uuid4().hex}.tmp"
    obstore.put(client, key, b"")
    try:
        written: float = obstore.head(client, key)["last_modified"].timestamp()
        return written
    finally:
        with suppress(exceptions.BaseError, OSError):  # it is never listed, and does no harm
            obstore.delete(client, key)
