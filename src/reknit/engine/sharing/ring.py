"""The slots of a ring in shared memory: their fetches, and the ranks that have not copied these yet."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.planner.sharing import FetchTable

    Bytes = NDArray[np.uint8]

OTHER_HOSTS = -1
"""Stands for all ranks of other hosts, which get a fetch in one exchange."""


class RingSlot:
    """Room for fetches in the ring; `turn` is the exchange that filled it, -1 if this rank did."""

    def __init__(self, at: int, memory: Bytes, turn: int = -1) -> None:
        self.at, self.memory, self.turn = at, memory, turn
        self.holds: set[int] = set()


class HeldFetch(NamedTuple):
    """A fetch in a slot, from byte `at` of the ring on, and who has not copied it yet.

    That can be this rank itself, and `OTHER_HOSTS`.
    """

    slot: RingSlot
    at: int
    memory: Bytes
    waiting: set[int]


def batches_of(part: FetchTable, rank: int, cell_nbytes: int) -> list[list[int]]:
    """Return the rows that a rank reads from storage, in batches that fit in a slot.

    Those of a batch travel in the same exchange between hosts, or in none.
    """
    batches: list[list[int]] = []
    filling: dict[bool, tuple[int, int, list[int]]] = {}
    for row in (part.reader == rank).nonzero()[0].tolist():
        turn, nbytes = int(part.turn[row]), aligned(int(part.nbytes[row]))
        of_turn, filled, batch = filling.get(turn < 0, (turn, cell_nbytes, []))
        if of_turn != turn or filled + nbytes > cell_nbytes:
            filled, batch = 0, []
            batches.append(batch)
        batch.append(row)
        filling[turn < 0] = turn, filled + nbytes, batch
    return batches


def aligned(nbytes: int) -> int:
    """Return the bytes of a slot that a fetch takes up."""
    return -(-nbytes // 64) * 64


def num_slots(batches: Sequence[Sequence[int]], part: FetchTable, wanted: int) -> int:
    """Return the slots that a rank's ring needs: `wanted`, unless there is less to read, or more at once."""
    turns = Counter(int(part.turn[batch[0]]) for batch in batches)
    # The rows of one exchange are in the ring all at once.
    together = max((count for turn, count in turns.items() if turn >= 0), default=0)
    return min(len(batches), max(wanted, together + 1))
