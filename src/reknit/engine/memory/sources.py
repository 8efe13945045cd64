"""The memory of shards, of which most is copied by address, without a look at each shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.memory.elements import address, bits, contiguous_bytes, rectangle
from reknit.types.lazy_property import lazy_property
from reknit.types.shard import Strided

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

_is_on_host = attrgetter("is_cpu")


class Sources(Sequence[Any]):
    """The `bits` of the `memory` of shards, by shard number; memory that shards share is wrapped once.

    The bytes of the memory are its values: walks resolve conjugate and negative views.
    """

    def __init__(self, memories: Iterable[Any]) -> None:
        self._memories = [*memories]
        self._bits: dict[int, Any] = {}
        self._flats: dict[int, Any] = {}
        self._storages: Sequence[Any] = ()

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
            if contiguous_bytes(self[number]) is not None:
                found[number] = address(self[number])
        return found

    def on_host(self, numbers: NDArray[np.int64]) -> bool:
        """Return whether the sources with these numbers are in host memory."""
        unknown = numbers[self.addresses[numbers] == 0]
        return all(isinstance(self[n], np.ndarray) for n in unknown.tolist())

    @property
    def on_devices(self) -> list[Any]:
        """The `bits` of the sources that are not in host memory."""
        return [self[n] for n in self._others if not isinstance(self[n], np.ndarray)]

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
