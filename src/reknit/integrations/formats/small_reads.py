"""Small reads of files of other programs: parts, bounded streams, and members of a zip archive."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.memory.workers import run_jobs
from reknit.errors import CorruptError, FormatError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeVar

    from reknit.plugins.format import Extent, Storage

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


MAX_DIRECTORY_NBYTES = 16 << 20
LOCAL_NBYTES = 30
"""Bytes of a local header before the name."""
LOCAL_MARK = b"PK\x03\x04"
_ENCRYPTED = 0x1


class ZipMember(NamedTuple):
    """A member of an archive: its local header, and its size in the file and unpacked, in bytes.

    `method` is 0 for a member that is stored as it is.
    """

    name: str
    header: int
    method: int
    packed_nbytes: int
    nbytes: int
    crc: int


class Archive:
    """An archive in bytes `start` up to `start + nbytes` of a file; its members by name.

    Raises `CorruptError` or `FormatError` for members that overlap, are encrypted, or have one name.
    """

    def __init__(self, storage: Storage, path: str, start: int, nbytes: int) -> None:
        self.storage, self.path, self._start, self._nbytes = storage, path, start, nbytes
        self.members: dict[str, ZipMember] = {}
        try:
            with zipfile.ZipFile(PartFile(storage, path, start, nbytes, MAX_DIRECTORY_NBYTES)) as archive:
                listed = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
            raise CorruptError(f"{path} is not a whole zip archive: {shown(str(error))}") from error
        end = 0
        for each in sorted(listed, key=lambda one: one.header_offset):
            if each.flag_bits & _ENCRYPTED:
                raise FormatError(f"{path} has the encrypted member {shown(each.filename)}")
            if each.filename in self.members or each.header_offset < end:
                name = shown(each.filename)
                raise CorruptError(f"{path} has the member {name} twice, or it overlaps another")
            end = each.header_offset + LOCAL_NBYTES + each.compress_size
            self.members[each.filename] = ZipMember(
                each.filename,
                each.header_offset,
                each.compress_type,
                each.compress_size,
                each.file_size,
                each.CRC,
            )
        if end > nbytes:
            raise CorruptError(f"{path} has members beyond its end")
        self._starts: dict[str, int] = {}

    def locate(self, names: Iterable[str]) -> dict[str, int]:
        """Return the first byte of the content of some members in the file."""
        lacking = [name for name in names if name not in self._starts]
        do_each(lacking, self._locate)
        return self._starts

    def _locate(self, name: str) -> None:
        member = self.members[name]
        head = part_of(self.storage, self.path, self._start + member.header, LOCAL_NBYTES)
        if not head.startswith(LOCAL_MARK):
            raise CorruptError(f"{self.path} has no member {shown(name)} where its directory says")
        at = member.header + content_at(head)
        if at + member.packed_nbytes > self._nbytes:
            raise CorruptError(f"{self.path} has the member {shown(name)} beyond its end")
        self._starts[name] = self._start + at

    def read(self, name: str, limit: int) -> bytes:
        """Return the content of a member that is stored as it is.  Raises `FormatError` for others."""
        member = self.members.get(name)
        if member is None:
            raise CorruptError(f"{self.path} has no member {shown(name)}")
        if member.method or member.packed_nbytes != member.nbytes or member.nbytes > limit:
            raise FormatError(f"{self.path} has the member {shown(name)} packed, or with too many bytes")
        start = self.locate([name])[name]
        data = part_of(self.storage, self.path, start, member.nbytes)
        if zlib.crc32(data) != member.crc:
            raise CorruptError(f"{self.path}: the member {shown(name)} is damaged: its checksum is another")
        return data


def content_at(head: bytes, at: int = 0) -> int:
    """Return the offset of the content of a member from its local header, which begins at `at`."""
    name, extra = head[at + 26 : at + 28], head[at + 28 : at + 30]
    return LOCAL_NBYTES + int.from_bytes(name, "little") + int.from_bytes(extra, "little")
