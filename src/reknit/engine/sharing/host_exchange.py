"""Exchanges between hosts: what belongs to each, packed by rank, over the process group of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from reknit.planner.sharing import FetchTable

    Bytes = NDArray[np.uint8]

BUCKET_NBYTES = 32 << 20
"""Most bytes that a rank sends, or receives, in one exchange."""


class Carrier(Protocol):
    """What brings bytes to the ranks of other hosts: the process group that the training has already.

    All ranks make the same calls in the same order.  While a call waits it calls `check` now and then, whose
    error ends it.  Raises `CommError` when a rank is gone.
    """

    size: int

    def all_well(self, well: bool, check: Callable[[], None]) -> bool:
        """Tell whether all ranks say that all is well."""

    def swap(
        self,
        sent: Bytes,
        send_nbytes: list[int],
        received: Bytes,
        receive_nbytes: list[int],
        check: Callable[[], None],
    ) -> None:
        """Send and receive bytes, both packed in the order of ranks: so many to, and from, each rank."""


class HostExchange:
    """One rank's part in the exchanges between hosts.

    `area` receives what comes: one half for every other exchange, so that ranks of this host can copy out of
    one half while the other is filled.  Whoever makes it sets it.
    """

    def __init__(self, rank: int, part: FetchTable, carrier: Carrier, check: Callable[[], None]) -> None:
        self._rank, self._part, self._carrier, self._check = rank, part, carrier, check
        came = (part.reader != rank) & (part.source == rank)
        per_turn = np.bincount(part.turn[came], part.nbytes[came], minlength=1)
        self._half = -(-int(per_turn.max()) // 4096) * 4096
        self._incoming = came
        self._outgoing = (part.reader == rank) & (part.turn >= 0)
        self.area_nbytes = 2 * self._half
        copies = np.diff(part.remote_first)
        leaving = np.bincount(np.maximum(part.turn, 0), part.nbytes * copies, minlength=1)
        self.sent_nbytes = int(leaving.max())
        """Most bytes that are packed for one exchange."""
        self.area: Bytes = np.empty(0, np.uint8)

    def sending(self, turn: int) -> list[int]:
        """Return the rows that this rank sends in an exchange."""
        rows: list[int] = (self._outgoing & (self._part.turn == turn)).nonzero()[0].tolist()
        return rows

    def all_well(self, well: bool) -> bool:
        """Tell whether all ranks say that all is well."""
        return self._carrier.all_well(well, self._check)

    def swap(self, turn: int, sent: Mapping[int, Bytes]) -> list[tuple[int, int, Bytes]]:
        """Hold one exchange: send rows, given with bytes; return rows with place and bytes in `area`."""
        part, size = self._part, self._carrier.size
        outgoing = sorted(
            (int(rank), row)
            for row in sent
            for rank in part.remote[part.remote_first[row] : part.remote_first[row + 1]]
        )
        rows = (self._incoming & (part.turn == turn)).nonzero()[0]
        incoming = sorted((int(part.reader[row]), int(row)) for row in rows)
        packed = [sent[row][: part.nbytes[row]] for _, row in outgoing]
        base = turn % 2 * self._half
        places, at = [], base
        for _, row in incoming:
            nbytes = int(part.nbytes[row])
            places.append((row, at, self.area[at : at + nbytes]))
            at += nbytes
        self._carrier.swap(
            np.concatenate(packed) if packed else np.empty(0, np.uint8),
            self._per_rank(outgoing, size),
            self.area[base:at],
            self._per_rank(incoming, size),
            self._check,
        )
        return places

    def _per_rank(self, rows: list[tuple[int, int]], size: int) -> list[int]:
        """Return how many bytes go to, or come from, each rank."""
        counts = [0] * size
        for rank, row in rows:
            counts[rank] += int(self._part.nbytes[row])
        return counts
