"""Which memory of a save may be copied while training goes on, and has it stayed unchanged?"""

from __future__ import annotations

import logging
from bisect import bisect_right
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.memory.elements import itemsize
from reknit.engine.memory.sample import Range, Sample
from reknit.engine.memory.sources import Sources
from reknit.engine.memory.staging import changes, copied_later
from reknit.errors import shortage
from reknit.types.devices import device_of, is_queued, memory_of
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.engine.memory.file_image import EntryRow, Image
    from reknit.types.barrier import Barrier
    from reknit.types.shard import Holdings, Shard

logger = logging.getLogger("reknit")

SMALL_NBYTES = 64 << 10
"""Up to this size entries are copied before save returns: watching them would take as long."""

_CLONES_NBYTES = 64 << 20
"""Device memory per process that copies of such entries may take."""


class Deferred:
    """The part of a save whose memory changes only after a thread has reached a barrier.

    The images are split into three lists.  The entries of `now` may change at any time.  Devices can copy the
    entries of `queued` on their own, and a thread of the host can copy the entries of `later`.  Barriers are
    not trusted: changes show in the versions that torch counts, and in a sample of the bytes.
    """

    def __init__(self, holdings: Holdings, images: Sequence[Image]) -> None:
        barriers = [barrier for barrier in holdings.barriers if barrier.stands()]
        try:
            self._divide(holdings, images, barriers, _CLONES_NBYTES)
        except RuntimeError as error:
            if shortage(error) is None:
                raise
            # A sample needs memory of the device; copies to the host need none.
            logger.info("a lazy save copies all of its tensors before it returns: %s", error)
            self._divide(holdings, images, (), 0)

    def _divide(
        self, holdings: Holdings, images: Sequence[Image], barriers: Iterable[Barrier], room: int
    ) -> None:
        guard = _Guard(barriers)
        self._watched: list[tuple[Shard, Barrier, int | None]] = []
        ranges: list[Range] = []
        sources, clones = images[0].sources if images else Sources(()), dict[int, Any]()

        def group_of(entry: EntryRow) -> str:
            nonlocal room
            source = sources[entry.shard]
            barrier = guard.before(source, entry)
            if barrier is None:
                if is_queued(source) and source.nbytes <= min(SMALL_NBYTES, room):
                    room -= source.nbytes
                    clones[entry.shard] = source.clone()  # faster than waiting for the device
                    return "queued"
                if device_of(source) is not None and not is_queued(source):
                    _log_at_once(source.device.type)
                return "now"
            shard = holdings.shards[entry.shard]
            self._watched.append((shard, barrier, changes(shard.data)))
            ranges.append(Range(source, entry.first, entry.numel))
            return "queued" if is_queued(source) else "later"

        groups = [np.array([group_of(entry) for entry in image.entries.rows()]) for image in images]
        sources = sources.instead(clones)
        self.now, self.queued, self.later = (
            [
                image._replace(sources=sources, entries=image.entries.select(group == name))
                for image, group in zip(images, groups, strict=True)
            ]
            for name in ("now", "queued", "later")
        )
        self._sample = Sample(ranges)

    def __len__(self) -> int:
        return len(self._watched)

    def hold(self, wait: Callable[[], object]) -> None:
        """Block threads that reach the barriers until `wait` returns."""
        for barrier in {barrier for _, barrier, _ in self._watched}:
            barrier.hold(wait)

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since; their barriers are not used again."""
        counted = {n for n, (shard, _, count) in enumerate(self._watched) if changes(shard.data) != count}
        found = [self._watched[n] for n in sorted(counted.union(self._sample.changed()))]
        for _, barrier, _ in found:
            barrier.distrust()
        return list(dict.fromkeys(full_name(shard.item, shard.fqn) for shard, _, _ in found))


@cache
def _log_at_once(device_type: str) -> None:
    logger.info(
        "torch has no streams for %s: its tensors are copied before save returns, also with "
        "SaveOptions(stage='lazy')",
        device_type,
    )


class _Guard:
    """Finds the barrier that guards some memory."""

    def __init__(self, barriers: Iterable[Barrier]) -> None:
        self._ranges: dict[Any, list[tuple[int, int, Barrier]]] = {}
        for barrier in barriers:
            for memory, start, nbytes in barrier.memory():
                self._ranges.setdefault(memory, []).append((start, nbytes, barrier))
        for ranges in self._ranges.values():
            ranges.sort(key=itemgetter(0, 1))

    def before(self, source: Any, entry: EntryRow) -> Barrier | None:
        """Return the barrier that guards all bytes of an entry, or None if they must be copied now."""
        if not self._ranges or entry.nbytes <= SMALL_NBYTES or not copied_later(source):
            return None
        memory, first_byte = memory_of(source)
        start = first_byte + entry.first * itemsize(source)
        ranges = self._ranges.get(memory, [])
        number = bisect_right(ranges, start, key=itemgetter(0)) - 1
        if number < 0:
            return None
        first, nbytes, barrier = ranges[number]
        return barrier if start + entry.nbytes <= first + nbytes else None
