"""The cache of earlier plans on the root, so that ranks need not send them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from reknit.planner.columns import NOTHING, distinct, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.planner.columns import RankColumns

    Ints = NDArray[np.int64]

_Kept = TypeVar("_Kept")


class PlanCache:
    """The last columns of every rank under each of its latest plans.

    Each rank has a fixed number of slots, so memory is bounded.  Ranks that change plans together use the
    same slot, and share the columns in it.
    """

    def __init__(
        self, num_slots: int, merge: Callable[[Sequence[RankColumns]], RankColumns] = merged
    ) -> None:
        self._merge = merge
        self.slots: list[RankColumns] = [NOTHING] * num_slots
        self._plans = np.zeros((0, num_slots, 2), np.int64)
        self._kept_at = np.zeros((0, num_slots), np.int64)
        """The time at which a slot was filled, as a number that grows; 0 for an empty slot."""
        self._used = np.zeros((0, num_slots), np.int64)
        self._clock = 0

    def find(self, ranks: Ints, plans: Ints) -> Ints:
        """Return the slot of each rank's plan (two numbers), or -1 for an unknown plan."""
        self._grow(ranks)
        self._clock += 1
        fits = (self._plans[ranks] == plans[:, None]).all(axis=2) & (self._kept_at[ranks] > 0)
        slots = np.where(fits.any(axis=1), fits.argmax(axis=1), -1)
        self._used[ranks[slots >= 0], slots[slots >= 0]] = self._clock
        return slots

    def keep(self, plans: Ints, latest: RankColumns) -> None:
        """Keep the columns of ranks under their plans, in place of the least recently used plan of a rank."""
        ranks = latest.ranks
        slots = self.find(ranks, plans)
        slots = np.where(slots >= 0, slots, self._used[ranks].argmin(axis=1))
        self._clock += 1
        self._plans[ranks, slots] = plans
        self._kept_at[ranks, slots] = self._used[ranks, slots] = self._clock
        for slot in distinct(slots):
            fresh = _only(latest, slots == slot)
            before = self.slots[slot]
            rest = _only(before, ~np.isin(before.ranks, fresh.ranks))
            self.slots[slot] = self._merge([rest, fresh])

    def latest(self, ranks: Ints, slots: Ints) -> RankColumns:
        """Return the columns of ranks that are in these slots."""
        parts = []
        for slot in distinct(slots):
            part = self.slots[slot]
            parts.append(_only(part, np.isin(part.ranks, ranks[slots == slot])))
        return self._merge(parts)

    def version(self, ranks: Ints, slots: Ints) -> bytes:
        """Return bytes that change whenever the contents of the ranks' slots change."""
        return np.stack((slots, self._kept_at[ranks, slots])).tobytes()

    def _grow(self, ranks: Ints) -> None:
        """Make room for new ranks."""
        more = int(ranks.max(initial=-1)) + 1 - len(self._plans)
        if more > 0:
            self._plans, self._kept_at, self._used = (
                np.concatenate((column, np.zeros((more, *column.shape[1:]), np.int64)))
                for column in (self._plans, self._kept_at, self._used)
            )


def _only(latest: RankColumns, which: NDArray[np.bool_]) -> RankColumns:
    """Return the columns of some of the ranks; for all ranks, the same object."""
    if which.all():
        return latest
    return latest.select(np.flatnonzero(which)) if which.any() else NOTHING


def keep_latest(kept: dict[bytes, _Kept], key: bytes, value: _Kept, most: int) -> _Kept:
    """Return a value that is kept as the latest; drop the oldest beyond `most` values.

    Another thread may clear `kept` meanwhile.
    """
    kept.pop(key, None)
    kept[key] = value
    for oldest in list(kept)[:-most]:
        kept.pop(oldest, None)
    return value
