"""What do the data files of a checkpoint say about themselves?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import ReknitError
from reknit.format.data_file import data_start, decode_header

if TYPE_CHECKING:
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
