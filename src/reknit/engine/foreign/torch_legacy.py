"""Files of torch.save before its archives: a few pickles, one behind another, and then the storages."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from reknit.engine.foreign.small_reads import do_each, part_of
from reknit.errors import CorruptError, FormatError, shown
from reknit.format.foreign.safe_pickle import MAX_PICKLE_NBYTES, Unreadable, read_pickle
from reknit.format.foreign.torch_values import TORCH, StorageRef, TensorView, legacy_storage_of

if TYPE_CHECKING:
    from reknit.storage.base import Storage

_HEADS = (64 << 10, 4 << 20, MAX_PICKLE_NBYTES)
"""Bytes that are read for the pickles, until they are whole."""
_PROTOCOL = 1001
_COUNT_NBYTES = 8


class LegacyFile:
    """A file of torch.save without an archive: its value, and the places of its storages."""

    def __init__(self, storage: Storage, path: str, nbytes: int) -> None:
        self._storage, self.path, self._nbytes = storage, path, nbytes
        self._storages: dict[str, StorageRef] = {}
        for number, most in enumerate(_HEADS):
            stream = io.BytesIO(part_of(storage, path, 0, min(most, nbytes)))
            self._storages.clear()
            try:
                value, keys = self._read(stream)
                break
            except FormatError:
                if nbytes <= most or number == len(_HEADS) - 1:
                    raise
        self.value: Any = value
        self._starts = self._places(keys, stream.tell())

    def _read(self, stream: io.BytesIO) -> tuple[Any, list[Any]]:
        """Return the value, and the keys of the storages in their order."""
        _, protocol, about, value, keys = (
            read_pickle(stream, TORCH, self._storage_of if number == 3 else None) for number in range(5)
        )
        if protocol != _PROTOCOL or not isinstance(about, dict) or not isinstance(keys, list):
            raise FormatError(f"{self.path} is not a file of torch.save of a known kind")
        if about.get("little_endian") is not True:
            raise FormatError(f"{self.path} was saved on a machine with another order of bytes")
        return value, keys

    def _storage_of(self, pid: Any) -> StorageRef:
        found = legacy_storage_of(pid)
        if isinstance(found, Unreadable):  # its size is unknown, and so are the places of those behind it
            raise FormatError(found.why)
        return self._storages.setdefault(found.key, found)

    def _places(self, keys: list[Any], at: int) -> dict[str, int]:
        """Return the first byte of each storage; before it stands its number of elements."""
        starts = {}
        for key in keys:
            ref = self._storages.get(key) if isinstance(key, str) else None
            if ref is None:
                raise CorruptError(f"{self.path} has the storage {shown(key)}, which no tensor uses")
            starts[ref.key] = at + _COUNT_NBYTES
            at += _COUNT_NBYTES + ref.nbytes
        if at > self._nbytes:
            raise CorruptError(f"{self.path} ends before its storages do")

        def check(key: str) -> None:
            count = part_of(self._storage, self.path, starts[key] - _COUNT_NBYTES, _COUNT_NBYTES)
            if int.from_bytes(count, "little") * self._storages[key].itemsize != self._storages[key].nbytes:
                raise CorruptError(f"{self.path} has a storage of another size than its pickle says")

        do_each(list(starts), check)
        return starts

    def start(self, view: TensorView) -> int:
        """Return the first byte of the storage of a tensor."""
        if view.storage.key not in self._starts:
            raise CorruptError(f"{self.path} has no storage {shown(view.storage.key)}")
        return self._starts[view.storage.key]
