"""The store interface: whole immutable files, ranged reads, small atomic writes, and shared errors."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from reknit.errors import StorageError, StorageNotFoundError, UsageError
from reknit.storage.ranges import check_inside, check_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray


class TakenNames:
    """The names of files that this process is writing, and their writers."""

    def __init__(self) -> None:
        self._writers: dict[str, object] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._writers

    def take(self, name: str, writer: object) -> bool:
        """Give a name to a writer, and return whether it was free."""
        with self._lock:
            return self._writers.setdefault(name, writer) is writer

    def has(self, name: str, writer: object) -> bool:
        """Return whether a writer still has its name."""
        with self._lock:
            return self._writers.get(name) is writer

    def free(self, name: str, writer: object | None = None) -> None:
        """Take a name from this writer, or from any writer."""
        with self._lock:
            if writer is None or self._writers.get(name) is writer:
                self._writers.pop(name, None)

    def below(self, folder: str) -> bool:
        """Return whether a name lies below a folder."""
        with self._lock:
            return any(name.startswith(f"{folder}/") for name in self._writers)


class Progress:
    """How much of a file of `nbytes` bytes is written, and whether it still may be; thread-safe."""

    def __init__(self, url: str, nbytes: int) -> None:
        """Begin a file; raises `UsageError` for a negative size."""
        check_size(nbytes)
        self._url, self._nbytes = url, nbytes
        self._written = 0
        self._open = True
        self._lock = threading.Lock()

    def check(self, start: int, nbytes: int) -> None:
        """Raise `StorageError` unless these bytes may be written now."""
        check_inside(start, nbytes, self._nbytes, self._url)
        self.check_open("write")

    def check_open(self, action: str) -> None:
        """Raise `StorageError` when the file is finished or aborted."""
        with self._lock:
            if not self._open:
                raise StorageError(f"cannot {action} {self._url}: it is finished or aborted", path=self._url)

    def add(self, nbytes: int) -> None:
        """Count bytes that were written."""
        with self._lock:
            self._written += nbytes

    def check_whole(self) -> None:
        """Raise `StorageError` unless all bytes were written."""
        if self._written != self._nbytes:
            fault = f"{self._written} of {self._nbytes} bytes were written"
            raise StorageError(f"cannot finish {self._url}: {fault}", path=self._url)

    def end(self) -> bool:
        """End the writing, and return whether it was allowed until now."""
        with self._lock:
            was_open, self._open = self._open, False
            return was_open


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
    return ExistingError(f"cannot {action} {url}: it exists", remedy=TAKEN, path=url)


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


class Listed(NamedTuple):
    """A file that a store lists: its path relative to the store's root, and its size in bytes."""

    path: str
    nbytes: int


class Reading(NamedTuple):
    """The way in which a store is read best; the defaults are those of a local disk.

    Holes of up to `gap_nbytes` between wanted runs are read over, as long as the bytes wasted are at most
    `waste` times those wanted; a store in which a request costs more than bytes wants both large.  One read
    has at most about `piece_nbytes`.
    """

    gap_nbytes: int = 256 << 10
    waste: float = 0.05
    piece_nbytes: int = 8 << 20


class Writer(Protocol):
    """A file that is being written.  It does not exist for readers' purposes before `finish` returns."""

    def write(self, start: int, data: memoryview) -> None:
        """Write all of `data` (1-d, bytes) at byte `start`.

        Thread-safe; pieces come in any order, none twice.  The memory of `data` is used for other things as
        soon as this returns or raises.
        """

    def finish(self) -> None:
        """Make the file whole and durable.

        Raises `StorageError` when the bytes written are not exactly the size announced.
        """

    def abort(self) -> None:
        """Give up, and remove the bytes written; never raises for a store that is already failing."""


class Storage(Protocol):
    """A tree of files under one root.  Paths are relative, with forward slashes; every method is thread-safe.

    Foreign errors come out as `StorageError` and its subclasses, with the full location in `path`.
    """

    @property
    def url(self) -> str:
        """Where the root is, as a user would write it."""

    @property
    def reading(self) -> Reading:
        """How reads are best cut here."""

    def create(self, path: str, nbytes: int) -> Writer:
        """Start a new file of exactly `nbytes` bytes, making folders as needed.

        Raises `StorageError` when the path already exists: files are immutable.
        """

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file durably in one step: a reader sees the old content or the new, no mixture.

        With `if_absent` an existing file is left as it is and the answer is False; otherwise the answer is
        True.  An empty file need not outlive a power cut: it is a mark for processes that are alive.
        """

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write a small file as `put` does, but only while the file `pending` exists, which this removes.

        `pending` is an empty file in the same folder, made with `put`.  It belongs to the caller alone, which
        commits one content with it.  After another process has deleted it, the caller can never write `path`.
        Raises `StorageNotFoundError` if it is gone, and then changes nothing.  If the result is False, as
        with `put`, the file `pending` still exists, with any content.

        After any other error, or on a network that repeats requests, only a read of `path` shows the outcome,
        and it is final once `pending` is removed.  A store that `CommitsLate` may write `path` even later.
        In stores that can, the look and the write are one atomic step.  Other stores look and then put, and
        their documentation says how safe that is.
        """

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file.

        Raises `StorageNotFoundError`, or `StorageError` when it has more than `limit` bytes.
        """

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.  Raises `StorageNotFoundError`."""

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the writable 1-d byte `buffers`, one after another, from byte `start` on.

        Nothing may be written to them after this has returned or raised: the caller then reuses them.  Raises
        `StorageNotFoundError`, or `StorageError` when the file ends before the buffers are full.
        """

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the writable 1-d byte `buffer` with runs of `nbytes` bytes each, one after another.

        Run `k` begins at byte `starts[k]`; they ascend and do not overlap.  It is made for many small runs,
        so the work for each run has to be small.  A store without a better way calls
        `reknit.storage.ranges.read_runs`, which uses `read_into`.  Raises the errors of `read_into`.
        """

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted; empty when the root is missing."""

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below the folder `prefix`, in any order; a missing folder yields nothing."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing file is not an error.  Folders that become empty may vanish."""

    def sub(self, path: str) -> Storage:
        """Return the store rooted at the folder `path` of this one."""

    def close(self) -> None:
        """Release all connections and files that the store holds open."""


LONGEST_REQUEST_S = 900.0
"""Seconds after which no store carries out a request any more: the signatures of S3 and Azure end then."""


@runtime_checkable
class CommitsLate(Protocol):
    """A store that may carry out a commit after it was given up, though its marker is gone by then.

    In any other store the removal of the marker makes a commit impossible.
    """

    def swap(self, path: str, change: Callable[[bytes | None], bytes | None], *, limit: int) -> bool:
        """Replace a small file by the bytes that `change` makes of it, if nobody writes it meanwhile.

        `change` receives the content, None without a file, and is called again after a write of another
        process.  If it returns None, the file stays as it is.  Once the file is replaced by other bytes, the
        store refuses every commit that was sent before.  Returns False, and changes nothing, in a store
        without conditional writes: a commit may then be carried out as long as the store keeps a request.
        """


@runtime_checkable
class PerHost(Protocol):
    """A store of which each host has its own: a rank sees only the files of its host."""

    @property
    def folder(self) -> str:
        """Where on this host the files are."""


@runtime_checkable
class CopiesFiles(Protocol):
    """A store that can make a file of another one without its bytes passing through this process."""

    def copy_from(self, source: Storage, source_path: str, path: str, nbytes: int) -> bool:
        """Copy a finished file of `source`, which has `nbytes` bytes and stays, to the new file `path`.

        The file is then whole and durable as after `Writer.finish`, and later deletions of either leave the
        other as it is.  Damage done to one in place may be done to both.  `source` may be any store, also one
        that is closed.  Returns False if the store cannot copy, so that the file has to be written: the
        source is gone, has another size, or cannot be reached, or the store refuses.  Then, and after an
        error, `path` does not exist and will not appear.  Raises `StorageError` if the path already exists.
        """


@runtime_checkable
class HasMoved(Protocol):
    """The store of a checkpoint whose files may be at another place."""

    def files_at(self, place: str | None) -> Storage:
        """Return the store of a place, without a place the one in which the checkpoint was saved."""


@runtime_checkable
class HasDerivedFiles(Protocol):
    """A store that can keep another one, with files that this one makes of those of another program."""

    def with_derived(self, make: Callable[[Storage], Storage]) -> Storage:
        """Return the store that `make` makes of the one inside; it is closed with this one."""


@runtime_checkable
class HasFolderAbove(Protocol):
    """A store that can open the folder that holds its root, so that a root may prove to be a file."""

    def above(self) -> tuple[Storage, str] | None:
        """Return the store of that folder, and the name of the root there; None at the top of the store.

        It shares the connections of this store, and is not closed by itself.
        """


@runtime_checkable
class HasDates(Protocol):
    """A store that dates its files by a clock of its own, so that the clocks of hosts need not agree."""

    def age_s(self, path: str) -> float:
        """Return the seconds since the last change of a file, by the store's clock alone, never negative.

        The present time is the date of a file that is written for it, and that of this host if none
        can be written.  Raises `StorageNotFoundError`.
        """


class Dated(NamedTuple):
    """A content of a store with the time of its last change: seconds since the epoch, by the store's clock.

    `kind` is ``"file"`` for a file that `Storage.list` yields; ``"temporary"`` for a file of a write that is
    under way; ``"upload"`` for uploaded parts of a file that does not exist.  `path` is relative to the
    store's root.  For an upload, it is the path that the file would have.
    """

    kind: Literal["file", "temporary", "upload"]
    path: str
    nbytes: int
    modified: float
    upload_id: str = ""


@runtime_checkable
class Sweepable(Protocol):
    """A store that can list and remove all that it holds, also files that no reader sees."""

    @property
    def unseen(self) -> str | None:
        """The remains of killed processes that `dated` does not list, with their remedy; None without any."""

    def dated(self) -> Iterator[Dated]:
        """Yield all files below the root, in any order; files that come or go meanwhile may be missed."""

    def moment(self) -> float:
        """Return the present time by the store's clock, with which the dates of its files are compared.

        It is the date of a file that was just written; that of this host if this user cannot write.
        """

    def discard(self, found: Dated) -> None:
        """Remove a temporary file, or the parts of an upload; a missing file is not an error."""
