"""Conditional writes to an object store: only the first writer succeeds."""

from __future__ import annotations

import threading
import time
import uuid
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions

from reknit.errors import DeadlineError, StorageError, StorageNotFoundError
from reknit.monitor.phase import Deadline, now
from reknit.storage.errors import shorter, too_large
from reknit.storage.object.client import moment_of
from reknit.storage.object.errors import as_ours, gave_whole, plain, translated
from reknit.system import dice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from obstore import UpdateVersion

    from reknit.storage.object.client import Client, Fallback

    Put = dict[str, Any]

_NONCE = "reknitput"
"""Name of the metadata that marks the object of a writer: letters alone, as Azure requires."""
_REFUSED = (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError)
_LOST = (exceptions.GenericError, exceptions.JoinError)
"""Errors of the client without an answer, so that the request may have been carried out."""
_LOCK_WAIT_S = 120.0
_LOCK_STALE_S = 60.0


class Conditions:
    """Writes that have a condition, in one bucket.

    Before the first one, a test shows whether the endpoint really obeys conditions: some endpoints write
    anyway, and some do not support conditions.  `settle_s` is longer than a small write takes to become
    visible to all processes.
    """

    settle_s = 1.0

    def __init__(self, client: Client, url: str, prefix: str, fallback: Fallback) -> None:
        self._client, self._url, self._prefix = client, url, prefix
        self._fallback = fallback
        self._checking = threading.Lock()
        self._kept: bool | None = None
        self.unknown = False
        """Whether the endpoint has reported that it does not support conditions; it is not asked again."""
        self._whole_only = False
        self._one = threading.Lock()

    def put(self, key: str, url: str, data: bytes, seen: UpdateVersion | None) -> bool:
        """Write a small object if its version is still `seen`, or if it is missing and `seen` is None.

        Returns False for another version, and then changes nothing.
        """
        if not self._are_kept():
            return self._put_locked(key, url, data, seen)
        nonce = new_nonce()
        mode: Any = "create" if seen is None else seen
        try:
            obstore.put(self._client, key, data, mode=mode, attributes=nonce)
        except _REFUSED:
            # The client repeats a request whose answer is lost; then it is its own first try that refuses it.
            return self._is_own(key, url, data, nonce)
        except exceptions.BaseError as error:
            if not (isinstance(error, _LOST) and self._is_own(key, url, data, nonce)):
                raise as_ours("write", url, error) from None
        return True

    def swap(self, key: str, url: str, change: Callable[[bytes | None], bytes | None], limit: int) -> bool:
        """Replace a small object by its changed bytes, as `CommitsLate.swap` does."""
        while self._are_kept():
            try:
                old, seen = whole(self._client, key, url, limit)
            except StorageNotFoundError:
                old = seen = None
            new = change(old)
            if new is None or self.put(key, url, new, seen):
                return True
        return False

    def _is_own(self, key: str, url: str, data: bytes, nonce: dict[str, str]) -> bool:
        """Return whether an object was put there by this very write."""
        with translated("read back", url):
            try:
                found = obstore.get(self._client, key)
            except FileNotFoundError:
                return False
            mark = found.attributes.get(_NONCE)
            if mark is not None:
                return bool(mark == nonce[_NONCE])
            # Some endpoints drop unknown metadata.
            return data != b"" and found.meta["size"] == len(data) and bytes(found.bytes()) == data

    def _are_kept(self) -> bool:
        """Return whether the endpoint obeys conditions; test it the first time."""
        with self._checking:
            if self._kept is None:
                fault = self._try_out()
                if fault is not None and self._fallback == "refuse":
                    raise StorageError(
                        f"checkpoints cannot be committed to {self._url}: {fault}, so two saves could both "
                        "report success",
                        remedy="use an endpoint that supports conditional writes (If-None-Match, If-Match); "
                        "or add ?conditional=lock to the URL, which uses a lock object, and works only if "
                        "every write becomes visible within a second",
                        path=self._url,
                    )
                if fault is not None:
                    warnings.warn(
                        f"{self._url}: {fault}; saves use a lock object, which is weaker: it works only if "
                        "every write becomes visible within a second",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                if self._whole_only:
                    warnings.warn(
                        f"{self._url}: the endpoint returns whole objects for ranged reads: checkpoints that "
                        "are saved here cannot be loaded from here, only from a copy elsewhere",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                self._kept = fault is None
        return self._kept

    def _try_out(self) -> str | None:
        """Return the fault of the endpoint, None for an endpoint that obeys conditions."""
        key = f"{self._prefix}.{uuid.uuid4().hex}.tmp"
        what = "the first of two conditional creates"
        try:
            first = obstore.put(self._client, key, b"12", mode="create")
            self._whole_only = self._gives_whole(key)
            what = "a second conditional create of one object"
            if self._gets_through(key, "create"):
                return f"the endpoint accepted {what}"
            what = "a write over an object that was read before"
            mine = version(first)
            if not self._gets_through(key, mine):
                return f"the endpoint refused {what} (If-Match)"
            what = "a write over an object that is gone"
            if self._gets_through(key, mine):
                return f"the endpoint accepted {what} (If-Match)"
        except (exceptions.GenericError, exceptions.NotSupportedError) as error:
            failure = as_ours(f"try out {what} in", self._url, error)
            if unsupported(error):
                self.unknown = True
                return f"the endpoint does not support {what} ({plain(error)})"
            raise failure from None
        except (exceptions.BaseError, FileNotFoundError) as error:
            raise as_ours("write to", self._url, error) from None
        finally:
            with suppress(exceptions.BaseError, FileNotFoundError):  # it is never listed, and does no harm
                obstore.delete(self._client, key)
        return None

    def _gets_through(self, key: str, mode: Any) -> bool:
        try:
            obstore.put(self._client, key, uuid.uuid4().bytes, mode=mode)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return False
        return True

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
                obstore.put(self._client, key, data)
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


def new_nonce() -> dict[str, str]:
    """Return new metadata that marks the object of one writer."""
    return {_NONCE: uuid.uuid4().hex}


def seen_nonce(client: Client, key: str) -> dict[str, str] | None:
    """Return the mark of an object, empty for an object without a mark; None for a missing object."""
    try:
        mark = obstore.get(client, key).attributes.get(_NONCE)
    except FileNotFoundError:
        return None
    return {} if mark is None else {_NONCE: mark}


def look(client: Client, key: str, url: str) -> UpdateVersion | None:
    """Return the version of an object; None for a missing object."""
    with translated("find", url):
        try:
            return version(obstore.head(client, key))
        except FileNotFoundError:
            return None


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


def version(found: Any) -> UpdateVersion:
    """Return the version in a result of `obstore.head` or `obstore.put`, as a condition for `obstore.put`."""
    names = ("e_tag", "version")
    return {name: found[name] for name in names if found[name] is not None}  # type: ignore[return-value]


def unsupported(error: Exception) -> bool:
    """Return whether an endpoint does not support the request that it answered with this error."""
    return isinstance(error, exceptions.NotSupportedError) or "status code: 501" in str(error)
