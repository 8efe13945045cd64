"""Exchanges between hosts: rows of fetches, packed by rank, over the process group of the training."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct

from reknit.engine.messages import StoppedError
from reknit.engine.sharing.tracker import OTHER_HOSTS, Arrival, HeldFetch, RingSlot
from reknit.errors import CommError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.engine.sharing.tracker import FetchTracker
    from reknit.planner.sharing import FetchTable
    from reknit.processes.shared_memory import SharedMemory

    Bytes = NDArray[np.uint8]

BUCKET_NBYTES = 32 << 20
"""Most bytes that a rank sends, or receives, in one step of an exchange; or one fetch, if that is larger."""


class Carrier(Protocol):
    """The transport of bytes to ranks of other hosts: the process group that the training has already.

    All ranks make the same calls in the same order.  A call that waits calls `check` now and then, whose
    error ends it.  Raises `CommError` when a rank is gone.  Its text is its kind.
    """

    size: int
    kind: str
    """How bytes are carried, which must be the same on all ranks; empty if this rank has nothing for it."""

    def reserve(self, send_nbytes: int, receive_nbytes: int) -> None:
        """Take memory for the largest swap, before ranks wait for each other.  Raises `ShortageError`."""

    def release(self) -> None:
        """Give the memory back; no call follows."""

    def all_well(self, check: Callable[[], None], *, well: bool) -> bool:
        """Return whether all ranks are well."""

    def swap(
        self,
        sent: Bytes,
        send_nbytes: list[int],
        received: Bytes,
        receive_nbytes: list[int],
        check: Callable[[], None],
    ) -> None:
        """Send and receive bytes, both packed in the order of ranks: so many to, and from, each rank."""


class Sizes(Struct, frozen=True):
    """Most bytes that a rank sends and receives in one step, and receives in one exchange."""

    sent: int
    received: int
    in_exchange: int


def largest(rank: int, part: FetchTable, num_steps: int) -> Sizes:
    """Return the largest sizes that a rank sends and receives."""
    copies = np.diff(part.remote_first)
    came = (part.reader != rank) & (part.source == rank)
    turn = np.maximum(part.turn, 0)
    sent = np.bincount(turn, -(-part.nbytes // num_steps) * copies, minlength=1)
    received = np.bincount(turn, -(-part.nbytes // num_steps) * came, minlength=1)
    whole = np.bincount(turn, part.nbytes * came, minlength=1)
    return Sizes(int(sent.max()), int(received.max()), int(whole.max()))


class HostExchange:
    """One rank's part in the exchanges between hosts, which one thread holds in order.

    Each has the same number of steps on all ranks, and a part of each fetch travels in each step.  So the
    memory is bounded for any number of hosts.  Received bytes lie in one half of an area in every other
    exchange, so that ranks of this host can copy out of one half while the other is filled.  `paths` has the
    file of each row of `part`; `wrong` returns the ranges of the bytes of a file, from a byte on, that are
    not those of the checkpoint.
    """

    def __init__(
        self,
        *,
        rank: int,
        part: FetchTable,
        carrier: Carrier,
        fetches: FetchTracker,
        num_steps: int,
        paths: Sequence[str],
        wrong: Callable[[str, int, Bytes], list[tuple[int, int]]],
    ) -> None:
        self._rank, self._part, self._carrier, self._fetches = rank, part, carrier, fetches
        self._num_steps, self._paths, self._wrong = num_steps, paths, wrong
        self.ended = False
        self._incoming = (part.reader != rank) & (part.source == rank)
        self._outgoing = (part.reader == rank) & (part.turn >= 0)
        sizes = largest(rank, part, num_steps)
        self._half = -(-sizes.in_exchange // 4096) * 4096
        self.area_nbytes = 2 * self._half
        self.packed_nbytes = sizes.sent + (sizes.received if num_steps > 1 else 0)
        """Most bytes that are packed for, and out of, one step."""
        self._ring: Bytes = np.empty(0, np.uint8)
        self._area_at = 0

    def receive_into(self, ring: SharedMemory, at: int) -> None:
        """Receive into `area_nbytes` of the ring, from byte `at` on."""
        self._ring, self._area_at = ring.bytes, at

    def run(self, num_exchanges: int) -> None:
        """Hold all exchanges; an error in them fails the fetches."""
        try:
            for turn in range(num_exchanges):
                self._hold(turn, f"exchange {turn + 1} of {num_exchanges} with other hosts")
        except BaseException as error:  # also a bug: the workers must not wait for more to come
            self._fetches.failed(error)
        self.ended = True

    def _hold(self, turn: int, what: str) -> None:
        """Hold one exchange, when its bytes of this rank are read and there is room for those of others."""
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
        with self._carrying(what):
            all_well = self._carrier.all_well(fetches.check_other_hosts, well=failure is None)
        if not all_well:
            raise failure or StoppedError("a rank of another host has left the exchange")
        self._swap(turn, {row: fetches.held[int(numbers[row])].memory for row in sending}, what)

    def _swap(self, turn: int, sent: Mapping[int, Bytes], what: str) -> None:
        """Send rows, given with their bytes, and hand received rows to the workers of this host."""
        part, fetches = self._part, self._fetches
        outgoing = sorted(
            (int(rank), row)
            for row in sent
            for rank in part.remote[part.remote_first[row] : part.remote_first[row + 1]]
        )
        rows = (self._incoming & (part.turn == turn)).nonzero()[0]
        incoming = sorted((int(part.reader[row]), int(row)) for row in rows)
        places, at = [], self._area_at + turn % 2 * self._half
        for _, row in incoming:
            places.append(at)
            at += int(part.nbytes[row])
        for step in range(self._num_steps):
            self._carry(step, outgoing, sent, incoming=incoming, places=places, what=what)
        for row in sent:
            fetches.taken(int(part.number[row]), OTHER_HOSTS)
        for (reader, row), at in zip(incoming, places, strict=True):
            memory = self._ring[at : at + int(part.nbytes[row])]
            if (error := self._found_wrong(reader, row, memory)) is not None:
                # This rank goes on to the next exchange, in which all ranks receive its error.
                fetches.failed(error)
                return
            fetches.hold(row, HeldFetch(RingSlot(at, memory, turn), at, memory, set()))
            done = partial(fetches.taken, int(part.number[row]), self._rank)
            fetches.arrive(Arrival(row, memory, done))

    def _carry(
        self,
        step: int,
        outgoing: Sequence[tuple[int, int]],
        sent: Mapping[int, Bytes],
        *,
        incoming: Sequence[tuple[int, int]],
        places: Sequence[int],
        what: str,
    ) -> None:
        """Send and receive a part of each row."""
        cuts = {row: self._cut(step, row) for _, row in (*outgoing, *incoming)}
        packed = [sent[row][slice(*cuts[row])] for _, row in outgoing]
        received = sum(cuts[row][1] - cuts[row][0] for _, row in incoming)
        straight = self._num_steps == 1 and incoming
        into = self._ring[places[0] : places[0] + received] if straight else np.empty(received, np.uint8)
        with self._carrying(what):
            self._carrier.swap(
                np.concatenate(packed) if packed else np.empty(0, np.uint8),
                self._per_rank(outgoing, cuts),
                into,
                self._per_rank(incoming, cuts),
                self._fetches.check_other_hosts,
            )
        if not straight:
            position = 0
            for (_, row), at in zip(incoming, places, strict=True):
                first, end = cuts[row]
                self._ring[at + first : at + end] = into[position : position + end - first]
                position += end - first

    def _cut(self, step: int, row: int) -> tuple[int, int]:
        """Return the range of a row's bytes that travel in a step."""
        nbytes = int(self._part.nbytes[row])
        size = -(-nbytes // self._num_steps)
        return min(step * size, nbytes), min((step + 1) * size, nbytes)

    def _per_rank(self, rows: Sequence[tuple[int, int]], cuts: Mapping[int, tuple[int, int]]) -> list[int]:
        """Return the number of bytes to, or from, each rank."""
        counts = [0] * self._carrier.size
        for rank, row in rows:
            first, end = cuts[row]
            counts[rank] += end - first
        return counts

    def _found_wrong(self, reader: int, row: int, memory: Bytes) -> CommError | None:
        """Return the error of a row that did not arrive as it was read; None if it did, or none can say."""
        path = self._paths[row]
        wrong = self._wrong(path, int(self._part.start[row]), memory)
        if not wrong:
            return None
        first, end = wrong[0]
        return CommError(
            f"bytes {first}:{end} of {path} came from rank {reader} by {self._carrier} with other values than"
            " that rank read and verified",
            remedy="the file is whole, its way between hosts is not: look at the network and the devices of "
            'both ranks; LoadOptions(share="never") reads without it',
        )

    @contextmanager
    def _carrying(self, what: str) -> Iterator[None]:
        """Note the present work of this rank; the group of ranks finds a lost rank sooner."""
        self._fetches.in_exchange = f"{what} by {self._carrier}"
        try:
            yield
        except DeadlineError:
            raise
        except CommError as error:
            raise StoppedError(error.message) from error
        finally:
            self._fetches.in_exchange = ""
