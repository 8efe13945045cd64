"""Any fsspec file system as a store, for places without a store of their own here."""

from __future__ import annotations

import errno
import logging
import tempfile
import threading
from contextlib import contextmanager, suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import (
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
    UsageError,
    shortage,
)
from reknit.plugins.store import (
    Listed,
    LocalStorage,
    Progress,
    Reading,
    TakenNames,
    check_path,
    existing,
    filled,
    is_temporary,
    missing,
    read_runs,
    removed,
    shorter,
    spread,
    too_large,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from reknit.options import Durability
    from reknit.plugins.store import Storage

logger = logging.getLogger("reknit")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNREACHED = "check the endpoint and the network, then try again"
_LIBRARY = "see the error of the library that serves it; if the problem is temporary, try again"
_PIECE_NBYTES = 16 << 20

warned: set[str] = set()


class FsspecStorage:
    """The files below a URL of fsspec.

    fsspec has no operations for three promises: only one of several processes that write one name at once
    succeeds; a reader never sees half a small file; and written files survive a loss of power.  Within one
    process, the first two hold.  A file is collected in a temporary file on the local disk until it is whole,
    and then uploaded in order.
    """

    def __init__(self, url: str, system: Any, root: str) -> None:
        """Use `open_fsspec`; `root` is the path of the folder in `system`."""
        self._url, self.system, self._root = url.rstrip("/"), system, root.rstrip("/")
        self.names, self._lock = TakenNames(), threading.RLock()

    @property
    def url(self) -> str:
        """The URL of the root."""
        return self._url

    @property
    def reading(self) -> Reading:
        """A request costs more than many bytes, wherever this is."""
        return Reading(gap_nbytes=4 << 20, waste=1.0, piece_nbytes=_PIECE_NBYTES)

    def create(self, path: str, nbytes: int) -> FsspecWriter:
        """Start a new file."""
        full = self._full(path)
        with self._lock, self._translated("create", path):
            self._check_place(path)
            if full in self.names or self._exists(full):
                raise existing(self._url_of(path))
            writer = FsspecWriter(self, path, full, nbytes)
            self.names.take(full, writer)
        return writer

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small file; with `if_absent`, look first whether it exists."""
        full = self._full(path)
        with self._lock, self._translated("write", path):
            self._check_place(path)
            if if_absent and (full in self.names or self._exists(full)):
                return False
            self.names.free(full)
            self._make_folder(full)
            self.system.pipe_file(full, bytes(data))
        return True

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Look for the file `pending`, put the other, and delete it."""
        with self._lock:
            self.size(pending)
            if placed := self.put(path, data, if_absent=if_absent):
                self.delete(pending)
        return placed

    def swap(self, path: str, change: Callable[[bytes | None], bytes | None], *, limit: int) -> bool:
        """Return False: fsspec has no conditional writes."""
        return False

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        with self._lock:
            nbytes = self.size(path)
            if nbytes > limit:
                raise too_large(self._url_of(path), nbytes, limit)
            with self._translated("read", path):
                return bytes(self.system.cat_file(self._full(path)))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        with self._translated("find", path):
            self.system.invalidate_cache()
            found = self.system.info(self._full(path))
            if found["type"] != "file":
                raise FileNotFoundError(self._url_of(path))
            return int(found["size"])

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Fill the buffers from one read of a range."""
        out = filled(start, buffers)
        wanted = sum(map(len, out))
        if not wanted:
            self.size(path)
            return
        with self._translated("read", path):
            data = self.system.cat_file(self._full(path), start=start, end=start + wanted)
        if len(data) < wanted:
            raise shorter(self._url_of(path), start, start + wanted, start + len(data))
        spread(np.frombuffer(data, np.uint8), out)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Fill the buffer with runs."""
        read_runs(self.read_into, path, starts, nbytes, buffer)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        return sorted({entry.path.partition("/")[0] for entry in self.list() if "/" in entry.path})

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Return every file below a folder."""
        folder = self._full(prefix) if prefix else self._root
        with self._translated("list", prefix):
            self.system.invalidate_cache()
            try:
                found = self.system.find(folder, detail=True)
            except FileNotFoundError:
                found = {}
        base = f"{self._root.lstrip('/')}/"
        entries = ((name.lstrip("/"), info) for name, info in found.items())
        named = ((name.removeprefix(base), info) for name, info in entries if name.startswith(base))
        hidden = any(map(is_temporary, prefix.split("/")))
        return (
            Listed(name, int(info["size"]))
            for name, info in named
            if not hidden and not any(map(is_temporary, name.split("/"))) and name != prefix
        )

    def delete(self, path: str) -> None:
        """Remove a file."""
        full = self._full(path)
        with self._lock, self._translated("delete", path):
            self.names.free(full)
            self.system.invalidate_cache()
            if not self.system.exists(full):
                return
            if self.system.info(full)["type"] != "file":
                raise StorageError(
                    f"cannot delete {self._url_of(path)}: it is a folder", path=self._url_of(path)
                )
            self.system.rm_file(full)

    def sub(self, path: str) -> FsspecStorage:
        """Return the store rooted at a folder of this one."""
        below = copy(self)
        below._url, below._root = self._url_of(path), self._full(path)
        return below

    def above(self) -> tuple[FsspecStorage, str] | None:
        """Return the store of the folder that holds the root, and the name of the root there."""
        holder = copy(self)
        holder._root, _, name = self._root.rpartition("/")
        holder._url = self._url.rpartition("/")[0]
        return (holder, name) if name and self._url.endswith(f"/{name}") else None

    def close(self) -> None:
        """Do nothing: fsspec keeps its file systems for the whole process."""

    def place(self, writer: FsspecWriter, path: str, full: str, source: Any) -> None:
        """Upload a file that is whole."""
        with self._translated("write", path):
            self._require_own(writer, path, full)  # a file put in its place meanwhile stays
            self._make_folder(full)
            try:
                with self.system.open(full, "wb") as target, _discarding(target):
                    while piece := source.read(_PIECE_NBYTES):
                        target.write(piece)
                with self._lock:
                    self._require_own(writer, path, full)
                    self.names.free(full)
            except BaseException:
                with suppress(Exception):  # the first error is the one to raise
                    if self.system.exists(full):
                        self.system.rm_file(full)
                raise

    def _require_own(self, writer: FsspecWriter, path: str, full: str) -> None:
        if not self.names.has(full, writer):
            raise removed(self._url_of(path))

    def _make_folder(self, full: str) -> None:
        self.system.makedirs(full.rpartition("/")[0], exist_ok=True)

    def _exists(self, full: str) -> bool:
        self.system.invalidate_cache()
        return bool(self.system.exists(full))

    def _check_place(self, path: str) -> None:
        """Refuse a file in the place of a folder, and a folder in the place of a file."""
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = self._full("/".join(parts[:end]))
            if above in self.names or self.system.isfile(above):
                raise StorageError(f"{self._url_of(path)} lies below a file", path=self._url_of(path))
        full = self._full(path)
        if self.names.below(full) or (self.system.isdir(full) and self.system.find(full)):
            raise StorageError(f"{self._url_of(path)} is a folder", path=self._url_of(path))

    def _full(self, path: str) -> str:
        return f"{self._root}/{check_path(path, self._url)}"

    def _url_of(self, path: str) -> str:
        return f"{self._url}/{path}" if path else self._url

    @contextmanager
    def _translated(self, action: str, path: str) -> Iterator[None]:
        """Translate the errors of the library that serves the URL."""
        where = self._url_of(path)
        try:
            yield
        except (StorageError, UsageError):
            raise
        except FileNotFoundError as error:
            raise missing(where) from error
        except PermissionError as error:
            raise StoragePermissionError(
                f"cannot {action} {where}: {error}",
                remedy="check the credentials that fsspec has for this file system, and that they may list, "
                "read, write and delete there",
                path=where,
            ) from error
        except (ConnectionError, TimeoutError) as error:
            raise StorageUnavailableError(
                f"cannot {action} {where}: {error!r}", remedy=_UNREACHED, path=where
            ) from error
        except Exception as error:  # libraries behind fsspec have errors of their own, of any type
            full = getattr(error, "errno", None) in _FULL
            kind, remedy = (StorageFullError, "free space there") if full else (StorageError, _LIBRARY)
            raise shortage(error) or kind(
                f"cannot {action} {where}: {error!r}", remedy=remedy, path=where
            ) from error


class FsspecWriter:
    """A file that is gathered on the local disk until it is whole."""

    def __init__(self, storage: FsspecStorage, path: str, full: str, nbytes: int) -> None:
        self._storage, self._path, self._full = storage, path, full
        self._url = f"{storage.url}/{path}"
        self._progress = Progress(self._url, nbytes)
        self._lock = threading.Lock()
        with self._gathering("set TMPDIR to a writable folder"):
            self._file = tempfile.TemporaryFile(prefix="reknit-")  # noqa: SIM115 - closed by finish or abort

    def write(self, start: int, data: memoryview) -> None:
        """Put `data` into its place."""
        data = data.cast("B")
        with self._lock:
            self._progress.check(start, data.nbytes)
            with self._gathering("set TMPDIR to a folder of another disk"):
                self._file.seek(start)
                self._file.write(data)
            self._progress.add(data.nbytes)

    def finish(self) -> None:
        """Upload the file."""
        with self._lock:
            self._progress.check_open("finish")
            self._progress.end()
            try:
                self._progress.check_whole()
                self._file.seek(0)
                self._storage.place(self, self._path, self._full, self._file)
            finally:
                self._file.close()
                self._storage.names.free(self._full, self)

    @contextmanager
    def _gathering(self, remedy: str) -> Iterator[None]:
        """Translate the errors of the temporary file."""
        try:
            yield
        except OSError as error:
            kind: type[StorageError] = StorageError
            if error.errno in _FULL:
                kind, remedy = StorageFullError, f"free space in {tempfile.gettempdir()}, or {remedy}"
            message = f"cannot write {self._url} to a temporary file: {error}"
            raise shortage(error) or kind(message, remedy=remedy, path=self._url) from error

    def abort(self) -> None:
        """Give up, unless the file is finished."""
        with self._lock:
            self._progress.end()
            self._file.close()
        self._storage.names.free(self._full, self)


@contextmanager
def _discarding(target: Any) -> Iterator[None]:
    """After an exception, discard an upload, which the `close` of a file of fsspec would complete."""
    from fsspec.spec import AbstractBufferedFile

    try:
        yield
    except BaseException:
        if isinstance(target, AbstractBufferedFile):
            with suppress(Exception):  # the first error is the one to raise
                target.discard()
            target.closed = True
        raise


def open_fsspec(url: str, durability: Durability = "power") -> Storage:
    """Return the store at a URL of fsspec, and warn once of the missing guarantees.

    Folders of this machine have a store of their own, which promises more, and follows no link.  Raises
    `ImportError` if fsspec, or the package that serves this protocol, is not installed, and
    `StorageUnavailableError`.
    """
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError):  # nothing serves this protocol
        raise
    except Exception as error:  # some connect at once
        remedy = "check the URL with its options, and the credentials and the network of this process"
        raise StorageUnavailableError(f"cannot open {url}: {error!r}", remedy=remedy, path=url) from error
    if isinstance(system, fsspec.get_filesystem_class("file")):
        return LocalStorage(root, durability=durability)
    scheme = url.partition(":")[0]
    if scheme not in warned:
        warned.add(scheme)
        logger.warning(
            "%s:// is served by fsspec, which has no conditional writes: do not let two jobs save to one "
            "path at once; it also needs more memory and processor time than reknit's own stores",
            scheme,
        )
    return FsspecStorage(url, system, root)
