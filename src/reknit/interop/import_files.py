"""The data files that a checkpoint of another program becomes: the same chunks, file after file."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from reknit.format.data_file import HeaderEntry, encode_header, file_metadata
from reknit.format.paths import data_path, entry_key
from reknit.types.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.storage.base import Storage
    from reknit.types.manifest import Index

MOST_FILE_NBYTES = 1 << 30
"""Bytes of tensors in a data file, unless one chunk has more: a file is the unit of a resumed import."""


class ImportedFile(NamedTuple):
    """A data file: its header, and the rows of the index whose bytes follow it, in this order.

    Row `rows[k]` begins at byte `starts[k]` of the file.
    """

    path: str
    item: str
    header: bytes
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """All data files of an import, and the index with the new places of the chunks."""

    files: tuple[ImportedFile, ...]
    index: Index

    def share(self, rank: int, size: int) -> list[int]:
        """Return the numbers of the files that one of `size` ranks writes: the largest go first."""
        loads = [0] * size
        mine = []
        order = sorted(range(len(self.files)), key=lambda number: (-self.files[number].nbytes, number))
        for number in order:
            lightest = loads.index(min(loads))
            loads[lightest] += self.files[number].nbytes
            if lightest == rank:
                mine.append(number)
        return sorted(mine)


def plan_import(index: Index, write_id: str, most_nbytes: int = MOST_FILE_NBYTES) -> ImportPlan:
    """Return the data files for the chunks of an index.  Chunks with one place are stored once."""
    starts, numbers = np.zeros_like(index.start), np.zeros_like(index.file)
    known: dict[tuple[str, int, int, int], int] = {}
    twins: dict[int, int] = {}
    groups: list[tuple[str, list[int]]] = []
    held = 0
    for row in _order(index):
        item = index.tensors[index.tensor[row]].item
        place = item, int(index.file[row]), int(index.start[row]), int(index.nbytes[row])
        if index.nbytes[row] and known.setdefault(place, row) != row and _one_name(index, known[place], row):
            twins[row] = known[place]
            continue
        if not groups or groups[-1][0] != item or held + int(index.nbytes[row]) > most_nbytes:
            groups.append((item, []))
            held = 0
        groups[-1][1].append(row)
        held += int(index.nbytes[row])
    files = []
    parts: dict[str, int] = {}
    for number, (item, rows) in enumerate(groups):
        part = parts[item] = parts.get(item, -1) + 1
        file = _file(index, item, rows, data_path(item, 0, write_id, part), write_id, twins=twins)
        files.append(file)
        starts[list(rows)], numbers[list(rows)] = file.starts, number
    for row, first in twins.items():
        starts[row], numbers[row] = starts[first], numbers[first]
    return ImportPlan(tuple(files), _sorted_files(replace(index, file=numbers, start=starts), files))


def _order(index: Index) -> list[int]:
    """Return the rows by item, larger elements first, so that each is aligned, and then by place."""
    sizes = np.array([entry.spec.itemsize for entry in index.tensors], np.int64)[index.tensor]
    items = {item: number for number, item in enumerate(dict.fromkeys(e.item for e in index.tensors))}
    item = np.array([items[entry.item] for entry in index.tensors], np.int64)[index.tensor]
    order: NDArray[np.int64] = np.lexsort((index.start, index.file, -sizes, item))
    return [int(row) for row in order]


def _one_name(index: Index, first: int, row: int) -> bool:
    """Return whether two rows with one place are two whole tensors of one spec: tied tensors."""
    one, two = int(index.tensor[first]), int(index.tensor[row])
    whole = all(index.first[n + 1] - index.first[n] == 1 for n in (one, two))
    return one != two and whole and index.tensors[one].spec == index.tensors[two].spec


def _file(
    index: Index, item: str, rows: Sequence[int], path: str, write_id: str, *, twins: dict[int, int]
) -> ImportedFile:
    """Return a data file of these rows, with the second names of its tensors."""
    entries, at = [], 0
    for row in rows:
        entry = index.tensors[index.tensor[row]]
        ndim, nbytes = len(entry.spec.shape), int(index.nbytes[row])
        box = Box(tuple(index.offsets[row, :ndim].tolist()), tuple(index.lengths[row, :ndim].tolist()))
        key = entry_key(entry.fqn, entry.spec, box)
        entries.append(HeaderEntry(key, entry.spec.dtype, box.lengths, at, nbytes))
        at += nbytes
    here = set(rows)
    names = {
        index.tensors[index.tensor[row]].fqn: index.tensors[index.tensor[first]].fqn
        for row, first in twins.items()
        if first in here
    }
    header = encode_header(entries, file_metadata(write_id, 0, item, names))
    starts = tuple(len(header) + entry.start for entry in entries)
    return ImportedFile(path, item, header, tuple(rows), starts, len(header) + at)


def _sorted_files(index: Index, files: Sequence[ImportedFile]) -> Index:
    """Return the index with the paths of its files."""
    return replace(index, files=tuple(file.path for file in files))


def fill(file: ImportedFile, index: Index, source: Storage, start: int, piece: NDArray[np.uint8]) -> None:
    """Put the bytes of a data file from `start` on into `piece`, read from the files of the other program.

    `index` has the places of the chunks there.
    """
    stop = start + len(piece)
    if start < len(file.header):
        head = file.header[start:stop]
        piece[: len(head)] = np.frombuffer(head, np.uint8)
    number = max(bisect_right(file.starts, start) - 1, 0)
    while number < len(file.rows) and file.starts[number] < stop:
        row, begin = file.rows[number], file.starts[number]
        low, high = max(begin, start), min(begin + int(index.nbytes[row]), stop)
        if low < high:
            path = index.files[index.file[row]]
            source.read_into(
                path, int(index.start[row]) + low - begin, [piece[low - start : high - start].data]
            )
        number += 1
