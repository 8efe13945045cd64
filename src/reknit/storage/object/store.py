"""A bucket as a store: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage."""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import obstore
from obstore import exceptions

from reknit.errors import StorageError, StorageNotFoundError
from reknit.storage.base import Listed, Reading, TakenNames, existing, missing, shorter
from reknit.storage.object import upload
from reknit.storage.object.client import (
    Bucket,
    Client,
    ObjectOptions,
    as_ours,
    connect,
    forks,
    parse_url,
    translated,
)
from reknit.storage.object.conditions import Conditions, look, whole
from reknit.storage.object.upload import ObjectWriter, copied
from reknit.storage.paths import check_path
from reknit.storage.ranges import checked_runs, filled, near, read_runs, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from reknit.storage.base import Dated, Storage


_NUM_LOCKS = 64
_AT_ONCE = 4
"""Parts that one read asks for at once."""
_GAP_NBYTES = 1 << 20


def open_object(url: str) -> ObjectStorage:
    """Return the store at ``scheme://bucket/prefix``; nothing is sent yet."""
    return ObjectStorage(*parse_url(url))


@dataclass
class _Bucket:
    """The state that the stores of one bucket share."""

    conditions: Conditions
    names: TakenNames = field(default_factory=TakenNames)
    committing: threading.Lock = field(default_factory=threading.Lock)
    locks: list[threading.RLock] = field(
        default_factory=lambda: [threading.RLock() for _ in range(_NUM_LOCKS)]
    )


class ObjectStorage:
    """The objects of a bucket whose names begin with a prefix.

    The client is shared with all stores below this one.  A process that was forked after the first request
    must not use it: see `reknit.storage.object.client.connect`.

    A file of at most one part is created on the condition that it does not exist.  A larger file is looked up
    when it is begun, and again when its parts become one object.  Within a process, only one writer can write
    a large file at a time; between processes the later writer wins.
    """

    def __init__(self, place: Bucket, options: ObjectOptions | None = None) -> None:
        self.place, self.options = place, options or ObjectOptions()
        client = connect(place, self.options)
        self._uploading = connect(place, self.options, uploading=True)
        self.bucket = _Bucket(Conditions(client, place, self.options))
        self._client = client
        self._folders: set[str] = set()

    @property
    def url(self) -> str:
        """The scheme, the bucket and the prefix."""
        return self.place.url

    @property
    def reading(self) -> Reading:
        """A request costs as much as reading a megabyte, so a read skips only holes larger than on a disk."""
        return Reading(gap_nbytes=_GAP_NBYTES, waste=0.5, piece_nbytes=self.options.part_nbytes)

    def create(self, path: str, nbytes: int) -> ObjectWriter:
        """Start a new file; no other thread of this process gets its name meanwhile."""
        key, url = self._full(path)
        names, conditions = self.bucket.names, self.bucket.conditions
        writer = ObjectWriter(
            self._uploading, key, url, nbytes, options=self.options, names=names, conditions=conditions
        )
        if not names.take(key, writer):
            raise existing(url)
        try:
            if look(self._client, key, url) is not None:
                raise existing(url)
            self._check_place(path)
        except BaseException:
            writer.abort()
            raise
        return writer

    def copy_from(self, source: Storage, source_path: str, path: str, nbytes: int) -> bool:
        """Let the service copy an object of the same bucket.

        Azure may continue the copy after its answer, and the client does not report that, so on Azure a file
        is written.
        """
        key, url = self._full(path)
        if not isinstance(source, ObjectStorage) or not self._shares_bucket(source):
            return False
        old = source._full(source_path)[0]
        with self._lock(key):
            if key in self.bucket.names or look(self._client, key, url) is not None:
                raise existing(url)
            self._check_place(path)
            return copied(self._uploading, old, key, url, nbytes)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        """Write a small object in one request, with `if_absent` on the condition that it does not exist."""
        key, url = self._full(path)
        self._check_place(path)
        data = bytes(data)
        if if_absent:
            with self._lock(key):  # servers delay simultaneous requests for seconds
                return key not in self.bucket.names and self.bucket.conditions.put(key, url, data, None)
        with translated("write", url):
            obstore.put(self._client, key, data, use_multipart=False)
        self.bucket.names.free(key)
        return True

    def commit(self, path: str, data: bytes, *, pending: str, if_absent: bool) -> bool:
        """Look for `pending`, then put on the condition that `path` is still the same as before the look.

        Within a process that is one step.  Between processes it is not: if another process deletes `pending`
        after the look, `path` may still be written within the time of one request.  But a process that was
        stopped after its look, however long, writes nothing if another process has committed since.
        """
        (key, url), (marker, marker_url) = self._full(path), self._full(pending)
        self._check_place(path)
        with self._lock(marker), self.bucket.committing:
            while True:
                seen = look(self._client, key, url)
                if look(self._client, marker, marker_url) is None:
                    raise missing(marker_url)
                if if_absent and seen is not None:
                    return False
                if self.bucket.conditions.put(key, url, bytes(data), seen):
                    self.bucket.names.free(key)
                    self._delete(self._client, marker, marker_url)
                    return True
                # Another process has committed since: begin again, with the look for the marker, which it may
                # have removed.  With `if_absent` that ends the commit.

    def swap(self, path: str, change: Callable[[bytes | None], bytes | None], *, limit: int) -> bool:
        """Put the changed bytes on the condition that the object is still the one that was read."""
        return self.bucket.conditions.swap(*self._full(path), change, limit)

    def get(self, path: str, *, limit: int) -> bytes:
        """Return a whole small object; a larger one is not fetched."""
        return whole(self._client, *self._full(path), limit)[0]

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        return self._size(*self._full(path))

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        """Request the range in several concurrent parts, and copy them into the buffers."""
        key, url = self._full(path)
        out = filled(start, buffers)
        end = start + sum(len(buffer) for buffer in out)
        if start == end:
            self._size(key, url)
            return
        part = self.options.part_nbytes
        for first in range(start, end, part * _AT_ONCE):
            last = min(first + part * _AT_ONCE, end)
            for data in self._ranges(key, url, first, last, part):
                spread(data, out)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Request many runs concurrently, nearby runs in one request."""
        out = checked_runs(starts, nbytes, buffer)
        if not out.size or near(starts):
            read_runs(self.read_into, path, starts, nbytes, buffer)
            return
        key, url = self._full(path)
        first, last = int(starts[0]), int(starts[-1]) + nbytes
        self._check_reaches(key, url, first, last)
        at_once = max(1, self.options.part_nbytes * _AT_ONCE // (nbytes + _GAP_NBYTES))
        for k in range(0, len(starts), at_once):
            some = starts[k : k + at_once].tolist()
            with translated("read", url):
                found = obstore.get_ranges(
                    self._client, key, starts=some, lengths=[nbytes] * len(some), coalesce=_GAP_NBYTES
                )
            for row, data in zip(out[k : k + at_once], found, strict=True):
                if len(data) != nbytes:
                    raise StorageError(f"{url} gave {len(data)} bytes instead of {nbytes}", path=url)
                np.copyto(row, np.frombuffer(memoryview(data), np.uint8))

    def folders(self) -> list[str]:
        """Return the names of the folders directly below the root, sorted."""
        with translated("list", self.url):
            found = obstore.list_with_delimiter(self._client, self.place.prefix.rstrip("/") or None)
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"])

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Yield the objects below a folder while the bucket lists them."""
        folder, url = self._full(prefix) if prefix else (self.place.prefix.rstrip("/"), self.url)
        found = upload.objects(self._client, self.place, folder, url)
        return (Listed(one.path, one.nbytes) for one in found if one.kind == "file")

    def delete(self, path: str) -> None:
        """Remove an object; a file that this process is writing will not appear.

        The client sends the request once, so that the caller counts the attempts.
        """
        key, url = self._full(path)
        with self._lock(key):
            if self._is_folder(key, url):
                raise StorageError(f"cannot delete {url}: it is a folder", path=url)
            self.bucket.names.free(key)
            self._delete(self.bucket.conditions.once, key, url)

    def sub(self, path: str) -> ObjectStorage:
        """Return the store rooted at a folder; it shares the client with this one."""
        below = copy(self)
        below.place = replace(self.place, prefix=f"{self._full(path)[0]}/")
        below._folders = set()
        return below

    def above(self) -> tuple[ObjectStorage, str] | None:
        """Return the store of the prefix that is one name shorter, and that name."""
        folder, _, name = self.place.prefix.rstrip("/").rpartition("/")
        holder = copy(self)
        holder.place, holder._folders = replace(self.place, prefix=f"{folder}/" if folder else ""), set()
        return (holder, name) if name else None

    @property
    def unseen(self) -> str | None:
        """The unfinished uploads that the store does not list, with their remedy."""
        return upload.unseen(self.place)

    def dated(self) -> Iterator[Dated]:
        """Yield all objects, also temporary objects, and on S3 unfinished uploads."""
        return upload.dated(self._client, self.place, self.options)

    def moment(self) -> float:
        """Return the present time by the clock of the bucket."""
        return upload.moment(self._client, self.place)

    def age_s(self, path: str) -> float:
        """Return the seconds since an object was written, by the clock of the bucket."""
        return upload.age_s(self._client, self.place, *self._full(path))

    def discard(self, found: Dated) -> None:
        """Remove a temporary object, or abort an upload."""
        upload.discard(self._client, self.place, self.options, found)

    def close(self) -> None:
        """Do nothing: the client ends with the last store that uses it."""

    def _full(self, path: str) -> tuple[str, str]:
        """Return the name of an object in the bucket, and its URL."""
        forks.check(self.url)
        key = self.place.prefix + check_path(path, self.url)
        return key, f"{self.place.scheme}://{self.place.bucket}/{key}"

    def _shares_bucket(self, other: ObjectStorage) -> bool:
        """Return whether another store's objects are in the same bucket, and can be copied within it."""
        mine, its = (
            (s.place.scheme, s.place.bucket, s.options.endpoint, s.options.region) for s in (self, other)
        )
        return mine == its and self.place.scheme != "az"

    def _lock(self, key: str) -> threading.RLock:
        return self.bucket.locks[hash(key) % _NUM_LOCKS]

    def _size(self, key: str, url: str) -> int:
        with translated("find", url):
            return obstore.head(self._client, key)["size"]

    def _check_reaches(self, key: str, url: str, start: int, end: int) -> None:
        """Raise an error unless an object has at least `end` bytes."""
        nbytes = self._size(key, url)
        if nbytes < end:
            raise shorter(url, start, end, nbytes)

    def _delete(self, client: Client, key: str, url: str) -> None:
        with translated("delete", url):
            try:
                obstore.delete(client, key)
            except FileNotFoundError as error:
                if not isinstance(as_ours("delete", url, error), StorageNotFoundError):
                    raise

    def _is_folder(self, key: str, url: str) -> bool:
        with translated("list", url):
            return any(len(chunk) for chunk in obstore.list(self._client, key, chunk_size=1))

    def _check_place(self, path: str) -> None:
        """Refuse a file in the place of a folder, and a folder in the place of a file.

        A bucket could hold both.  The files may be copied to other stores, which cannot.  No guarantee
        depends on this check: a folder that is made at the same moment is not noticed.
        """
        key, url = self._full(path)
        names = path.split("/")
        for depth in range(1, len(names)):
            above, above_url = self._full("/".join(names[:depth]))
            if above not in self._folders:
                if look(self._client, above, above_url) is not None:
                    raise StorageError(f"{above_url} is a file, so {url} cannot exist", path=url)
                self._folders.add(above)
        if self._is_folder(key, url):
            raise StorageError(f"{url} is a folder, so it cannot be a file", path=url)

    def _ranges(self, key: str, url: str, first: int, last: int, part: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a range, in parts."""
        starts = [*range(first, last, part)]
        lengths = [min(part, last - start) for start in starts]
        if len(starts) == 1:
            try:
                found = [obstore.get_range(self._client, key, start=first, length=last - first)]
            except (exceptions.BaseError, OSError, ValueError) as error:
                if (failure := as_ours("read", url, error)) and isinstance(failure, StorageNotFoundError):
                    raise failure from None
                self._check_reaches(key, url, first, last)
                raise failure from None
        else:
            self._check_reaches(key, url, first, last)  # the client panics otherwise
            with translated("read", url):
                found = obstore.get_ranges(self._client, key, starts=starts, lengths=lengths, coalesce=0)
        for data, nbytes in zip(found, lengths, strict=True):
            if len(data) != nbytes:
                self._check_reaches(key, url, first, last)
                raise StorageError(f"{url} gave {len(data)} bytes instead of {nbytes}", path=url)
            yield np.frombuffer(memoryview(data), np.uint8)
