"""Read the headers of data files, and find tensors that have several names by them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from reknit.errors import ReknitError
from reknit.format.data_file import data_start, decode_header
from reknit.format.paths import parse_entry_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.format.data_file import Header
    from reknit.storage.base import Storage


def read_header(storage: Storage, path: str) -> Header:
    """Read the header of a data file.  Raises `CorruptError`, `FormatError`, `StorageError`."""
    nbytes = storage.size(path)
    try:
        prefix = bytearray(min(8, nbytes))
        storage.read_into(path, 0, [memoryview(prefix)])
        head = bytearray(data_start(bytes(prefix), nbytes))
        storage.read_into(path, 0, [memoryview(head)])
        return decode_header(bytes(head), nbytes)
    except ReknitError as error:
        error.sign(path=f"{storage.url}/{path}")
        raise


def tied_names(checkpoint: OpenCheckpoint, numbers: Sequence[int]) -> dict[int, int]:
    """Return, for every tensor that is only another name of one, the tensor (both as numbers of the index).

    Tied tensors have the same extents.  Of their names that counts under which the bytes lie in the data
    file: it is the one that the saved module registered first.  Raises `CorruptError`, `StorageError`.
    """
    index = checkpoint.index
    groups: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        if index.tensors[number].spec.numel:
            row = index.first[number]
            groups.setdefault((int(index.file[row]), int(index.start[row])), []).append(number)
    headers: dict[int, Header] = {}
    owner_of: dict[int, int] = {}
    for (file, start), members in groups.items():
        tied = [number for number in members if _same_extents(checkpoint, number, members[0])]
        if len(tied) > 1:
            if file not in headers:
                headers[file] = checkpoint.read(partial(read_header, path=index.files[file]))
            owner = _owner(checkpoint, headers[file], start, tied)
            owner_of.update({number: owner for number in tied if number != owner})
    return owner_of


def _same_extents(checkpoint: OpenCheckpoint, number: int, other: int) -> bool:
    index = checkpoint.index
    one = slice(index.first[number], index.first[number + 1])
    two = slice(index.first[other], index.first[other + 1])
    columns = (index.offsets, index.lengths, index.file, index.start)
    return index.tensors[number].spec == index.tensors[other].spec and all(
        np.array_equal(column[one], column[two]) for column in columns
    )


def _owner(checkpoint: OpenCheckpoint, header: Header, start: int, tied: Sequence[int]) -> int:
    """Return the tied tensor that has its name at byte `start` of a data file."""
    # a tensor without elements has its entry at the start of the next one
    fqns = {parse_entry_key(e.key)[0] for e in header.entries if header.data_start + e.start == start}
    return next((number for number in tied if checkpoint.index.tensors[number].fqn in fqns), tied[0])
