"""URLs of object stores, and clients for them."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from reknit.errors import UsageError
from reknit.options import MIB
from reknit.storage.object.errors import plain
from reknit.storage.paths import check_path
from reknit.storage.url_options import mebibytes, require, url_options

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
