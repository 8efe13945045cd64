"""The store interface: whole immutable files, ranged reads, and small atomic writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray


class Listed(NamedTuple):
    """A file that a store lists: its path relative to the store's root, and its size in bytes."""

    path: str
    nbytes: int


class Reading(NamedTuple):
    """How a store likes to be read; as it stands, a local disk.

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
        """Give up and remove what was written; never raises for a store that is already failing."""


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
        """Write a small file as `put` does, but only while the file `pending` is there, which it uses up.

        `pending` is an empty file in the same folder, made with `put`.  It belongs to the caller alone, who
        commits one content with it; whoever deletes it keeps him from ever writing `path`.  Raises
        `StorageNotFoundError` when it is gone; nothing was changed then.  Where the answer is False, as with
        `put`, it is still there, but holds anything.

        After any other error, or one from a network that repeats requests, only reading `path` tells what
        happened.  Where the store can, look and write are one atomic step; where it cannot, it looks, and
        then puts, and its documentation says how far that carries.
        """

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file.

        Raises `StorageNotFoundError`, or `StorageError` when it has more than `limit` bytes.
        """

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.  Raises `StorageNotFoundError`."""

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the writable 1-d byte `buffers`, one after another, from byte `start` on.

        Nothing may be written to them once this has returned or raised: they then serve for other things.
        Raises `StorageNotFoundError`, or `StorageError` when the file ends before the buffers are full.
        """

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the writable 1-d byte `buffer` with runs of `nbytes` bytes each, one after another.

        Run `k` begins at byte `starts[k]`; they ascend and do not overlap.  Made for many small runs, so it
        pays to do little for each.  Where nothing better is to be had, `reknit.storage.ranges.read_runs` does
        it by means of `read_into`.  Raises as that does.
        """

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted; empty when the root is missing."""

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield every file below the folder `prefix`, in any order; a missing folder yields nothing."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is no error.  Folders that become empty may vanish."""

    def sub(self, path: str) -> Storage:
        """Return the store rooted at the folder `path` of this one."""

    def close(self) -> None:
        """Release what the store holds open."""


@runtime_checkable
class PerHost(Protocol):
    """A store of which each host has one of its own: nobody sees what ranks of other hosts put there."""

    @property
    def folder(self) -> str:
        """Where on this host the files are."""


@runtime_checkable
class CopiesFiles(Protocol):
    """A store that can make a file of another one without its bytes passing through this process."""

    def copy_from(self, source: Storage, source_path: str, path: str, nbytes: int) -> bool:
        """Make the new file `path` of a finished file of `source`; that has `nbytes` bytes, and stays.

        The file is then whole and durable as after `Writer.finish`, and later deletions of either leave the
        other as it is.  Damage done to one in place may be done to both.  `source` may be any store, also one
        that is closed.  Returns False where this cannot be done, so that the file has to be written: the
        source is gone, has another size, or is out of reach, or the store refuses.  Nothing is at `path`
        then, and nothing will be, nor after an error; `StorageError` when the path already exists.
        """


class Dated(NamedTuple):
    """Something that a store holds, and when it was last changed: seconds since the epoch, by its own clock.

    `kind` is ``"file"`` for what `Storage.list` yields; ``"temporary"`` for what has no name of its own, and
    is part of no file yet; ``"upload"`` for parts that are up of a file that does not exist.  `path` is
    relative to the store's root, that of an upload is where the file would be.
    """

    kind: Literal["file", "temporary", "upload"]
    path: str
    nbytes: int
    modified: float
    upload_id: str = ""


@runtime_checkable
class Sweepable(Protocol):
    """A store that can tell all it holds, also what no reader sees, and remove it."""

    @property
    def unseen(self) -> str | None:
        """What killed processes leave here that `dated` does not tell, and what removes it; None if none."""

    def dated(self) -> Iterator[Dated]:
        """Yield all that is below the root, in any order.  What comes or goes meanwhile may be missed."""

    def discard(self, found: Dated) -> None:
        """Remove a temporary file, or the parts of an upload; what is gone already is no error."""
