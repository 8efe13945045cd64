"""Write one HDFS file: its sub-files become one file, which then gets its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import StorageError, StorageNotFoundError, StorageUnavailableError
from reknit.storage.errors import ExistingError, removed
from reknit.storage.hdfs.upload import SubFiles
from reknit.storage.writing import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.hdfs.client import HdfsClient
    from reknit.storage.hdfs.known_names import HdfsNames
    from reknit.storage.hdfs.placement import BlockPlacement
    from reknit.storage.hdfs.rpc import Requests

_MOST_SOURCES = 64
"""Sub-files that are joined in one request."""


class HdfsWriter:
    """A file that is being written; nothing has its name before `finish` returns."""

    def __init__(
        self,
        client: HdfsClient,
        path: str,
        nbytes: int,
        *,
        requests: Requests | None,
        placing: BlockPlacement,
        names: HdfsNames,
        prune: Callable[[str], None],
    ) -> None:
        self._client, self._requests, self._names = client, requests, names
        self._path, self._nbytes, self._prune = path, nbytes, prune
        self._url = client.url(path)
        self._progress = Progress(self._url, nbytes)
        self.upload = SubFiles(client, placing, path.rpartition("/")[0], nbytes, split=requests is not None)
        self._joined = 1
        """Sub-files that are joined to the first, which is included."""
        self._lengths = [part.missing for part in self.upload.parts]

    def write(self, start: int, data: memoryview) -> None:
        """Copy `data`, and start to upload complete sub-files; wait while too many are in flight."""
        data = data.cast("B")
        self._progress.check(start, data.nbytes)
        if data.nbytes:
            self.upload.write(start, data)
        self._progress.add(data.nbytes)

    def finish(self) -> None:
        """Join the sub-files and give the file its name, unless the name is taken.

        After a `StorageUnavailableError` it may be called again, and continues.
        """
        self._progress.check_open("finish")
        self._progress.check_whole()
        self.upload.finish()
        self._join()
        if not self._names.has(self._path, self):
            raise removed(self._url)
        self._give_name()
        self._progress.end()
        self._names.add(self._path)
        self._names.free(self._path, self)

    def abort(self) -> None:
        """Remove the sub-files and release the name; do nothing if the file is finished."""
        if self._progress.end():
            self.upload.give_up()
            self._prune(self._path.rpartition("/")[0])
        self._names.free(self._path, self)

    def _join(self) -> None:
        """Move the blocks of all sub-files to the first one; if the answer is lost, check its length."""
        first, *_ = names = self.upload.names
        while self._requests is not None and self._joined < len(names):
            last = min(self._joined + _MOST_SOURCES, len(names))
            try:
                self._requests.concat(first, names[self._joined : last], self._url)
            except StorageError:
                if self._client.stat(first).length != sum(self._lengths[:last]):
                    raise
            self._joined = last

    def _give_name(self) -> None:
        """Rename the sub-file in one step of the NameNode, and not onto an existing file.

        No other process uses the sub-file, so after an error the files show whether it was carried out.
        """
        first = self.upload.names[0]
        try:
            self._client.rename(first, self._path, overwrite=False)
        except (StorageNotFoundError, ExistingError, StorageUnavailableError):
            self._names.add(self._path)
            if not self._client.has_moved(first, self._path, self._nbytes):
                raise
