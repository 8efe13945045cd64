"""Checkpoints made by hand: any chunks in any files with any blocks, and stores that record every read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.stored.opening import OpenCheckpoint
from reknit.format.checksum import block_digests
from reknit.testing.storage_suite import write
from reknit.types.manifest import FileEntry, Index, Manifest, TensorEntry
from reknit.types.shard import TensorSpec
from tests.planner.test_tiling import cut
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.storage.base import Storage
    from reknit.types.box import Box

FILES = 2


class CountingStorage(ProcessMemory):
    """A store in memory that records the ranges that are read from each file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[tuple[str, int, int]] = []
        self._counting = threading.Lock()

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        with self._counting:
            self.asked.append((path, start, sum(buffer.nbytes for buffer in buffers)))
        super().read_into(path, start, buffers)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        with self._counting:
            self.asked += [(path, start, nbytes) for start in starts.tolist()]
        super().read_runs(path, starts, nbytes, buffer)

    @property
    def taken(self) -> list[tuple[str, int]]:
        """Every byte that was read, once for each read."""
        return [(path, k) for path, start, nbytes in self.asked for k in range(start, start + nbytes)]


def fresh(name: str) -> CountingStorage:
    """Return an empty store."""
    ProcessMemory.clear(name)
    return CountingStorage(name)


def spoil(storage: Storage, path: str, byte: int) -> None:
    """Flip a bit of a stored file."""
    data = bytearray(storage.get(path, limit=1 << 30))
    data[byte] ^= 16
    storage.put(path, bytes(data), if_absent=False)


def chunks_of(arrays: Sequence[NDArray[Any]], rng: random.Random) -> list[list[Box]]:
    """Cut each array into random chunks."""
    return [cut(array.shape, rng, rng.randrange(5)) for array in arrays]


def saved(
    arrays: Mapping[str, NDArray[Any]],
    chunks: Sequence[Sequence[Box]],
    storage: Storage,
    block_nbytes: int,
    rng: random.Random,
) -> OpenCheckpoint:
    """Write arrays, cut in chunks, to files at random places, and return the opened checkpoint."""
    width = max([array.ndim for array in arrays.values()] + [1])
    content = [bytearray(rng.randbytes(rng.randrange(40))) for _ in range(FILES)]
    rows = []
    for tensor, (array, boxes) in enumerate(zip(arrays.values(), chunks, strict=True)):
        for box in sorted(boxes, key=lambda box: box.offsets):
            file, pad = rng.randrange(FILES), (0,) * (width - box.ndim)
            content[file] += rng.randbytes(
                -len(content[file]) % array.itemsize + array.itemsize * rng.randrange(3)
            )
            data = array[box.slices()].tobytes()
            lengths = box.lengths + tuple(1 for _ in pad)
            rows.append((tensor, box.offsets + pad, lengths, file, len(content[file]), len(data)))
            content[file] += data
    columns = [np.array([row[k] for row in rows], np.int64) for k in range(6)]
    columns[1], columns[2] = columns[1].reshape(-1, width), columns[2].reshape(-1, width)
    entries = [TensorEntry("m", name, TensorSpec(a.shape, a.dtype.name)) for name, a in arrays.items()]
    names = tuple(f"m/{number}" for number in range(FILES))
    whole = dict(zip(names, map(bytes, content), strict=True))
    for name, data in whole.items():
        write(storage, name, data)
    files = tuple(
        FileEntry(name, len(data), tuple(block_digests(data, block_nbytes))) for name, data in whole.items()
    )
    manifest = Manifest(1, "0" * 32, None, 0.0, ("m",), "index", files, (), block_nbytes)
    return OpenCheckpoint(storage, manifest, Index(tuple(entries), names, *columns), {}, ("m",))
