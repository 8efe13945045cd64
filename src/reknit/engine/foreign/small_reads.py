"""Small reads of files of other programs: parts of a file, and a file as a stream with bounded reads."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from reknit.engine.memory.workers import run_jobs
from reknit.errors import CorruptError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeVar

    from reknit.storage.base import Storage
    from reknit.types.manifest import Extent

    Job = TypeVar("Job")

_THREADS = 16
_FEW = 32
"""Small reads that are done one after another."""
_NEAR_NBYTES = 64 << 10
_AT_ONCE_NBYTES = 1 << 20
"""Parts of a file that lie so near each other are read at once, up to so many bytes."""


def do_each(jobs: Sequence[Job], work: Callable[[Job], None]) -> None:
    """Do many small reads, several at once if there are more than a few."""
    if len(jobs) <= _FEW:
        for job in jobs:
            work(job)
        return
    run_jobs(jobs, lambda job, _: work(job), threads=_THREADS, arena_nbytes=1, budget_nbytes=_THREADS)


def part_of(storage: Storage, path: str, start: int, nbytes: int) -> bytes:
    """Return a part of a file."""
    buffer = bytearray(nbytes)
    if nbytes:
        storage.read_into(path, start, [memoryview(buffer)])
    return bytes(buffer)


def near_parts(parts: Iterable[Extent]) -> list[list[Extent]]:
    """Return groups of parts of files that are worth one read each."""
    groups: list[list[Extent]] = []
    end = 0
    for part in sorted(set(parts)):
        last = part.start + part.nbytes
        begins = groups[-1][0] if groups else part
        is_near = part.file == begins.file and part.start - end <= _NEAR_NBYTES
        if groups and is_near and last - begins.start <= _AT_ONCE_NBYTES:
            groups[-1].append(part)
            end = max(end, last)
        else:
            groups.append([part])
            end = last
    return groups


def parts_of(storage: Storage, parts: Sequence[Extent]) -> list[bytes]:
    """Return parts of files, with one read for several near parts."""
    found: dict[Extent, bytes] = {}

    def read(group: list[Extent]) -> None:
        begin = group[0].start
        data = part_of(storage, group[0].file, begin, max(each.start + each.nbytes for each in group) - begin)
        for each in group:
            found[each] = data[each.start - begin :][: each.nbytes]

    do_each(near_parts(parts), read)
    return [found[part] for part in parts]


class PartFile(io.RawIOBase):
    """A part of a file as a stream for reading; one read has at most `most` bytes."""

    def __init__(self, storage: Storage, path: str, start: int, nbytes: int, most: int) -> None:
        self._storage, self._path, self._start, self._nbytes, self._most = storage, path, start, nbytes, most
        self._at = 0

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the part, and return it."""
        at = offset + (0, self._at, self._nbytes)[whence]
        if at < 0:
            raise CorruptError(f"{self._path} refers to bytes before its beginning")
        self._at = at
        return at

    def read(self, nbytes: int | None = -1) -> bytes:
        """Return the next bytes, fewer at the end.  Raises `FormatError` for too many."""
        left = max(self._nbytes - self._at, 0)
        nbytes = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        if nbytes > self._most:
            raise FormatError(f"a directory in {self._path} has {nbytes} bytes; {self._most} is the limit")
        data = part_of(self._storage, self._path, self._start + self._at, nbytes)
        self._at += nbytes
        return data
