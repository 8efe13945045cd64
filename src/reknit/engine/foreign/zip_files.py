"""The members of a zip archive that is part of a file: where do their bytes lie?"""

from __future__ import annotations

import zipfile
import zlib
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.foreign.small_reads import PartFile, do_each, part_of
from reknit.errors import CorruptError, FormatError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reknit.storage.base import Storage

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
