"""The order in which a rank reads, keeps and takes fetches, with work that a test holds up as it likes."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reknit.comm import group as comm
from reknit.engine.messages import StoppedError
from reknit.engine.sharing import exchange as exchange_module
from reknit.engine.sharing import tracker
from reknit.engine.sharing.exchange import Exchange, Sharing
from reknit.engine.sharing.host_exchange import largest
from reknit.engine.sharing.tracker import HostLink
from reknit.errors import CommError, DeadlineError, ShortageError, StorageError
from reknit.planner.sharing import Reads
from reknit.processes.shared_memory import SharedMemory
from reknit.system import start_thread
from reknit.testing.world import run_ranks
from tests.comm.memory_store import MemoryStore
from tests.planner.divided import divided
from tests.world.sharing import Hub, ThreadCarrier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reknit.comm.group import Group
    from reknit.engine.memory.workers import Arena

    Bytes = NDArray[np.uint8]

CELL = 4096
WAIT_S = 30.0


def contents(start: int, nbytes: int) -> Bytes:
    """Return the bytes of a range of the only file."""
    return ((np.arange(start, start + nbytes) * 7) % 251).astype(np.uint8)


class Work:
    """Reads of a made-up file; `hold` is called with the start of each fetch before it is read."""

    def __init__(self, nbytes: int, hold: Callable[[int], object] = lambda _: None) -> None:
        self.delivered = np.zeros(nbytes, np.uint8)
        self.fetched: list[int] = []
        self.abandoned = False
        self._hold = hold

    def fetch(self, path: str, start: int, buffer: Bytes) -> None:
        self._hold(start)
        self.fetched.append(start)
        buffer[:] = contents(start, len(buffer))

    def wrong(self, path: str, start: int, data: Bytes) -> list[tuple[int, int]]:
        return [] if np.array_equal(data, contents(start, len(data))) else [(start, start + len(data))]

    def deliver(self, number: int, start: int, data: Bytes, arena: Arena) -> None:
        assert not self.abandoned
        self.delivered[start : start + len(data)] = data

    def under_way(self) -> str:
        return "reading the file"

    def abandon(self) -> None:
        self.abandoned = True


def exchanges(
    works: Sequence[Work],
    hosts: Sequence[int],
    reads: Sequence[Sequence[tuple[int, int]]],
    *,
    bucket: int = 4 * CELL,
    num_slots: int = 8,
    timeout_s: Sequence[float] = (WAIT_S,) * 4,
    hub: Hub | None = None,
    private: dict[int, list[Callable[[Arena], None]]] | None = None,
    num_steps: int = 1,
    carried_by: Callable[[Hub, int], ThreadCarrier] = ThreadCarrier,
) -> Callable[[Group], int]:
    """Return the function that each rank runs, given the reads (start, size) of all ranks."""
    wanted = [
        Reads(np.zeros(len(r), np.int64), *np.array(r, np.int64).reshape(-1, 2).T.copy()) for r in reads
    ]
    division = divided(wanted, hosts, cell_nbytes=CELL, bucket_nbytes=bucket)
    store, hall = MemoryStore(), hub or Hub(len(works))

    def rank(group: Group) -> int:
        me = group.rank
        link = HostLink(me)
        store.set(str(me), link.address.encode())
        part = division.parts[me]
        peers = {int(r): store.get(str(r), WAIT_S).decode() for r in np.unique(part.taker)}
        sharing = Sharing(
            part=part,
            num_turns=division.num_turns,
            num_steps=num_steps,
            rows=[[row] for row in range(len(part.number))],
            paths=["file"] * len(part.number),
            peers=peers,
            cell_nbytes=CELL,
            num_slots=num_slots,
        )
        carrier = carried_by(hall, me) if division.num_turns else None
        if carrier is not None:
            sizes = largest(me, part, num_steps)
            carrier.reserve(sizes.sent, sizes.received)
        jobs = (private or {}).get(me, [])
        exchange = Exchange(
            rank=me,
            sharing=sharing,
            work=works[me],
            private=jobs,
            link=link,
            carrier=carrier,
            broken=lambda: group.broken,
            timeout_s=timeout_s[me],
        )
        try:
            exchange.run(2, CELL, 64 * CELL)
        finally:
            # As after a load: no rank leaves the group before all are done.
            with suppress(CommError):
                comm.barrier(group, "end", WAIT_S)
        return exchange.nbytes_received

    return rank


def errors_of(rank: Callable[[Group], int]) -> Callable[[Group], Any]:
    def caught(group: Group) -> Any:
        try:
            return rank(group)
        except BaseException as error:  # tests look at interrupts, too
            return error

    return caught


def cells(count: int, nbytes: int = CELL) -> list[tuple[int, int]]:
    return [(k * CELL, nbytes) for k in range(count)]


def all_delivered(works: Sequence[Work], reads: Sequence[Sequence[tuple[int, int]]]) -> bool:
    return all(
        np.array_equal(work.delivered[start : start + nbytes], contents(start, nbytes))
        for work, each in zip(works, reads, strict=True)
        for start, nbytes in each
    )


@pytest.mark.parametrize(
    ("hosts", "num_slots", "bucket"),
    [([0, 0], 1, 1), ([0, 1], 8, 10), ([0, 0, 1], 1, 10), ([0, 1, 2], 8, 1), ([0, 1, 0, 1], 1, 40)],
)
def test_with_few_places_and_many_exchanges_everything_arrives(
    hosts: list[int], num_slots: int, bucket: int
) -> None:
    reads = [cells(30)] * len(hosts)
    works = [Work(30 * CELL) for _ in hosts]
    received = run_ranks(
        len(hosts), exchanges(works, hosts, reads, num_slots=num_slots, bucket=bucket * CELL // 4)
    )
    assert all_delivered(works, reads)
    assert sorted(start for work in works for start in work.fetched) == [k * CELL for k in range(30)]
    for work, nbytes in zip(works, received, strict=True):
        assert nbytes == (30 - len(work.fetched)) * CELL


@pytest.mark.parametrize(("hosts", "num_steps"), [([0, 0, 1], 2), ([0, 1, 2], 70)])
def test_exchanges_in_steps_bring_the_same_bytes(hosts: list[int], num_steps: int) -> None:
    reads = [[*cells(9), (9 * CELL, 7)]] * len(hosts)
    works = [Work(10 * CELL) for _ in hosts]
    run_ranks(len(hosts), exchanges(works, hosts, reads, num_steps=num_steps))
    assert all_delivered(works, reads)


class Wrong(ThreadCarrier):
    """A carrier that brings wrong bytes to rank 1 from its second exchange on."""

    num_swaps = 0

    def swap(
        self,
        sent: Bytes,
        send_nbytes: list[int],
        received: Bytes,
        receive_nbytes: list[int],
        check: Callable[[], None],
    ) -> None:
        super().swap(sent, send_nbytes, received, receive_nbytes, check)
        self.num_swaps += 1
        if self._rank == 1 and self.num_swaps >= 2 and len(received):
            received[-1] ^= 1


@pytest.mark.parametrize(("hosts", "bucket"), [([0, 1], CELL), ([0, 1, 1], 2 * CELL)])
def test_bytes_that_change_between_hosts_are_delivered_to_nobody_and_their_reader_is_named(
    hosts: list[int], bucket: int
) -> None:
    reads, hub = [cells(16)] * len(hosts), Hub(len(hosts))
    works = [Work(16 * CELL) for _ in hosts]
    outcomes = run_ranks(
        len(hosts), errors_of(exchanges(works, hosts, reads, bucket=bucket, hub=hub, carried_by=Wrong))
    )
    assert type(outcomes[1]) is CommError
    assert "of file came from rank 0 by a queue of the test with other values" in outcomes[1].message
    for work in works:
        is_new = work.delivered != 0
        assert np.array_equal(work.delivered[is_new], contents(0, 16 * CELL)[is_new])
    assert hub.is_in_step


class Deaf(ThreadCarrier):
    """A carrier that hangs in a call on rank 1, as a driver without deadlines does."""

    let_go = threading.Event()

    def all_well(self, check: Callable[[], None], *, well: bool) -> bool:
        if self._rank == 1:
            self.let_go.wait(WAIT_S)
        return super().all_well(check, well=well)


def test_a_call_between_hosts_that_hangs_ends_with_the_deadline_of_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "_GRACE_S", 0.2)
    works = [Work(8 * CELL) for _ in range(2)]
    try:
        outcomes = run_ranks(
            2, errors_of(exchanges(works, [0, 1], [cells(8)] * 2, timeout_s=(0.5, 0.5), carried_by=Deaf))
        )
    finally:
        Deaf.let_go.set()
    for outcome in outcomes:
        assert isinstance(outcome, DeadlineError)
        assert "exchange 1 of 1 with other hosts by a queue of the test, waiting for" in outcome.message


def test_a_slow_taker_holds_up_the_reading_when_all_places_are_full_and_nothing_is_overwritten() -> None:
    gate = threading.Event()
    works = [Work(20 * CELL) for _ in range(2)]

    class Slow(Work):
        def deliver(self, number: int, start: int, data: Bytes, arena: Arena) -> None:
            if not gate.wait(0.5):
                # By now the other rank has filled its places, and must not have gone on.
                seen.append(len(works[0].fetched))
                gate.set()
            super().deliver(number, start, data, arena)

    seen: list[int] = []
    works[1] = Slow(20 * CELL)
    reads = [cells(20), cells(20)]
    run_ranks(2, exchanges(works, [0, 0], reads, num_slots=2))
    assert all_delivered(works, reads)
    assert seen
    assert max(seen) <= 3


def test_what_concerns_nobody_else_is_done_while_a_rank_waits_for_others() -> None:
    done = threading.Event()
    works = [Work(4 * CELL, lambda _: done.wait(WAIT_S)), Work(4 * CELL)]
    reads = [cells(4), cells(4)]
    private = {1: [lambda _: done.set()]}
    run_ranks(2, exchanges(works, [0, 0], reads, private=private))
    assert done.is_set()
    assert all_delivered(works, reads)


@pytest.mark.parametrize(("hosts", "at"), [([0, 0, 0], 5), ([0, 0, 1], 5), ([0, 1, 1], 0), ([0, 1, 2], 5)])
def test_an_error_while_others_wait_ends_them_all_and_only_its_own_rank_knows_why(
    hosts: list[int], at: int
) -> None:
    reads = [cells(18)] * 3
    works = [Work(18 * CELL) for _ in range(3)]

    def fail(_: int) -> None:
        if len(works[1].fetched) >= at:
            raise StorageError("no")

    works[1] = Work(18 * CELL, fail)
    hub = Hub(3)
    outcomes = run_ranks(3, errors_of(exchanges(works, hosts, reads, hub=hub)))
    assert hub.is_in_step
    assert isinstance(outcomes[1], StorageError)
    assert outcomes[1].phase == "read"
    assert {type(outcomes[rank]) for rank in (0, 2)} == {StoppedError}
    assert all(work.abandoned for work in works)


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_rank_that_cannot_make_its_ring_keeps_nobody_waiting(
    hosts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(SharedMemory):
        @classmethod
        def create(cls, nbytes: int, name: str = "ring") -> SharedMemory:
            if threading.current_thread().name == "rank 1":
                raise MemoryError("no room")
            return SharedMemory.create(nbytes)

    monkeypatch.setattr(exchange_module, "SharedMemory", Short)
    works, hub = [Work(8 * CELL) for _ in range(2)], Hub(2)
    outcomes = run_ranks(2, errors_of(exchanges(works, hosts, [cells(8)] * 2, hub=hub)))
    assert hub.is_in_step
    assert [type(outcome) for outcome in outcomes] == [StoppedError, MemoryError]


def test_a_rank_that_can_start_no_thread_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(name: str, work: Callable[[], None]) -> threading.Thread:
        if name == "reknit-exchange" and threading.current_thread().name == "rank 1":
            raise ShortageError("no further thread")
        return start_thread(name, work)

    monkeypatch.setattr(exchange_module, "start_thread", scarce)
    works, hub = [Work(8 * CELL) for _ in range(2)], Hub(2)
    outcomes = run_ranks(2, errors_of(exchanges(works, [0, 1], [cells(8)] * 2, hub=hub)))
    assert hub.is_in_step
    assert [type(outcome) for outcome in outcomes] == [StoppedError, ShortageError]


def test_a_rank_that_waits_too_long_says_for_what() -> None:
    late = threading.Event()
    threading.Timer(1.0, late.set).start()
    works = [Work(8 * CELL), Work(8 * CELL, lambda _: late.wait(WAIT_S))]
    exchanged = exchanges(works, [0, 0], [cells(8)] * 2, bucket=CELL, timeout_s=(0.3, WAIT_S))
    waited, stopped = run_ranks(2, errors_of(exchanged))
    assert isinstance(waited, DeadlineError)
    assert "of file, that rank 1 reads did not finish within 0.3 s" in waited.message
    assert isinstance(stopped, StoppedError)


def test_a_rank_that_waits_too_long_for_another_host_stays_in_step_with_it() -> None:
    late = threading.Event()
    threading.Timer(1.0, late.set).start()
    works, hub = [Work(8 * CELL), Work(8 * CELL, lambda _: late.wait(WAIT_S))], Hub(2)
    exchanged = exchanges(works, [0, 1], [cells(8)] * 2, bucket=CELL, hub=hub, timeout_s=(0.3, WAIT_S))
    outcomes = run_ranks(2, errors_of(exchanged))
    assert [type(outcome) for outcome in outcomes] == [DeadlineError, StoppedError]
    # Rank 0 had already said that it was ready, so one exchange took place before both ended.
    assert hub.is_in_step
    assert hub.num_swaps == 1
