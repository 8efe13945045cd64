"""A store that retries operations that failed because the store inside could not be reached."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field

from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError, UsageError
from reknit.events.phase import monotonic, retries
from reknit.storage.base import ExistingError, Progress
from reknit.storage.wrappers.forwarding import KINDS, ForwardingStorage, ForwardingWriter, innermost
from reknit.system import dice

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.options import Durability
    from reknit.storage.base import CopiesFiles, Storage, Writer
    from reknit.storage.wrappers.forwarding import Half

    Factory = Callable[[str, Durability], Storage]

logger = logging.getLogger("reknit")

T = TypeVar("T")

_OPTION = "retry_s"
_KEPT_NBYTES = 16 << 20
"""Files of at most so many bytes are kept until they exist, if their store's writers cannot continue."""
_SILENT_S = 60.0
"""Seconds between two log messages about retries of one operation."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, and how often, an operation is retried: exponential back-off with full jitter.

    Before try number `n` it waits a random time of up to ``first_s * 2 ** (n - 1)``, at most `longest_s`.  An
    operation is given up after `deadline_s`.  Later operations then fail at once, until one succeeds or as
    much time has passed again.
    """

    deadline_s: float = 120.0
    first_s: float = 0.1
    longest_s: float = 10.0

    def __post_init__(self) -> None:
        if min(self.deadline_s, self.first_s, self.longest_s) <= 0:
            raise UsageError("the times of a RetryPolicy are positive")

    def pause_s(self, tries: int) -> float:
        """Return the pause after so many failed tries."""
        return dice.uniform(0, min(self.longest_s, self.first_s * 2.0 ** min(tries - 1, 32)))


def with_retries(*, resumes: bool) -> Callable[[Factory], Factory]:
    """Decorate the factory of a remote store, so that it returns a `RetryingStorage`.

    Its URLs accept the option `retry_s`, the `RetryPolicy.deadline_s`, which the factory does not see; 0
    turns retries off.
    """

    def decorate(factory: Factory) -> Factory:
        @functools.wraps(factory)
        def opened(url: str, durability: Durability) -> Storage:
            url, seconds = _without_option(url)
            storage = factory(url, durability)
            return RetryingStorage(storage, RetryPolicy(seconds), resumes=resumes) if seconds else storage

        return opened

    return decorate


def without_retries(storage: Storage) -> Storage:
    """Return a store whose failures are errors at once."""
    return storage.inner if isinstance(storage, RetryingStorage) else storage


def _without_option(url: str) -> tuple[str, float]:
    """Return a URL without ``retry_s``, and its value."""
    head, _, query = url.partition("?")
    parts = query.split("&")
    values = [part.partition("=")[2] for part in parts if part.partition("=")[0] == _OPTION]
    if not values:
        return url, RetryPolicy().deadline_s
    rest = "&".join(part for part in parts if part.partition("=")[0] != _OPTION)
    try:
        seconds = float(values[-1])
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{url!r}: {_OPTION} is a number of seconds, or 0, not {values[-1]!r}")
    return (f"{head}?{rest}" if rest else head), seconds


class _Record(Struct):
    """Retries and failures of a store and those below it."""

    retries: Counter[str] = field(default_factory=Counter)
    outage: tuple[float, float] | None = None
    """Since when nothing has succeeded, and when something failed last."""
    logged: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, began: float, at: float, memory_s: float) -> float:
        """Note a failure of an operation that began at `began`, and return the start of this outage."""
        with self.lock:
            since, last = self.outage or (began, at)
            if at - last > memory_s:
                since = began
            self.outage = (since, at)
            return min(since, began)

    def count(self, name: str, at: float) -> bool:
        """Count a retry, and return whether it is to be logged."""
        with self.lock:
            self.retries[name] += 1
            due = at - self.logged.get(name, -math.inf) >= _SILENT_S
            if due:
                self.logged[name] = at
            return due


class RetryingStorage(ForwardingStorage):
    """A store that retries after `StorageUnavailableError`, and after no other error: those are answers.

    Every operation may be repeated without harm.  If it is uncertain whether a file was made, the file is
    read: with the bytes to be put, it counts as made.  A `finish` that failed for another reason, such as an
    `fsync`, is never repeated, because its bytes may be gone from memory.  `retries` counts repetitions by
    operation, for this store and the stores below it.  The first of each operation is logged, and then one in
    a minute.

    `resumes`: whether the inner store's writers can continue after a failed `write` or `finish`.  If they
    cannot, files of at most 16 MiB are kept in memory and written anew.  Larger files are not repeated here;
    the client of their store has to.
    """

    def __init__(self, inner: Storage, policy: RetryPolicy | None = None, *, resumes: bool = True) -> None:
        super().__init__(inner)
        self.policy = policy or RetryPolicy()
        self._resumes = resumes
        self._record = _Record()

    @property
    def retries(self) -> Counter[str]:
        """Number of retries by operation."""
        return self._record.retries

    def around(self, inner: Storage, path: str) -> Storage:
        """Return the store below, with the same policy and counts."""
        below = RetryingStorage(inner, self.policy, resumes=self._resumes)
        below._record = self._record
        return below

    def again(self, name: str, work: Callable[[int], T]) -> T:
        """Call `work` with the number of earlier failures, until it succeeds or the time is over."""
        began, tries, last = monotonic(), 0, None
        while True:
            try:
                result = work(tries)
            except StorageUnavailableError as error:
                tries += 1
                at = monotonic()
                since = self._record.failed(began, at, self.policy.deadline_s)
                left_s = since + self.policy.deadline_s - at
                # Who raises the same error once more has not tried anything.
                if error is last or left_s <= 0:
                    if tries > 1 and error is not last:
                        error.message += f" (tried {tries} times in {self.policy.deadline_s:g} s)"
                    raise
                if self._record.count(name, at):
                    message = "%s: %s is tried again, for up to %g s: %s"
                    logger.warning(message, self.url, name, self.policy.deadline_s, error.message)
                last = error
                retries.set(retries.get() + 1)
            else:
                self._record.outage = None
                return result
            time.sleep(min(self.policy.pause_s(tries), left_s))

    def intercept(self, name: str, path: str, nbytes: int, whole: Callable[[], T], half: Half = None) -> T:
        """Repeat an operation until it succeeds; a read fills its buffers anew."""
        return self.again(KINDS.get(name, name), lambda _: whole())

    def create(self, path: str, nbytes: int) -> Writer:
        """Start a new file, whose pieces are written again after a failure."""

        def work(tries: int) -> Writer:
            try:
                return self.inner.create(path, nbytes)
            except StorageError as error:
                if tries and not isinstance(error, StorageUnavailableError) and self._is_there(path):
                    error.message += "; it may be from an attempt before, of which no answer came"
                raise

        writer = self.again("create", work)
        if self._resumes:
            return ForwardingWriter(writer, path, self)
        return KeptWriter(self, writer, path, nbytes) if nbytes <= _KEPT_NBYTES else writer

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file in one step."""

        def work(tries: int) -> bool:
            placed = self.inner.put(path, data, if_absent=if_absent)
            return placed or (tries > 0 and self.has(path, data))

        return self.again("put", work)

    def _copy_from(
        self, inner: CopiesFiles, source: Storage, source_path: str, path: str, nbytes: int
    ) -> bool:
        """Copy a file; an earlier attempt without an answer may have made the copy."""

        def work(tries: int) -> bool:
            if tries and self._is_there(path):
                if self.inner.size(path) == nbytes:
                    return True
                self.inner.delete(path)  # the store makes no right copy, and then did not delete it
                return False
            return inner.copy_from(innermost(source), source_path, path, nbytes)

        return self.again("copy_from", work)

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write a small file in one step, while another file exists; done once the file has the bytes."""

        def work(tries: int) -> bool:
            if tries and self.has(path, data):
                self.inner.delete(pending)  # perhaps only that request has failed
                return True
            return self.inner.commit(path, data, pending=pending, if_absent=if_absent)

        return self.again("commit", work)

    def has(self, path: str, data: bytes) -> bool:
        """Return whether a file has exactly these bytes, without retries."""
        try:
            return self.inner.size(path) == len(data) and self.inner.get(path, limit=len(data)) == data
        except StorageNotFoundError:
            return False

    def _is_there(self, path: str) -> bool:
        try:
            return self.inner.size(path) >= 0
        except StorageError:
            return False  # it only explains another error


class KeptWriter:
    """A small file of a store whose writers cannot continue: it is kept in memory, and written anew."""

    def __init__(self, storage: RetryingStorage, inner: Writer, path: str, nbytes: int) -> None:
        self._storage, self._inner, self._path = storage, inner, path
        self._kept = bytearray(nbytes)
        self._progress = Progress(f"{storage.url}/{path}", nbytes)

    def write(self, start: int, data: memoryview) -> None:
        """Keep a piece."""
        data = data.cast("B")
        self._progress.check(start, data.nbytes)
        self._kept[start : start + data.nbytes] = data
        self._progress.add(data.nbytes)

    def finish(self) -> None:
        """Write the file, anew after a failure."""
        self._progress.check_open("finish")
        self._progress.end()
        self._progress.check_whole()
        self._storage.again("finish", self._write_all)

    def abort(self) -> None:
        """Give up."""
        self._progress.end()
        self._inner.abort()

    def _write_all(self, tries: int) -> None:
        if not tries:
            self._write()
            return
        self._inner.abort()
        try:
            if not self._is_there():
                self._inner = self._storage.inner.create(self._path, len(self._kept))
                self._write()
        except ExistingError:
            if not self._is_there():  # else an attempt before has succeeded since
                raise

    def _write(self) -> None:
        self._inner.write(0, memoryview(self._kept))
        self._inner.finish()

    def _is_there(self) -> bool:
        """Return whether an attempt before has succeeded, and its answer was lost."""
        return self._storage.has(self._path, bytes(self._kept))
