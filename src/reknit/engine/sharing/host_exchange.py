"""Exchanges between hosts: what belongs to each, packed by rank, over the process group of the training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from reknit.engine.sharing.fetch_tracker import Arrival, StoppedError
from reknit.engine.sharing.ring import OTHER_HOSTS, HeldFetch, Slot
from reknit.errors import CommError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from reknit.engine.sharing.fetch_tracker import FetchTracker
    from reknit.planner.sharing import FetchTable
    from reknit.processes.shared_memory import SharedMemory

    Bytes = NDArray[np.uint8]

BUCKET_NBYTES = 32 << 20
"""Most bytes that a rank sends, or receives, in one exchange."""


class Carrier(Protocol):
    """The transport of bytes to ranks of other hosts: the process group that the training has already.

    All ranks make the same calls in the same order.  A call that waits calls `check` now and then, whose
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
    """One rank's part in the exchanges between hosts, which one thread holds in order.

    What comes lies in one half of an area in every other exchange, so that ranks of this host can copy out of
    one half while the other is filled.
    """

    def __init__(self, rank: int, part: FetchTable, carrier: Carrier, fetches: FetchTracker) -> None:
        self._rank, self._part, self._carrier, self._fetches = rank, part, carrier, fetches
        self._incoming = (part.reader != rank) & (part.source == rank)
        self._outgoing = (part.reader == rank) & (part.turn >= 0)
        came = self._incoming
        per_turn = np.bincount(part.turn[came], part.nbytes[came], minlength=1)
        self._half = -(-int(per_turn.max()) // 4096) * 4096
        self.area_nbytes = 2 * self._half
        copies = np.diff(part.remote_first)
        leaving = np.bincount(np.maximum(part.turn, 0), part.nbytes * copies, minlength=1)
        self.sent_nbytes = int(leaving.max())
        """Most bytes that are packed for one exchange."""
        self._ring: Bytes = np.empty(0, np.uint8)
        self._area_at = 0

    def receive_into(self, ring: SharedMemory, at: int) -> None:
        """Receive into `area_nbytes` of the ring, from byte `at` on."""
        self._ring, self._area_at = ring.bytes, at

    def run(self, num_exchanges: int) -> None:
        """Hold all exchanges; what fails them fails the fetches."""
        try:
            for turn in range(num_exchanges):
                self._hold(turn)
        except BaseException as error:  # whatever it is, the workers must not wait for more to come
            if isinstance(error, CommError) and not isinstance(error, DeadlineError):
                error = StoppedError(error.message)  # the group of ranks knows better who is gone
            self._fetches.failed(error)

    def _hold(self, turn: int) -> None:
        """Hold one exchange, when what this rank sends is read and there is room for what comes."""
        fetches, numbers = self._fetches, self._part.number
        sending: list[int] = (self._outgoing & (self._part.turn == turn)).nonzero()[0].tolist()
        to_read = numbers[sending].tolist()

        def is_read() -> bool:
            while to_read and to_read[-1] in fetches.held:
                to_read.pop()
            return fetches.is_open and not to_read

        failure: BaseException | None = None
        try:
            fetches.wait(is_read)
            # The half of the area that this exchange fills was filled two exchanges ago.
            fetches.wait(lambda: turn < 2 or fetches.all_copied(turn - 2))
            fetches.check()
        except BaseException as error:  # the others must not wait for this rank's bytes
            failure = error
        if not self._carrier.all_well(failure is None, fetches.check_other_hosts):
            raise failure or StoppedError("a rank of another host has left the exchange")
        self._swap(turn, {row: fetches.held[int(numbers[row])].memory for row in sending})

    def _swap(self, turn: int, sent: Mapping[int, Bytes]) -> None:
        """Send rows, given with their bytes, and hand what comes to the workers of this host."""
        part, fetches = self._part, self._fetches
        outgoing = sorted(
            (int(rank), row)
            for row in sent
            for rank in part.remote[part.remote_first[row] : part.remote_first[row + 1]]
        )
        rows = (self._incoming & (part.turn == turn)).nonzero()[0]
        incoming = sorted((int(part.reader[row]), int(row)) for row in rows)
        packed = [sent[row][: part.nbytes[row]] for _, row in outgoing]
        received = [int(part.nbytes[row]) for _, row in incoming]
        at = self._area_at + turn % 2 * self._half
        self._carrier.swap(
            np.concatenate(packed) if packed else np.empty(0, np.uint8),
            self._per_rank(outgoing),
            self._ring[at : at + sum(received)],
            self._per_rank(incoming),
            fetches.check_other_hosts,
        )
        for row in sent:
            fetches.taken(int(part.number[row]), OTHER_HOSTS)
        for (_, row), nbytes in zip(incoming, received, strict=True):
            memory = self._ring[at : at + nbytes]
            fetches.hold(row, HeldFetch(Slot(at, memory, turn), at, memory, set()))
            done = partial(fetches.taken, int(part.number[row]), self._rank)
            fetches.arrive(Arrival(row, memory, done))
            at += nbytes

    def _per_rank(self, rows: list[tuple[int, int]]) -> list[int]:
        """Return how many bytes go to, or come from, each rank."""
        counts = [0] * self._carrier.size
        for rank, row in rows:
            counts[rank] += int(self._part.nbytes[row])
        return counts
