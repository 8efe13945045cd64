"""An HDFS folder as a store."""

from __future__ import annotations

import uuid
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from reknit.errors import (
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)
from reknit.plugins.store import (
    Dated,
    ExistingError,
    Listed,
    Reading,
    check_path,
    checked_runs,
    existing,
    filled,
    is_temporary,
    kind_of,
    missing,
    now,
    with_retries,
)
from reknit.stores.hdfs.client import HdfsClient
from reknit.stores.hdfs.config import HdfsPath, parse_url
from reknit.stores.hdfs.reading import GAP_NBYTES, BlockReaders
from reknit.stores.hdfs.requests import requests_of
from reknit.stores.hdfs.upload import BlockPlacement, HdfsNames, HdfsWriter, decoded, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reknit.options import Durability
    from reknit.plugins.store import Storage

_STALE_S = 86_400.0
"""Age above which a temporary file belongs to a dead write."""


def open_hdfs(url: str, durability: Durability = "power") -> HdfsStorage:
    """Return the store at ``hdfs://host:port/folder``; nothing is sent yet."""
    return HdfsStorage(parse_url(url, durability))


@with_retries(resumes=True)
def open_with_retries(url: str, durability: Durability) -> Storage:
    """Return the store, with retries."""
    return open_hdfs(url, durability)


class HdfsStorage:
    """The files below a folder, which is made with the first file.

    Every atomic step is a rename, which the NameNode does atomically.  A file larger than a part is written
    as several sub-files in parallel, which the NameNode then joins without moving a byte.

    A folder is listed when the first file is created there.  A file of the same name that another process has
    created since is found at the end of the write, and stays.
    """

    def __init__(self, place: HdfsPath) -> None:
        self.place = place
        self.client = HdfsClient(place)
        self.requests = requests_of(self.client.cluster, place.options)
        self.placement = BlockPlacement(self.client, self.requests)
        self._names = HdfsNames()
        self._readers = BlockReaders(self.client)

    @property
    def url(self) -> str:
        """The cluster and the folder."""
        return self.place.url

    @property
    def reading(self) -> Reading:
        """A request costs as much as a megabyte; large reads are done in several at once."""
        return Reading(gap_nbytes=GAP_NBYTES, waste=0.5, piece_nbytes=16 << 20)

    def create(self, path: str, nbytes: int) -> HdfsWriter:
        """Start a new file; no other thread of this process gets its name meanwhile."""
        full = self._full(path)
        writer = HdfsWriter(
            self.client,
            full,
            nbytes,
            requests=self.requests,
            placing=self.placement,
            names=self._names,
            prune=self._prune,
        )
        if not self._names.take(full, writer):
            raise existing(self.client.url(full))
        self._readers.drop(full)
        try:
            self._look_up(full.rpartition("/")[0])
            if self._names.taken(full) and self.client.find(full) is not None:
                raise existing(self.client.url(full))
        except BaseException:
            self._names.free(full, writer)
            raise
        return writer

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a temporary file and rename it; after an error, the files show whether it was renamed."""
        full = self._full(path)
        if if_absent and full in self._names:
            return False
        temporary = f"{full.rpartition('/')[0]}/.{uuid.uuid4().hex}.tmp"
        try:
            self.placement.write(temporary, [bytes(data)] if data else [])
            self._move(temporary, full, data, overwrite=not if_absent)
        except ExistingError:
            self.client.discard(temporary)
            return False
        except StorageError:
            self.client.discard(temporary)
            raise
        self._taken(full)
        return True

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Write into the file `pending`, and then rename it to `path`.

        The NameNode thus checks and commits atomically.  A writer that was suspended in between finds the
        file gone, and no reader ever sees its bytes.
        """
        full, marker = self._full(path), self._full(pending)
        if if_absent and full in self._names:
            return False
        try:
            self._fill(marker, bytes(data))
            self._move(marker, full, data, overwrite=not if_absent)
        except ExistingError:
            return False
        except StorageNotFoundError as error:
            raise missing(self.client.url(marker)) from error
        self._names.drop(marker)
        self._taken(full)
        return True

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small file."""
        return self._readers.whole(self._full(path), limit)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        full = self._full(path)
        found = self.client.stat(full)
        if found.isdir:
            raise missing(self.client.url(full))
        return found.length

    def age_s(self, path: str) -> float:
        """Return the seconds since the last change of a file, by the clock of the NameNode."""
        written: float = self.client.stat(self._full(path)).modification_time / 1000
        return max(0.0, self.moment() - written)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Read ranges, several in parallel, into the buffers."""
        if out := filled(start, buffers):
            self._readers.fill(self._full(path), start, out)
        else:
            self.size(path)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Read neighbouring runs in one request, and several requests in parallel."""
        out = checked_runs(starts, nbytes, buffer)
        if not out.size:
            self.size(path)
            return
        self._readers.take(self._full(path), starts, nbytes, out)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        found = self.client.entries(self.place.folder)
        return sorted(decoded(entry.path.rpartition("/")[2]) for entry in found if entry.isdir)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield the files below a folder, one folder after another, without sub-files."""
        folder = self._full(prefix) if prefix else self.place.folder
        return (Listed(found.path, found.nbytes) for found in self._walk(folder) if found.kind == "file")

    def delete(self, path: str) -> None:
        """Remove a file and the folders that become empty, but never the root."""
        full = self._full(path)
        self._names.free(full)
        try:
            found = self.client.delete(full)
        except StorageNotFoundError:
            found = False
        finally:
            self._names.drop(full)
            self._readers.drop(full)
        if found:  # else the path above need not be a folder
            self._prune(full.rpartition("/")[0])

    def sub(self, path: str) -> HdfsStorage:
        """Return the store rooted at a folder; it shares the client with this one."""
        below = copy(self)
        below.place = replace(self.place, folder=self._full(path))
        return below

    def above(self) -> tuple[HdfsStorage, str] | None:
        """Return the store of the folder that holds the root, and the name of the root there."""
        folder, _, name = self.place.folder.rpartition("/")
        holder = copy(self)
        holder.place = replace(self.place, folder=folder)
        return (holder, decoded(name)) if name else None

    @property
    def unseen(self) -> str | None:
        """None: every file in HDFS has a name and is listed."""
        return None

    def dated(self) -> Iterator[Dated]:
        """Yield the files below the root, also sub-files; files under way have the date of their creation."""
        return self._walk(self.place.folder)

    def moment(self) -> float:
        """Return the present time by the clock of the NameNode, of this host where no file can be written."""
        temporary = f"{self.place.folder}/.{uuid.uuid4().hex}.tmp"
        try:
            self.placement.write(temporary, [])
            written: float = self.client.stat(temporary).modification_time / 1000
        except (StoragePermissionError, StorageFullError):
            return now()
        finally:
            self.client.discard(temporary)
        return written

    def discard(self, found: Dated) -> None:
        """Remove a sub-file and the folders that become empty, but never the root."""
        full = f"{self.place.folder}/{encoded(found.path)}"
        with suppress(StorageNotFoundError):
            self.client.delete(full)
        self._prune(full.rpartition("/")[0])

    def close(self) -> None:
        """Close connections and forget where blocks are; the store stays usable."""
        self._readers.drop()
        if self.requests is not None:
            self.requests.close()

    def set_storage_policy(self, folder: str, policy: str) -> None:
        """Set the storage policy for new files of a folder, such as ``"COLD"``; a mover moves older files.

        Raises `StorageError` if the cluster cannot be asked, see ``concat`` in the options of the URL.
        """
        full = self._full(folder)
        if self.requests is None:
            raise StorageError(
                f"there is no WebHDFS address to set a storage policy on {self.client.url(full)}",
                remedy="give the address of WebHDFS, as ?webhdfs=http://namenode:9870 in the URL",
                path=self.client.url(full),
            )
        self.requests.set_policy(full, policy, self.client.url(full))

    def _prune(self, folder: str) -> None:
        """Remove a folder and those above it as far as they are empty, but never the root."""
        while folder.startswith(f"{self.place.folder}/"):
            try:
                self.client.delete(folder)
            except StorageError:  # it is not empty, or it is nothing that this user may remove
                return
            self._names.drop(folder)
            folder = folder.rpartition("/")[0]

    def _full(self, path: str) -> str:
        """Return the absolute path of a file in HDFS."""
        return f"{self.place.folder}/{encoded(check_path(path, self.url))}"

    def _move(self, source: str, target: str, data: bytes, *, overwrite: bool) -> None:
        """Rename a file with these bytes, whether or not the answer arrives.

        Another save may have removed a marker, and committed a manifest of the same length: the bytes decide.
        """
        try:
            self.client.rename(source, target, overwrite=overwrite)
        except (StorageNotFoundError, ExistingError, StorageUnavailableError):
            if not self.client.has_moved(source, target, len(data)):
                raise
            if self._readers.whole(target, len(data)) != bytes(data):
                raise

    def _taken(self, full: str) -> None:
        """Note that a file has just been created."""
        self._names.free(full)
        self._names.add(full)
        self._readers.drop(full)

    def _look_up(self, folder: str) -> None:
        """Make a folder and list it, once; remove the temporary files of dead writers."""
        if self._names.is_listed(folder):
            return
        if folder:
            self.client.make_folder(folder)
        names, entries = set(), list(self.client.entries(folder))
        # The newest date there is by the clock of the NameNode, which may differ from that of this host.
        newest = max((entry.modification_time for entry in entries), default=0)
        for entry in entries:
            name = entry.path.rpartition("/")[2]
            if not is_temporary(name):
                names.add(name)
            elif not entry.isdir and (newest - entry.modification_time) / 1000 > _STALE_S:
                self.client.discard(f"{folder}/{name}")
        self._names.set_names(folder, names)

    def _fill(self, marker: str, data: bytes) -> None:
        """Write a commit's content into its marker, or the rest of it after a failed attempt."""
        url = self.client.url(marker)
        there = self.client.stat(marker).length
        if there and self._readers.whole(marker, len(data)) != data[:there]:
            raise StorageError(
                f"{url} has other content than this commit",
                remedy="use a new marker for each commit",
                path=url,
            )
        if there == len(data):
            return
        try:
            self.placement.append(marker, data[there:], new=not there)
        except ExistingError as error:
            self.client.recover(marker)
            raise StorageUnavailableError(
                f"{url} is still open from a failed attempt",
                remedy="the NameNode closes it within seconds: try again",
                path=url,
            ) from error

    def _walk(self, folder: str) -> Iterator[Dated]:
        for entry in self.client.entries(folder):
            path = decoded(entry.path[len(self.place.folder) + 1 :])
            if not entry.path.startswith(f"{folder}/"):
                continue  # a file in the place of the folder
            if entry.isdir:
                yield from self._walk(entry.path)
            elif (kind := kind_of(path)) is not None:
                yield Dated(kind, path, entry.length, entry.modification_time / 1000)
