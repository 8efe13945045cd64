"""Images of planned data files: a header, followed by live memory, most of it copied by address."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct

from reknit.engine.memory.devices import queue
from reknit.engine.memory.elements import bits, contiguous_bytes, itemsize, rectangle, stage
from reknit.engine.memory.write import ByteSource
from reknit.errors import ReknitError
from reknit.types.shard import Strided
from reknit.types.small import lazy_property

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from reknit.engine.memory.devices import Transfer
    from reknit.engine.memory.workers import Arena
    from reknit.types.shard import HostRuns, WriteEntry

    Copy = Callable[[Any, int, int, NDArray[np.uint8]], None]

    Ints = NDArray[np.int64]


class EntryRow(Struct, frozen=True):
    """The part of a shard in a file: `numel` elements from `first` on, in `nbytes` bytes at `start`."""

    shard: int
    first: int
    numel: int
    start: int
    nbytes: int


class Entries(NamedTuple):
    """Entries of a file as columns, in the order of their bytes; none is empty."""

    shard: Ints
    first: Ints
    numel: Ints
    start: Ints
    nbytes: Ints

    @classmethod
    def of(cls, entries: Sequence[WriteEntry]) -> Entries:
        """Return planned entries as columns, without the empty ones."""
        rows = [(e.shard, e.first, e.numel, e.start, e.nbytes) for e in entries if e.numel]
        return cls(*np.array(rows, np.int64).reshape(-1, len(cls._fields)).T.copy())

    def rows(self) -> Iterator[EntryRow]:
        """Yield the entries one by one."""
        return map(EntryRow, *(column.tolist() for column in self))

    def select(self, some: Any) -> Entries:
        """Return the entries that a slice or a mask selects."""
        return Entries(*(column[some] for column in self))

    def between(self, start: int, stop: int) -> Entries:
        """Return the entries that have bytes in this range of the data part."""
        low = np.searchsorted(self.start + self.nbytes, start, side="right")
        return self.select(slice(int(low), int(np.searchsorted(self.start, stop))))


_SHORT_RUN = 64 << 10
"""Runs that are shorter on average are copied: that takes less time than a digest of each."""


class Image(Struct, frozen=True):
    """A planned data file: a header, then the bytes of its entries, from live memory."""

    path: str
    header: bytes
    entries: Entries
    nbytes: int
    sources: Sources

    def fill(self, start: int, out: NDArray[np.uint8], copy: Copy = stage) -> None:
        """Fill `out` with the bytes of the file from `start` on.

        Runs of host memory are copied by address, and all other entries by `copy`, which works as `stage`.
        """
        if start < len(self.header):
            part = self.header[start : start + len(out)]
            out[: len(part)] = np.frombuffer(part, np.uint8)
        start -= len(self.header)
        here = self.entries.between(start, start + len(out))
        skipped = np.maximum(start - here.start, 0)  # bytes of an entry before the range
        nbytes = np.minimum(here.nbytes, start + len(out) - here.start) - skipped
        begin = here.start + skipped - start
        itemsizes = here.nbytes // here.numel
        runs = self.sources.addresses[here.shard]
        known = runs != 0
        copy_runs((runs + here.first * itemsizes + skipped)[known], nbytes[known], out, begin[known])
        for n in np.flatnonzero(~known).tolist():
            first = int(here.first[n] + skipped[n] // itemsizes[n])
            numel, to = int(nbytes[n] // itemsizes[n]), slice(int(begin[n]), int(begin[n] + nbytes[n]))
            copy(self.sources[int(here.shard[n])], first, numel, out[to])

    def in_place(self, start: int, nbytes: int) -> list[NDArray[np.uint8]] | None:
        """Return views of these bytes of the file, end to end; None if they are not few runs on the host."""
        begin = self.header[start : start + nbytes]
        views = [np.frombuffer(begin, np.uint8)] if begin else []
        start, stop = start - len(self.header), start + nbytes - len(self.header)
        here = self.entries.between(start, stop)
        if len(here.shard) > 1 + nbytes // _SHORT_RUN:
            return None
        for entry in here.rows():
            source = self.sources[entry.shard]
            memory = contiguous_bytes(source)
            if memory is None:
                return None
            at = entry.first * itemsize(source) - entry.start  # of the first byte of the data part
            low, high = max(start, entry.start), min(stop, entry.start + entry.nbytes)
            views.append(memory[at + low : at + high])
        return views


class LiveImages(ByteSource):
    """Pieces of images, copied from live memory by the worker that writes them."""

    phase = "stage"

    def __init__(self, images: Sequence[Image], transfer: Transfer, budget_nbytes: int | None) -> None:
        self._images, self._transfer = images, transfer
        self.budget_nbytes = budget_nbytes

    def arenas(self, nbytes: int) -> AbstractContextManager[Arena]:
        """Lend memory to a worker, from which devices can copy fast."""
        return self._transfer.arenas(nbytes)

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        """Return a copy of a piece."""
        piece, image = arena.view(nbytes), self._images[file]
        try:
            with self._transfer.copying(name=lambda: f"a part of {image.path}"):
                image.fill(start, piece, queue)
        except ReknitError as error:
            error.sign(phase="stage", path=image.path)
            raise
        return piece

    def look(self, file: int, start: int, nbytes: int, arena: Arena) -> list[NDArray[np.uint8]]:
        """Return views of live memory, or a copy of a piece that is not a few runs."""
        data = self._images[file].in_place(start, nbytes)
        return [self.piece(file, start, nbytes, arena)] if data is None else data


def copy_runs(addresses: Ints, nbytes: Ints, out: NDArray[np.uint8], begin: Ints) -> None:
    """Copy runs of host memory to places in `out`."""
    move(out.ctypes.data + begin, addresses, nbytes)


def move(to: Ints, source: Ints, nbytes: Ints) -> None:
    """Copy runs of host memory from addresses to addresses."""
    deque(map(ctypes.memmove, to.tolist(), source.tolist(), nbytes.tolist()), maxlen=0)


_is_on_host = attrgetter("is_cpu")


class Sources(Sequence[Any]):
    """The `bits` of the `memory` of shards, by shard number; memory that shards share is wrapped once.

    The bytes of the memory are its values: walks resolve conjugate and negative views.
    """

    def __init__(self, memories: Iterable[Any], runs: HostRuns | None = None) -> None:
        """Use memories whose `runs` may be known already."""
        self._memories = [*memories]
        self._bits: dict[int, Any] = {}
        self._flats: dict[int, Any] = {}
        self._storages: Sequence[Any] = ()
        if runs is not None:
            self.addresses, self._storages = np.array(runs.addresses, np.int64), runs.kept
            self._plain = range(len(self._memories))

    def __len__(self) -> int:
        return len(self._memories)

    def __getitem__(self, number: Any) -> Any:
        found = self._bits.get(number)
        if found is None:
            found = self._bits[number] = self._look(self._memories[number])
        return found

    def instead(self, others: Mapping[int, Any]) -> Sources:
        """Return these sources with other `bits` for some sources on a device."""
        changed = Sources(self._memories)
        changed._bits, changed._flats = {**self._bits, **others}, self._flats
        changed.addresses, changed._storages = self.addresses, self._storages
        return changed

    @lazy_property
    def addresses(self) -> NDArray[np.int64]:
        """The address of each source that is one run of host memory; 0 for the others.

        Empty sources may have an address or 0.  The memory at an address is kept alive, even if its tensor
        gets other memory meanwhile.
        """
        found = np.zeros(len(self), np.int64)
        if plain := self._plain:
            tensor, memories = sys.modules["torch"].Tensor, [self._memories[n] for n in plain]
            runs = np.fromiter(map(tensor.is_contiguous, memories), bool, len(plain))
            addresses = np.fromiter(map(tensor.data_ptr, memories), np.int64, len(plain))
            self._storages = [*map(tensor.untyped_storage, memories)]
            found[plain] = np.where(runs, addresses, 0)
        for number in self._others:
            memory = self._memories[number]
            source = memory if type(memory) is np.ndarray else self[number]
            if isinstance(source, np.ndarray) and source.flags.c_contiguous:
                found[number] = source.__array_interface__["data"][0]
        return found

    def on_host(self, numbers: NDArray[np.int64]) -> bool:
        """Return whether the sources with these numbers are in host memory."""
        unknown = numbers[self.addresses[numbers] == 0]
        return all(isinstance(self[n], np.ndarray) for n in unknown.tolist())

    @property
    def on_devices(self) -> list[Any]:
        """The `bits` of the sources that are not in host memory."""
        others = [n for n in self._others if type(self._memories[n]) is not np.ndarray]
        return [self[n] for n in others if not isinstance(self[n], np.ndarray)]

    @lazy_property
    def _plain(self) -> Sequence[int]:
        """The numbers of plain torch tensors in host memory, whose addresses need no `bits`."""
        torch = sys.modules.get("torch")
        if torch is None:
            return []
        memories, kinds = self._memories, {torch.Tensor, torch.nn.Parameter}
        if kinds.issuperset(map(type, memories)) and all(map(_is_on_host, memories)):
            return range(len(memories))
        return [n for n, memory in enumerate(memories) if type(memory) in kinds and memory.is_cpu]

    @lazy_property
    def _others(self) -> list[int]:
        if len(self._plain) == len(self):
            return []
        return sorted({*range(len(self))}.difference(self._plain))

    def _look(self, memory: Any) -> Any:
        if not isinstance(memory, Strided):
            return bits(memory)
        flat = self._flats.get(id(memory.memory))
        if flat is None:
            flat = self._flats[id(memory.memory)] = bits(memory.memory)
        return rectangle(flat, memory)
