"""Parts of a save that can be switched off: the pipeline, and the even division among replicas.

The switches replace functions of reknit within this process, for saves that wait.
"""

from __future__ import annotations

import importlib
import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.memory.devices import queue
from reknit.engine.memory.images import LiveImages
from reknit.planner.save import Owned, owned_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from reknit.engine.memory.devices import Transfer
    from reknit.engine.memory.images import Image
    from reknit.engine.memory.workers import Arena
    from reknit.types.shard import Shard

    Owners = Callable[[Sequence[Shard], int], list[Owned]]


def first_replica(shards: Sequence[Shard], rank: int) -> list[Owned]:
    """Return the shards of which `rank` is the first replica: it writes all of them whole, as in DCP."""
    return [
        Owned(number, 0, shard.box.numel)
        for number, shard in _distinct(shards)
        if (shard.replicas or ())[:1] == (rank,)
    ]


def worst_fit(shards: Sequence[Shard], rank: int) -> list[Owned]:
    """Return the whole shards that `rank` writes if each goes to the replica with the fewest bytes so far.

    The largest shards come first; this is the division of the paper.
    """
    sets: dict[tuple[int, ...], list[tuple[int, Shard]]] = {}
    for number, shard in _distinct(shards):
        sets.setdefault(shard.replicas or (), []).append((number, shard))
    owned = []
    for replicas, held in sets.items():
        filled = dict.fromkeys(replicas, 0)
        for number, shard in sorted(held, key=lambda each: (-each[1].nbytes, _name(each[1]))):
            owner = min(replicas, key=filled.__getitem__)
            filled[owner] += shard.nbytes
            if owner == rank:
                owned.append(Owned(number, 0, shard.box.numel))
    return owned


DIVISIONS: dict[str, Owners] = {
    "first replica": first_replica,
    "worst fit": worst_fit,
    "one cut line": owned_parts,
}


def _distinct(shards: Sequence[Shard]) -> Iterator[tuple[int, Shard]]:
    seen = set()
    for number, shard in enumerate(shards):
        if _name(shard) not in seen:
            seen.add(_name(shard))
            yield number, shard


def _name(shard: Shard) -> tuple[Any, ...]:
    return shard.item, shard.fqn, shard.box.offsets, shard.box.lengths


@contextmanager
def dividing(owners: Owners) -> Iterator[None]:
    """Let the replicas of a shard divide it by another rule."""
    with _replaced("reknit.planner.save", "owned_parts", owners):
        yield


@contextmanager
def one_after_another() -> Iterator[None]:
    """Let a save copy everything before it writes anything."""
    with _replaced("reknit.engine.saving.layout", "LiveImages", _AllStaged):
        yield


@contextmanager
def _replaced(module: str, name: str, function: Callable[..., Any]) -> Iterator[None]:
    names = vars(importlib.import_module(module))
    before, names[name] = names[name], function
    try:
        yield
    finally:
        names[name] = before


class _AllStaged(LiveImages):
    """Pieces of a copy of all files, which is made before any of them is written."""

    def __init__(self, images: Sequence[Image], transfer: Transfer, budget_nbytes: int | None) -> None:
        super().__init__(images, transfer, budget_nbytes)
        self._copies = []
        for image in images:
            memory = mmap.mmap(-1, max(image.nbytes, 1))  # page-aligned, for direct I/O
            copy = np.frombuffer(memory, np.uint8)[: image.nbytes]
            with transfer.copying(name=lambda: "a whole file"):
                image.fill(0, copy, queue)
            self._copies.append(copy)

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        """Return a piece of the copy."""
        return self._copies[file][start : start + nbytes]
