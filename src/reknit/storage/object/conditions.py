"""Conditional writes to an object store: only the first writer succeeds.

Recognise objects that this process has written, although the answers to its requests were lost.

The client repeats a request without an answer.  If the first request was carried out, a store may refuse the
second one: the object exists, has another version by now, or its upload in parts is over.  So after a
refusal, and after an error without an answer, the object itself shows the outcome.
"""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import obstore
from obstore import exceptions

from reknit.environment import bucket_variables
from reknit.errors import DeadlineError, StorageError, StorageNotFoundError
from reknit.events.phase import Deadline, now
from reknit.storage.base import shorter, too_large
from reknit.storage.object.client import as_ours, connect, gave_whole, moment_of, plain, translated
from reknit.system import dice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from obstore import UpdateVersion

    from reknit.storage.object.client import Bucket, Client, ObjectOptions


_MARK = "reknitput"
"""Name of the metadata that marks the object of a writer: letters alone, as Azure requires."""
_REFUSED = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError)


def new_mark() -> dict[str, str]:
    """Return new metadata that marks the object of one write."""
    return {_MARK: uuid.uuid4().hex}


def put_if(
    client: Client, key: str, url: str, data: Any, *, mark: dict[str, str], seen: UpdateVersion | None
) -> bool | None:
    """Write an object if its version is still `seen`, or if it is missing and `seen` is None.

    Returns False for another version, and None if the store refuses the write though the object is as it was.
    Raises the client's error if the endpoint does not support conditions, and else reknit's.
    """
    mode: Any = "create" if seen is None else seen
    try:
        obstore.put(client, key, data, mode=mode, attributes=mark)
    except (exceptions.BaseError, OSError) as error:
        if unsupported(error):
            raise
        failure = as_ours("write", url, error)
        refused = isinstance(error, _REFUSED) and not _is_bucket_missing(error, failure)
        if not refused and not _is_unanswered(error):
            raise failure from None
        if is_own(client, key, url, mark=mark, nbytes=len(data), data=data):
            return True
        if not refused:
            raise failure from None
        return None if look(client, key, url) == seen else False
    return True


def is_own(
    client: Client, key: str, url: str, *, mark: dict[str, str], nbytes: int, data: Any = None
) -> bool:
    """Return whether an object was put there by the write with this mark.

    Some endpoints drop metadata.  Then the bytes decide, if there are any.  Without `data` the size decides:
    the name is for one writer alone, and was free before.
    """
    with translated("read back", url):
        try:
            found = obstore.get(client, key, options={"head": data is None})
            mine = found.attributes.get(_MARK)
            if mine is not None:
                return bool(mine == mark[_MARK])
            if found.meta["size"] != nbytes or not nbytes:
                return False
            return data is None or bytes(found.bytes()) == bytes(data)
        except FileNotFoundError:
            return False


def look(client: Client, key: str, url: str) -> UpdateVersion | None:
    """Return the version of an object; None for a missing object."""
    with translated("find", url):
        try:
            return version(obstore.head(client, key))
        except FileNotFoundError:
            return None


def version(found: Any) -> UpdateVersion:
    """Return the version in a result of `obstore.head` or `obstore.put`, as a condition for `obstore.put`."""
    names = ("e_tag", "version")
    return {name: found[name] for name in names if found[name] is not None}  # type: ignore[return-value]


def unsupported(error: Exception) -> bool:
    """Return whether an endpoint does not support the request that it answered with this error."""
    return isinstance(error, exceptions.NotSupportedError) or "status code: 501" in str(error)


def _is_unanswered(error: Exception) -> bool:
    """Return whether a request has no answer that excludes that it was carried out."""
    return isinstance(error, (exceptions.GenericError, exceptions.JoinError))


def _is_bucket_missing(error: Exception, failure: Exception) -> bool:
    return isinstance(error, FileNotFoundError) and not isinstance(failure, StorageNotFoundError)


_CONFLICTS = 8
"""How often a write is sent that the store refuses although nothing has changed: it saw two at once."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_TRIES = 3
_LOCK_WAIT_S = 120.0
_LOCK_STALE_S = 60.0
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


class _Outcome(NamedTuple):
    """The outcome of a test of an endpoint."""

    fault: str | None
    """The fault of an endpoint that does not obey conditions; None for one that does."""
    unknown: bool = False
    """Whether it reports that it does not support conditions."""
    whole_only: bool = False
    """Whether it ignores ranges, so that nothing could be loaded."""


class _Endpoint:
    """A bucket at its endpoint, whose outcome is kept as long as the process."""

    def __init__(self) -> None:
        self.testing = threading.Lock()
        self.outcome: _Outcome | None = None


ENDPOINTS: dict[object, _Endpoint] = {}
"""The endpoints that this process has met."""


def _endpoint_of(place: Bucket, options: ObjectOptions) -> _Endpoint:
    """Return the endpoint that the client of a bucket uses, by the options and the environment."""
    variables = hash(bucket_variables(_PREFIXES[place.scheme]))
    key = place.scheme, place.bucket, options.endpoint, options.region, variables
    return ENDPOINTS.setdefault(key, _Endpoint())


class Conditions:
    """Writes that have a condition, in one bucket.

    Before the first one of a process, a test shows whether the endpoint really obeys conditions: some
    endpoints write anyway, and some do not support conditions.  `settle_s` is longer than a small write takes
    to become visible to all processes.
    """

    settle_s = 1.0

    def __init__(self, client: Client, place: Bucket, options: ObjectOptions) -> None:
        self._client, self._url, self._prefix = client, place.url, place.prefix
        # The caller counts the attempts: one without an answer may still be carried out.
        self.once = connect(place, options, once=True)
        self._fallback = options.conditional
        self._endpoint = _endpoint_of(place, options)
        self._warned = False
        self.unknown = False
        """Whether the endpoint has reported that it does not support conditions; it is not asked again."""
        self._one = threading.Lock()

    def put(self, key: str, url: str, data: bytes, seen: UpdateVersion | None) -> bool:
        """Write a small object if its version is still `seen`, or if it is missing and `seen` is None.

        Returns False for another version, and then changes nothing.
        """
        if not self._are_kept():
            return self._put_locked(key, url, data, seen)
        mark = new_mark()
        for tries in range(_CONFLICTS):
            with translated("write", url):
                placed = put_if(self.once, key, url, data, mark=mark, seen=seen)
            if placed is not None:
                return placed
            _pause(tries)
        raise StorageError(
            f"{url} is unchanged, but the endpoint reports that it was changed",
            remedy="try again; if it happens again, add ?conditional=lock to the URL",
            path=url,
        )

    def swap(self, key: str, url: str, change: Callable[[bytes | None], bytes | None], limit: int) -> bool:
        """Replace a small object by its changed bytes, as `CommitsLate.swap` does."""
        while self._are_kept():
            old: bytes | None = None
            seen: UpdateVersion | None = None
            with suppress(StorageNotFoundError):
                old, seen = whole(self._client, key, url, limit)
            new = change(old)
            if new is None or self.put(key, url, new, seen):
                return True
        return False

    def _are_kept(self) -> bool:
        """Return whether the endpoint obeys conditions; test it the first time."""
        endpoint = self._endpoint
        with endpoint.testing:
            if endpoint.outcome is None:
                endpoint.outcome = self._try_out()
            outcome = endpoint.outcome
            if outcome.fault is not None and self._fallback == "refuse":
                endpoint.outcome = None  # it may be mended, and nothing is saved there before
        self.unknown = self.unknown or outcome.unknown
        if outcome.fault is not None and self._fallback == "refuse":
            raise StorageError(
                f"checkpoints cannot be committed to {self._url}: {outcome.fault}, so two saves could both "
                "report success",
                remedy="use an endpoint that supports conditional writes (If-None-Match, If-Match); "
                "or add ?conditional=lock to the URL, which uses a lock object, and works only if "
                "every write becomes visible within a second",
                path=self._url,
            )
        self._warn(outcome)
        return outcome.fault is None

    def _warn(self, outcome: _Outcome) -> None:
        """Warn of the weaknesses of an endpoint, once."""
        if self._warned:
            return
        self._warned = True
        if outcome.fault is not None:
            warnings.warn(
                f"{self._url}: {outcome.fault}; saves use a lock object, which is weaker: it works only if "
                "every write becomes visible within a second",
                RuntimeWarning,
                stacklevel=3,
            )
        if outcome.whole_only:
            warnings.warn(
                f"{self._url}: the endpoint returns whole objects for ranged reads: checkpoints that "
                "are saved here cannot be loaded from here, only from a copy elsewhere",
                RuntimeWarning,
                stacklevel=3,
            )

    def _try_out(self) -> _Outcome:
        """Test the endpoint with an object of a new name."""
        key = f"{self._prefix}.{uuid.uuid4().hex}.tmp"
        what, whole_only = "the first of two conditional creates", False
        try:
            mine = self._written(key, None, expected=True)
            if mine is None:
                return _Outcome(f"the endpoint refused {what}")
            whole_only = self._gives_whole(key)
            what = "a second conditional create of one object"
            if self._written(key, None, expected=False):
                return _Outcome(f"the endpoint accepted {what}", whole_only=whole_only)
            what = "a write over an object that was read before"
            if not self._written(key, mine, expected=True):
                return _Outcome(f"the endpoint refused {what} (If-Match)", whole_only=whole_only)
            what = "a write over an object that is gone"
            if self._written(key, mine, expected=False):
                return _Outcome(f"the endpoint accepted {what} (If-Match)", whole_only=whole_only)
        except (exceptions.GenericError, exceptions.NotSupportedError) as error:
            if not unsupported(error):
                raise as_ours(f"try out {what} in", self._url, error) from None
            text = f"the endpoint does not support {what} ({plain(error)})"
            return _Outcome(text, unknown=True, whole_only=whole_only)
        except (exceptions.BaseError, FileNotFoundError) as error:
            raise as_ours("write to", self._url, error) from None
        finally:
            with suppress(exceptions.BaseError, FileNotFoundError):  # it is never listed, and does no harm
                obstore.delete(self._client, key)
        return _Outcome(None, whole_only=whole_only)

    def _written(self, key: str, seen: UpdateVersion | None, *, expected: bool) -> UpdateVersion | None:
        """Write the object of the test, and return its new version; None if the endpoint refuses that.

        The answer may be lost, and the client's second request refused because of the first one.  So if an
        answer is missing, or a refusal not `expected`, the object itself shows the outcome.
        """
        mode: Any = "create" if seen is None else seen
        data = uuid.uuid4().bytes
        for tries in range(_TRIES):
            try:
                return version(obstore.put(self._client, key, data, mode=mode))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                if not expected:
                    return None
            except exceptions.GenericError as error:
                if unsupported(error) or tries + 1 == _TRIES:
                    raise
            with suppress(FileNotFoundError):
                found = obstore.get(self._client, key)
                if bytes(found.bytes()) == data:
                    return version(found.meta)
            _pause(tries)
        return None

    def _gives_whole(self, key: str) -> bool:
        """Return whether the endpoint ignores ranges, so that nothing could be loaded."""
        try:
            obstore.get_range(self._client, key, start=1, length=1)
        except exceptions.GenericError as error:
            if not gave_whole(error):
                raise
            return True
        return False

    def _put_locked(self, key: str, url: str, data: bytes, seen: UpdateVersion | None) -> bool:
        """Look, write and read back, while no other process that respects the lock does."""
        if not self._still(key, url, seen):
            return False
        with self._one, self._lock(key, url):
            if not self._still(key, url, seen):
                return False
            with translated("write", url):
                obstore.put(self.once, key, data)
                try:
                    there = bytes(obstore.get(self._client, key).bytes())
                except FileNotFoundError:
                    if not data:
                        return True  # a marker, which a later save has removed: it needs no lock
                    there = None
            if there is None:
                raise StorageError(
                    f"{url} was written, but is missing: it was deleted at once, or the store does not "
                    "return the latest write",
                    remedy="do not clean up here during a save, and save again",
                    path=url,
                )
            if there != data:
                raise StorageError(
                    f"{url} was written by another process despite its lock",
                    remedy="use ?conditional=lock for all saves to this path, or run one save at a time",
                    path=url,
                )
        return True

    def _still(self, key: str, url: str, seen: UpdateVersion | None) -> bool:
        return look(self._client, key, url) == seen

    @contextmanager
    def _lock(self, key: str, url: str) -> Iterator[None]:
        """Hold the lock object of `key`: it belongs to the process that it still names after `settle_s`."""
        folder, _, name = key.rpartition("/")
        lock = f"{folder}/.{name}.lock.tmp" if folder else f".{name}.lock.tmp"
        mine, deadline = uuid.uuid4().hex, Deadline(_LOCK_WAIT_S)
        while True:
            if self._holder(lock, url, mine) is None:
                with translated("lock", url):
                    obstore.put(self._client, lock, f"{mine} {now()}".encode())
                time.sleep(self.settle_s)
                if self._holder(lock, url, mine) == mine:
                    break
            if deadline.remaining() <= 0:
                raise DeadlineError(
                    f"another process has held the lock of {url} for {_LOCK_WAIT_S:g} s",
                    remedy="run only one save to a path at a time",
                    path=url,
                )
            time.sleep(dice.uniform(0.2, 1.0) * self.settle_s)
        try:
            yield
        finally:
            with translated("unlock", url), suppress(FileNotFoundError):
                obstore.delete(self._client, lock)

    def _holder(self, lock: str, url: str, mine: str) -> str | None:
        """Return the holder of a lock; a holder whose process must have died does not count."""
        with translated("lock", url):
            try:
                found = obstore.get(self._client, lock)
                holder = bytes(found.bytes()).decode().split()[0]
            except FileNotFoundError:
                return None
            if holder == mine:
                return mine
            # Clocks of hosts may differ: the bucket's own shows the age of the lock.
            age_s = moment_of(self._client, self._prefix) - found.meta["last_modified"].timestamp()
            return holder if age_s < _LOCK_STALE_S else None


def whole(client: Client, key: str, url: str, limit: int) -> tuple[bytes, UpdateVersion]:
    """Return the bytes of a small object, and its version; a larger object is not fetched."""
    with translated("read", url):
        found = obstore.get(client, key)
        nbytes = found.meta["size"]
        data = bytes(found.bytes()) if nbytes <= limit else b""
    if nbytes > limit:
        raise too_large(url, nbytes, limit)
    if len(data) != nbytes:
        raise shorter(url, 0, nbytes, len(data))
    return data, version(found.meta)


def _pause(tries: int) -> None:
    """Wait before a request is repeated, longer after each try."""
    time.sleep(dice.uniform(0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**tries)))
