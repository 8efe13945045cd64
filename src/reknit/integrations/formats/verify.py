"""Checks of checkpoints of other programs, and of exports, by the means of their formats."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit import VerifyReport
from reknit.errors import CorruptError, FormatError, StorageError, shown
from reknit.integrations.formats.derived import Cell, derived
from reknit.integrations.formats.entries import listed
from reknit.integrations.formats.open import read_foreign, store_of
from reknit.integrations.formats.small_reads import LOCAL_MARK, Archive, ZipMember, part_of
from reknit.plugins.format import TensorSpec, check_sizes, unchecked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from reknit.integrations.formats.export import StreamPiece
    from reknit.plugins.format import FileEntry, Storage


class Named(NamedTuple):
    """The name and spec of a tensor in an export."""

    name: str
    spec: TensorSpec


class ReadBack(NamedTuple):
    """A tensor as a library read it: its spec, and all of its bytes in row-major order."""

    spec: TensorSpec
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StateReport:
    """The content of an export of a whole state.

    `nbytes` are the bytes of its `num_tensors` tensors.  `left_out` maps entries that it lacks to the reason,
    `changed` entries of another type to that type.  `verified` is whether it was read back and compared.
    """

    path: str
    format: str
    items: tuple[str, ...]
    num_tensors: int
    nbytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    verified: bool = False


def read_back(tensor: Any) -> ReadBack:
    """Return the spec and the bytes of a tensor of torch."""
    import torch  # the formats that it reads need it anyway

    spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return ReadBack(spec, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def require_equal(
    wanted: Mapping[int, Named], pieces: Iterable[StreamPiece], read: Callable[[int], ReadBack]
) -> None:
    """Compare the tensors in `pieces` with the results of `read`.  Raises `CorruptError` at a difference.

    `wanted` are their names and specs by number; tensors without elements have no pieces.
    """
    for number, named in wanted.items():
        if not named.spec.numel:
            _require(named, holds=read(number).spec == named.spec)
    for number, parts in groupby(pieces, lambda piece: piece.number):
        found, at = read(number), 0
        _require(wanted[number], holds=found.spec == wanted[number].spec)
        for piece in parts:
            data = piece.data.view(np.uint8)
            _require(wanted[number], holds=np.array_equal(found.data[at : at + data.size], data))
            at += data.size
        _require(wanted[number], holds=at == found.data.size)


def require_same_values(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Compare values by name, with their types.  Raises `CorruptError` at a difference."""
    for name, value in wanted.items():
        if name not in found or type(found[name]) is not type(value) or repr(found[name]) != repr(value):
            raise CorruptError(_DIFFERS.format(name=name), remedy=_REMEDY)


_DIFFERS = "{name} in the export differs from the checkpoint, so nothing was exported"
_REMEDY = "export again; if it happens again, the disk or a library fails: verify the checkpoint"


def _require(named: Named, *, holds: bool) -> None:
    if not holds:
        raise CorruptError(_DIFFERS.format(name=repr(named.name)), remedy=_REMEDY)


_PIECE_NBYTES = 8 << 20
_ARCHIVES = (".pt", ".bin")
"""Endings of files in folders that are archives of torch.save, and nothing else."""
_CHECKSUMS = "names, shapes, sizes and the checksums of all members of its archive were checked"


def verify_foreign(storage: Storage, level: str) -> VerifyReport | None:
    """Return a report on a checkpoint of another program; None without one, or for an unknown format.

    ``"data"`` reads every byte.  In a zip archive, it compares the checksum of each member; other formats
    have none.
    """
    url = storage.url
    try:
        found = read_foreign(storage)
    except FormatError as error:
        return VerifyReport(url, level, 1, 0, (error.message,))
    if found is None:
        return None
    manifest = found.manifest
    assert manifest.other is not None
    place = store_of(storage, manifest.other)
    blobs = {blob.path for blob in manifest.blobs}
    files = [f for f in manifest.files if f.nbytes and f.path not in blobs and _is_stored(f.path)]
    total = sum(file.nbytes for file in files)
    problems = [f"{entry.name} cannot be read: {entry.why}" for entry in manifest.unread if entry.is_damage]
    if level != "data":
        return VerifyReport(
            url,
            level,
            len(files),
            0,
            (*problems, *_lost(place, files)),
            num_unread=len(files),
            nbytes_unread=total,
            unchecked=unchecked(manifest),
        )
    said = unchecked(manifest)
    for file in files:
        try:
            is_archive = manifest.other.is_file or file.path.endswith(_ARCHIVES)
            if is_archive and part_of(place, file.path, 0, min(4, file.nbytes)) == LOCAL_MARK:
                problems += _wrong_members(place, file)
                said = f"a checkpoint of {manifest.other.kind}: {_CHECKSUMS}"
                said += f"; {listed(manifest.unread)}" if manifest.unread else ""
            else:
                for _ in _pieces(place, file.path, 0, file.nbytes):
                    pass
        except (FormatError, StorageError) as error:
            problems.append(error.message)
    return VerifyReport(url, level, len(files), total, tuple(problems), unchecked=said)


def _lost(storage: Storage, files: list[FileEntry]) -> list[str]:
    """Return a problem for each missing part of an array; other files were found as it was opened."""
    return check_sizes(storage, [file for file in files if derived(file.path) is not None])


def _is_stored(path: str) -> bool:
    """Return whether a file has bytes of its own: it exists, or a library reads it."""
    rule = derived(path)
    return rule is None or isinstance(rule, Cell)


def _pieces(storage: Storage, path: str, start: int, nbytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a part of a file, in pieces of one piece of memory."""
    buffer = memoryview(bytearray(min(_PIECE_NBYTES, nbytes)))
    for at in range(start, start + nbytes, _PIECE_NBYTES):
        piece = buffer[: min(_PIECE_NBYTES, start + nbytes - at)]
        storage.read_into(path, at, [piece])
        yield piece


def _wrong_members(storage: Storage, file: FileEntry) -> list[str]:
    """Return a problem for each member of an archive whose checksum is another."""
    archive = Archive(storage, file.path, 0, file.nbytes)
    starts = archive.locate(archive.members)
    return [
        f"{file.path}: the member {shown(name)} is damaged: its checksum is another"
        for name, member in archive.members.items()
        if _checksum(storage, file.path, starts[name], member) != member.crc
    ]


def _checksum(storage: Storage, path: str, start: int, member: ZipMember) -> int | None:
    """Return the checksum of the content of a member, None if it cannot be unpacked to its size."""
    crc, left = 0, member.nbytes
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    for piece in _pieces(storage, path, start, member.packed_nbytes):
        data: bytes | memoryview = piece
        while len(data):
            if member.method:
                try:
                    out: bytes | memoryview = machine.decompress(data, _PIECE_NBYTES)
                except zlib.error:
                    return None
                data = machine.unconsumed_tail
            else:
                out, data = data, b""
            crc, left = zlib.crc32(out, crc), left - len(out)
            if left < 0:
                return None
    return None if left else crc
