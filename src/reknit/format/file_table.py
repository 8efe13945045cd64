"""The table of files in an index: paths, sizes, digests, and whose values each file holds, as columns."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from reknit.errors import CorruptError, FormatError
from reknit.format.checksum import MAX_BLOBS_NBYTES, num_blocks
from reknit.format.manifest_file import MAX_COORDINATE_NBYTES, MAX_MANIFEST_NBYTES
from reknit.format.paths import MANIFEST_PATH, check_all_relative
from reknit.system import require_memory
from reknit.types.manifest import BlobFile, FileEntry, FileTable
from reknit.types.small import decoder

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from reknit.types.manifest import Manifest

MAX_TABLE_NBYTES = MAX_MANIFEST_NBYTES
MAX_FILES = 1 << 22
MAX_PLACES_NBYTES = 64 << 10
"""Bytes of all names of coordinates: ranks differ in their numbers, not in these."""

_FILE_NBYTES = 512
"""The memory of a file, about."""


class _Columns(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """`FileTable` as one msgpack array; paths are lines, and numbers little-endian."""

    paths: str
    nbytes: bytes
    digests: bytes
    item: bytes
    place: bytes
    places: msgspec.Raw
    coordinates: bytes


_decode = decoder(_Columns)
_decode_places = decoder(tuple[tuple[str, ...], ...])


def encode_table(table: FileTable, manifest: Manifest) -> bytes:
    """Return the bytes of a table, which a manifest of these items and blocks can refer to.

    Raises `FormatError` when the table breaks a rule that a reader checks.
    """
    _check(table, manifest)
    data = msgspec.msgpack.encode(
        _Columns(
            paths="\n".join(table.paths),
            nbytes=_bytes(table.nbytes, "<i8"),
            digests=_bytes(table.digests, "<u8"),
            item=_bytes(table.item, "<i4"),
            place=_bytes(table.place, "<i4"),
            places=msgspec.Raw(msgspec.msgpack.encode(table.places)),
            coordinates=_bytes(table.coordinates, "<i8"),
        )
    )
    if len(data) > MAX_TABLE_NBYTES:
        _refuse(f"it has {len(data)} bytes; {MAX_TABLE_NBYTES} is the limit")
    return data


def _bytes(column: NDArray[Any], kind: str) -> bytes:
    numbers = np.ascontiguousarray(column.astype(kind, copy=False))
    return cast("bytes", numbers.data.cast("B"))  # as good as bytes for who encodes them


def with_table(manifest: Manifest, index: bytes) -> Manifest:
    """Return a manifest that lists all files: those of the table in its index too, where it has one.

    The bytes of the index have been verified.  Raises `CorruptError`, and `FormatError` above a limit.
    """
    if (place := manifest.table) is None:
        return manifest
    if place.nbytes > MAX_TABLE_NBYTES or place.num_files > MAX_FILES:
        _refuse(f"it has {place.nbytes} bytes for {place.num_files} files, more than any reknit writes")
    require_memory(2 * place.nbytes + place.num_files * _FILE_NBYTES)
    table = _decoded(index[place.start : place.start + place.nbytes], place.num_files)
    _check(table, manifest)
    if (nbytes := sum(table.nbytes.tolist())) != place.files_nbytes:
        raise CorruptError(f"the table of files has {nbytes} bytes, the manifest says {place.files_nbytes}")
    files = (*entries(table, manifest.block_nbytes), manifest.index)
    return replace(manifest, files=files, blobs=blobs(table, manifest.items), table=None)


def _decoded(data: bytes, num_files: int) -> FileTable:
    """Return the table that the bytes hold; its size is checked before it is taken apart."""
    try:
        columns = _decode(data)
        if len(columns.places) > MAX_PLACES_NBYTES:
            _refuse(f"the names of its coordinates have more than {MAX_PLACES_NBYTES} bytes")
        places = _decode_places(columns.places)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptError(f"the table of files is damaged: {error}") from error
    nbytes, item, place = (
        _numbers(column, kind)
        for column, kind in ((columns.nbytes, "<i8"), (columns.item, "<i4"), (columns.place, "<i4"))
    )
    if {num_files - 1, len(nbytes) - 1, len(item) - 1, len(place) - 1} != {columns.paths.count("\n")}:
        raise CorruptError(f"the table of files does not list the {num_files} files of the manifest")
    paths, digests = columns.paths.split("\n"), _numbers(columns.digests, "<u8")
    coordinates = _numbers(columns.coordinates, "<i8")
    return FileTable(paths, nbytes, digests, item, place, places=places, coordinates=coordinates)


def _numbers(data: bytes, kind: str) -> NDArray[Any]:
    if len(data) % np.dtype(kind).itemsize:
        raise CorruptError("a column of the table of files is cut short")
    return np.frombuffer(data, kind)


def entries(table: FileTable, block_nbytes: int) -> tuple[FileEntry, ...]:
    """Return the files of a table one by one."""
    digests = table.digests.tolist()
    ends = [0, *np.cumsum(num_blocks(table.nbytes, block_nbytes)).tolist()]
    return tuple(
        FileEntry(path, nbytes, tuple(digests[begin:end]))
        for path, nbytes, (begin, end) in zip(table.paths, table.nbytes.tolist(), pairwise(ends), strict=True)
    )


def blobs(table: FileTable, items: tuple[str, ...]) -> tuple[BlobFile, ...]:
    """Return the files of a table that hold values."""
    files = np.flatnonzero(table.item >= 0)
    numbers = iter(table.coordinates.tolist())
    return tuple(
        BlobFile(
            items[item],
            table.paths[file],
            None if place < 0 else {name: next(numbers) for name in table.places[place]},
        )
        for file, item, place in zip(
            files.tolist(), table.item[files].tolist(), table.place[files].tolist(), strict=True
        )
    )


def table_of(manifest: Manifest) -> FileTable:
    """Return the files that a manifest lists, but for the index, as a table; the reverse of `with_table`."""
    files = [file for file in manifest.files if file.path != manifest.index_path]
    values = {blob.path: blob for blob in manifest.blobs}
    found = [values.get(file.path) for file in files]
    own = [dict(blob.coordinate) if blob and blob.coordinate is not None else None for blob in found]
    places = list(dict.fromkeys(tuple(each) for each in own if each is not None))
    items = {item: number for number, item in enumerate(manifest.items)}
    numbers = {names: number for number, names in enumerate(places)}
    return FileTable(
        paths=[file.path for file in files],
        nbytes=np.array([file.nbytes for file in files], np.int64),
        digests=np.array([digest for file in files for digest in file.digests], np.uint64),
        item=np.array([-1 if blob is None else items[blob.item] for blob in found], np.int32),
        place=np.array([-1 if each is None else numbers[tuple(each)] for each in own], np.int32),
        places=tuple(places),
        coordinates=np.array(
            [number for each in own if each is not None for number in each.values()], np.int64
        ),
    )


def _check(table: FileTable, manifest: Manifest) -> None:
    """Raise `FormatError` where a table breaks a rule of the format."""
    check_all_relative(table.paths)
    paths = set(table.paths)
    if len(paths) != len(table.paths) or MANIFEST_PATH in paths or manifest.index_path in paths:
        _refuse("it lists a file twice, or the manifest or the index")
    num_digests = num_blocks(table.nbytes, manifest.block_nbytes)
    if (table.nbytes < 0).any() or (num_digests > len(table.digests)).any():
        _refuse("a file has a size that its digests are too few for")
    if num_digests.sum() != len(table.digests):
        _refuse(f"its files have {num_digests.sum()} blocks and {len(table.digests)} digests")
    if (table.nbytes[table.item >= 0] > MAX_BLOBS_NBYTES).any():
        _refuse(f"a file of values is larger than {MAX_BLOBS_NBYTES} bytes")
    own, places = table.place >= 0, table.places
    if (table.item < -1).any() or (table.item >= len(manifest.items)).any() or (table.item[own] < 0).any():
        _refuse("it has values of no item")
    if (table.place < -1).any() or (table.place >= len(places)).any():
        _refuse("it has values at a coordinate without names")
    sizes = np.array([len(names) for names in places], np.int64)
    if sizes[table.place[own]].sum() != len(table.coordinates):
        _refuse("its coordinates have more or fewer numbers than names")
    for names in places:
        widest = msgspec.json.encode(dict.fromkeys(names, -(1 << 63)))
        if len(set(names)) != len(names) or len(widest) > MAX_COORDINATE_NBYTES:
            _refuse(f"a coordinate names one thing twice, or takes more than {MAX_COORDINATE_NBYTES} bytes")


def _refuse(why: str) -> NoReturn:
    raise FormatError(f"bad table of files: {why}")
