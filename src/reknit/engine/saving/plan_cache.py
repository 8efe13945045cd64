"""The root's cache of earlier plans, so that ranks need not send them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from reknit.planner.columns import NOTHING, merged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.planner.columns import RankColumns

    Ints = NDArray[np.int64]

_Kept = TypeVar("_Kept")


class PlanCache:
    """The last columns of every rank under each of its latest plans.

    Each rank has so many slots.  Ranks that change plans together use the same slot, so the columns in a slot
    are shared by all of them.  Nothing else is kept, however long ranks go on saving.
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
        """Return the slot of each rank's plan (two numbers), -1 for one that is not known."""
        self._grow(ranks)
        self._clock += 1
        fits = (self._plans[ranks] == plans[:, None]).all(axis=2) & (self._kept_at[ranks] > 0)
        slots = np.where(fits.any(axis=1), fits.argmax(axis=1), -1)
        self._used[ranks[slots >= 0], slots[slots >= 0]] = self._clock
        return slots

    def keep(self, plans: Ints, latest: RankColumns) -> None:
        """Keep the columns of ranks under their plans; the plan that a rank used least lately makes room."""
        ranks = latest.ranks
        slots = self.find(ranks, plans)
        slots = np.where(slots >= 0, slots, self._used[ranks].argmin(axis=1))
        self._clock += 1
        self._plans[ranks, slots] = plans
        self._kept_at[ranks, slots] = self._used[ranks, slots] = self._clock
        for slot in np.unique(slots).tolist():
            fresh = _only(latest, slots == slot)
            before = self.slots[slot]
            rest = _only(before, ~np.isin(before.ranks, fresh.ranks))
            self.slots[slot] = self._merge([rest, fresh])

    def latest(self, ranks: Ints, slots: Ints) -> RankColumns:
        """Return the columns of ranks that are in these slots."""
        parts = []
        for slot in np.unique(slots).tolist():
            part = self.slots[slot]
            parts.append(_only(part, np.isin(part.ranks, ranks[slots == slot])))
        return self._merge(parts)

    def version(self, ranks: Ints, slots: Ints) -> bytes:
        """Return bytes that are the same only while the ranks' slots hold the same."""
        return np.stack((slots, self._kept_at[ranks, slots])).tobytes()

    def _grow(self, ranks: Ints) -> None:
        """Make room for ranks that are new."""
        more = int(ranks.max(initial=-1)) + 1 - len(self._plans)
        if more > 0:
            self._plans, self._kept_at, self._used = (
                np.concatenate((column, np.zeros((more, *column.shape[1:]), np.int64)))
                for column in (self._plans, self._kept_at, self._used)
            )


def _only(latest: RankColumns, which: NDArray[np.bool_]) -> RankColumns:
    """Return the columns of some of the ranks, the same object if that is all of them."""
    if which.all():
        return latest
    return latest.select(np.flatnonzero(which)) if which.any() else NOTHING


def keep_latest(kept: dict[bytes, _Kept], key: bytes, value: _Kept, most: int) -> _Kept:
    """Keep a value as the latest, forget the oldest where there are too many, and return it.

    Another thread may forget all of them meanwhile.
    """
    kept.pop(key, None)
    kept[key] = value
    for oldest in list(kept)[:-most]:
        kept.pop(oldest, None)
    return value
