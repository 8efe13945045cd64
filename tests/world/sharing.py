"""A world of several hosts in one process: carriers of bytes between ranks that are threads, and a store."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from msgspec.structs import replace

from reknit.engine.sharing import shared_read
from reknit.engine.sharing import shared_read as share_out
from reknit.format.checksum import block_digests
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.format.paths import MANIFEST_PATH
from reknit.options import LoadOptions
from reknit.storage.base import Reading
from reknit.testing.world import run_ranks
from reknit.types.wanted import Wanted
from tests.engine.saved import CountingStorage
from tests.world.jobs import load_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.comm.group import Group
    from reknit.engine.reports import LoadReport
    from reknit.types.shard import Shard

    Bytes = NDArray[np.uint8]

BLOCK_NBYTES = 4 << 10
"""The smallest blocks of the format."""


class Hub:
    """The common part of the carriers of a world: for each call, the contribution of every rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.most_sent = 0
        """The most bytes that a rank sent at once."""
        self.spoiled_by: int | None = None
        """A rank whose bytes come to others with other values."""
        self.calls: list[dict[int, tuple[str, Any]]] = []

    @property
    def num_swaps(self) -> int:
        """The number of exchanges that were begun."""
        return sum("swap" in {kind for kind, _ in call.values()} for call in self.calls)

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks made the same calls."""
        return all(len(call) == self.size for call in self.calls) and all(
            len({kind for kind, _ in call.values()}) == 1 for call in self.calls
        )


class ThreadCarrier:
    """A carrier of bytes between ranks that are threads; a rank that stops waiting has contributed before."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.size, self._hub, self._rank = hub.size, hub, rank
        self.kind = "threads"
        self._number = 0
        self._reserved: tuple[int, int] | None = None

    def __str__(self) -> str:
        return "a queue of the test"

    def reserve(self, send_nbytes: int, receive_nbytes: int) -> None:
        """Record the size of the largest swap."""
        self._reserved = send_nbytes, receive_nbytes

    def release(self) -> None:
        """Release nothing, as a queue does not need it."""

    def all_well(self, check: Callable[[], None], *, well: bool) -> bool:
        """Return whether all ranks pass True."""
        return all(self._meet("well", well, check))

    def swap(
        self,
        sent: Bytes,
        send_nbytes: list[int],
        received: Bytes,
        receive_nbytes: list[int],
        check: Callable[[], None],
    ) -> None:
        """Cut sent bytes, and put together received bytes."""
        assert sum(send_nbytes) == len(sent)
        assert self._reserved is not None, "ranks reserve memory before they wait for each other"
        assert len(sent) <= self._reserved[0]
        assert len(received) <= self._reserved[1]
        self._hub.most_sent = max(self._hub.most_sent, len(sent))
        if self._rank == self._hub.spoiled_by:
            sent = sent ^ np.uint8(1)
        cut = np.split(sent, np.cumsum(send_nbytes)[:-1])
        parts = [brought[self._rank] for brought in self._meet("swap", cut, check)]
        assert [len(part) for part in parts] == receive_nbytes
        np.concatenate(parts, out=received)

    def _meet(self, kind: str, brought: Any, check: Callable[[], None]) -> list[Any]:
        """Contribute to the next call, and return the contributions of all ranks."""
        number, self._number = self._number, self._number + 1
        with self._hub.changed:
            if number == len(self._hub.calls):
                self._hub.calls.append({})
            call = self._hub.calls[number]
            call[self._rank] = kind, brought
            self._hub.changed.notify_all()
            while len(call) < self.size:
                self._hub.changed.wait(0.01)
                self._hub.changed.release()
                try:
                    check()
                finally:
                    self._hub.changed.acquire()
        assert {kind for kind, _ in call.values()} == {kind}
        return [call[rank][1] for rank in range(self.size)]


class CellStorage(CountingStorage):
    """A store in memory that is read in small pieces, and counts them."""

    def __init__(self, name: str, cell_nbytes: int) -> None:
        super().__init__(name)
        self._cell_nbytes = cell_nbytes
        self.num_strided = 0

    @property
    def reading(self) -> Reading:
        """The sizes of reads: small, and without unwanted bytes."""
        return Reading(0, 0.0, self._cell_nbytes)

    def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
        """Count runs that are read at once, which no other rank reads."""
        self.num_strided += 1
        super().read_runs(path, starts, nbytes, buffer)


def reblock(name: str) -> None:
    """Give the checkpoint in a store small blocks."""
    storage = CountingStorage(name)
    manifest = decode_manifest(storage.get(MANIFEST_PATH, limit=1 << 30))
    files = tuple(
        replace(file, digests=tuple(block_digests(storage.get(file.path, limit=1 << 30), BLOCK_NBYTES)))
        for file in manifest.files
    )
    storage.put(
        MANIFEST_PATH,
        encode_manifest(replace(manifest, files=files, block_nbytes=BLOCK_NBYTES)),
        if_absent=False,
    )


class World:
    """Ranks on hosts (`hosts[r]` is that of rank `r`), each with its own view of one store."""

    def __init__(
        self, hosts: Sequence[int], name: str, *, cell_nbytes: int = 8 << 20, bucket_nbytes: int = 32 << 20
    ) -> None:
        self.hosts = hosts
        self.stores = [CellStorage(name, cell_nbytes) for _ in hosts]
        self.hub = Hub(len(hosts))
        self._bucket_nbytes = bucket_nbytes
        self._here = threading.local()

    def load(
        self,
        shards: Sequence[list[Shard]],
        options: LoadOptions | Sequence[LoadOptions],
        *,
        carries: bool = True,
        lenient: tuple[str, ...] = (),
    ) -> list[LoadReport]:
        """Let every rank load its shards, as parts of their items."""
        each = [options] * len(self.hosts) if isinstance(options, LoadOptions) else options

        def rank(group: Group) -> LoadReport:
            self._here.name = f"host {self.hosts[group.rank]}"
            items = tuple(sorted({shard.item for shard in shards[group.rank]} or {"model"}))
            return load_rank(
                group,
                self.stores[group.rank],
                lambda _: Wanted(items, tuple(shards[group.rank])),
                each[group.rank],
                items,
                carrier=(lambda: ThreadCarrier(self.hub, group.rank)) if carries else None,
                lenient=lenient,
            )

        with ExitStack() as last:
            last.enter_context(mock.patch.object(shared_read, "host_name", self._host))
            last.enter_context(mock.patch.object(share_out, "BUCKET_NBYTES", self._bucket_nbytes))
            return run_ranks(len(self.hosts), rank)

    def _host(self) -> str:
        name: str = self._here.name
        return name

    @property
    def reads(self) -> list[tuple[str, int, int]]:
        """The ranges of tensors' files that were read from the store."""
        return [asked for store in self.stores for asked in store.asked if asked[0].endswith(".safetensors")]

    @property
    def nbytes(self) -> int:
        """The number of bytes of tensors' files that were read from the store."""
        return sum(nbytes for _, _, nbytes in self.reads)

    @property
    def num_strided(self) -> int:
        """The number of reads that took several runs at once."""
        return sum(store.num_strided for store in self.stores)

    @property
    def most(self) -> int:
        """The largest number of reads of one byte."""
        ends = {path: start + nbytes for path, start, nbytes in sorted(self.reads)}
        times = {path: np.zeros(max(end, self.stores[0].size(path)), np.int64) for path, end in ends.items()}
        for path, start, nbytes in self.reads:
            times[path][start : start + nbytes] += 1
        return max((int(counts.max()) for counts in times.values()), default=0)


def unique_nbytes(shards: Sequence[list[Shard]]) -> int:
    """Return the number of different bytes of tensors that some ranks want."""
    wanted: dict[str, NDArray[Any]] = {}
    sizes: dict[str, int] = {}
    for shard in (shard for rank in shards for shard in rank):
        mask = wanted.setdefault(shard.fqn, np.zeros(shard.spec.shape, bool))
        mask[shard.box.slices()] = True
        sizes[shard.fqn] = shard.spec.itemsize
    return sum(int(mask.sum()) * sizes[fqn] for fqn, mask in wanted.items())


def random_hosts(size: int, seed: int) -> list[int]:
    """Put ranks on hosts, in any order."""
    rng = random.Random(seed)
    return [rng.randrange(max(1, size // rng.randint(1, 3))) for _ in range(size)]
