"""The two arenas of a rank: lent and reused, within a budget, in any order of saves."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reknit.engine.memory import arena_pool as arenas_module
from reknit.engine.memory.arena_pool import Arenas, Lease
from reknit.engine.memory.workers import SPAN_NBYTES
from reknit.environment import local_ranks
from reknit.errors import UsageError
from reknit.processes.shared_memory import SharedMemory
from tests.resources import mapped, open_files
from tests.running.cases import one_by_one
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20


@contextmanager
def arenas_of(budget_nbytes: int | None) -> Iterator[Arenas]:
    arenas = Arenas(budget_nbytes)
    try:
        yield arenas
    finally:
        arenas.close()


def acquire(arenas: Arenas, nbytes: int) -> Lease:
    """Borrow an arena, which must be free, or possible to make, at once."""
    lease = arenas.acquire(nbytes, 0)
    assert lease is not None
    return lease


@dataclass(frozen=True)
class Held:
    """The descriptors and arenas of this process at one moment, to be compared with later ones."""

    files: set[str] = field(default_factory=open_files)
    arenas: dict[str, int] = field(default_factory=mapped)

    def new_nbytes(self) -> int:
        """Return the number of bytes of newly mapped arenas."""
        return sum(nbytes for addresses, nbytes in mapped().items() if addresses not in self.arenas)

    def nothing_is_left(self) -> bool:
        """Return whether no new descriptor and no new arena is left."""
        return open_files() <= self.files and self.new_nbytes() == 0


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


class Gate:
    """A gate that delays new arenas until it is opened, and sets `reached` when one is begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        populate = SharedMemory.populate

        def wait(arena: SharedMemory, start: int, nbytes: int) -> None:
            self.reached.set()
            assert self.opened.wait(60)
            populate(arena, start, nbytes)

        monkeypatch.setattr(SharedMemory, "populate", wait)


def limit_memory(monkeypatch: pytest.MonkeyPatch, limit: Callable[[], int]) -> None:
    """Let the kernel reserve pages only up to `limit` bytes of any one arena."""
    allocate = os.posix_fallocate

    def fallocate(fd: int, start: int, nbytes: int) -> None:
        if start + nbytes > limit():
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        allocate(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)


def test_a_lent_arena_is_written_without_a_page_fault() -> None:
    with arenas_of(64 * MIB) as arenas:
        lease = acquire(arenas, 16 * MIB)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        lease.arena.bytes[:] = 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200
        arenas.release(lease)


def test_a_budget_below_one_span_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 33554432 bytes"):
        Arenas(SPAN_NBYTES - 1)


def test_a_free_arena_that_is_too_small_is_closed_and_its_number_told_once() -> None:
    with arenas_of(64 * MIB) as arenas:
        small = acquire(arenas, 2 * MIB)
        elsewhere = SharedMemory(os.dup(small.arena.fd), small.nbytes)
        elsewhere.bytes[:] = 1
        arenas.release(small)
        large = acquire(arenas, 8 * MIB)
        assert (large.number, large.dropped) == (2, (1,))
        assert small.arena.fd == -1
        assert os.fstat(elsewhere.fd).st_blocks == 0, "its pages are free although another process maps them"
        elsewhere.close()
        next_one = acquire(arenas, 8 * MIB)
        assert (next_one.number, next_one.dropped) == (3, ())


def test_a_wait_ends_when_another_thread_releases() -> None:
    with arenas_of(64 * MIB) as arenas:
        held = acquire(arenas, 40 * MIB)
        begun, found = threading.Event(), []

        def wait() -> None:
            begun.set()
            found.append(arenas.acquire(40 * MIB, 60))

        waiter = in_thread(wait)
        assert begun.wait(60)
        assert not found
        arenas.release(held)
        waiter.join(60)
        (lease,) = found
        assert lease is not None
        assert lease.arena is held.arena


def test_a_lease_that_is_released_twice_does_not_free_the_next_one() -> None:
    with arenas_of(64 * MIB) as arenas:
        old = acquire(arenas, 40 * MIB)
        arenas.release(old)
        acquire(arenas, 40 * MIB)
        arenas.release(old)
        assert arenas.acquire(40 * MIB, 0) is None


def test_an_arena_that_a_device_may_still_write_to_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas_module, "_LOOK_S", 0.01)
    with arenas_of(64 * MIB) as arenas:
        late = acquire(arenas, 40 * MIB)
        looks = iter([True] * 5)
        late.under_way = lambda: next(looks, False)
        arenas.release(late)
        assert arenas.acquire(40 * MIB, 0) is None
        again = arenas.acquire(40 * MIB, 60)
        assert again is not None
        assert next(looks, None) is None, "it was lent while the device wrote to it"


def test_an_arena_that_is_in_use_by_a_device_is_not_closed() -> None:
    arenas = Arenas(64 * MIB)
    late = acquire(arenas, 8 * MIB)
    late.under_way = lambda: True
    late.arena.bytes[:] = 6
    arenas.release(late)
    arenas.close()
    assert (late.arena.bytes == 6).all()
    late.arena.discard()


def test_an_arena_is_released_while_another_is_in_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    with arenas_of(64 * MIB) as arenas:
        first = acquire(arenas, 8 * MIB)
        gate = Gate(monkeypatch)
        making = in_thread(lambda: acquire(arenas, 8 * MIB))
        assert gate.reached.wait(60)
        arenas.release(first)
        assert acquire(arenas, 8 * MIB).arena is first.arena
        gate.opened.set()
        making.join(60)


def test_close_frees_what_is_free_at_once_and_the_rest_when_it_is_released() -> None:
    before = Held()
    arenas = Arenas(64 * MIB)
    kept, free = acquire(arenas, 8 * MIB), acquire(arenas, 8 * MIB)
    arenas.release(free)
    kept.arena.bytes[:] = 6
    arenas.close()
    assert before.new_nbytes() == 8 * MIB
    assert (kept.arena.bytes == 6).all()
    with pytest.raises(UsageError, match="closed"):
        arenas.acquire(1, 0)
    arenas.release(kept)
    arenas.close()
    assert before.nothing_is_left()


def test_close_ends_a_wait() -> None:
    arenas = Arenas(64 * MIB)
    lease = acquire(arenas, 40 * MIB)
    begun, errors = threading.Event(), []

    def wait() -> None:
        begun.set()
        try:
            arenas.acquire(40 * MIB, 60)
        except UsageError as error:
            errors.append(error)

    waiter = in_thread(wait)
    assert begun.wait(60)
    arenas.close()
    waiter.join(60)
    assert len(errors) == 1
    arenas.release(lease)


def test_an_arena_that_was_in_the_making_at_close_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Held()
    arenas = Arenas(64 * MIB)
    gate, refused = Gate(monkeypatch), threading.Event()

    def make() -> None:
        with pytest.raises(UsageError, match="closed"):
            arenas.acquire(8 * MIB, 0)
        refused.set()

    making = in_thread(make)
    assert gate.reached.wait(60)
    arenas.close()
    gate.opened.set()
    making.join(60)
    assert refused.is_set()
    assert before.nothing_is_left()


def test_an_interrupt_while_an_arena_is_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arena: SharedMemory, start: int, nbytes: int) -> None:
        raise KeyboardInterrupt

    before = Held()
    with arenas_of(64 * MIB) as arenas:
        with monkeypatch.context() as patch:
            patch.setattr(SharedMemory, "populate", interrupt)
            with pytest.raises(KeyboardInterrupt):
                arenas.acquire(40 * MIB, 0)
        assert before.nothing_is_left()
        assert acquire(arenas, 40 * MIB).nbytes == 40 * MIB


class Machine(RuleBasedStateMachine):
    """Any order of calls keeps to the budget and to the docstring of `Arenas`."""

    BUDGET = 2 * SPAN_NBYTES

    def __init__(self) -> None:
        super().__init__()
        self.before = Held()
        self.arenas = Arenas(self.BUDGET)
        self.lent: list[Lease] = []
        self.known: dict[int, SharedMemory] = {}

    @rule(spans=st.integers(0, 40))
    def acquire(self, spans: int) -> None:
        nbytes = spans * 2 * MIB
        lease = self.arenas.acquire(nbytes, 0)
        if lease is None:
            assert self.lent, "with nothing lent there is always an arena"
            return
        assert lease.nbytes >= min(nbytes, self.BUDGET)
        assert lease.arena.fd not in {other.arena.fd for other in self.lent}
        for number in lease.dropped:
            del self.known[number]
        assert self.known.setdefault(lease.number, lease.arena) is lease.arena
        self.lent.append(lease)

    @precondition(lambda self: bool(self.lent))
    @rule(last=st.booleans())
    def release(self, last: bool) -> None:
        self.arenas.release(self.lent.pop(-1 if last else 0))

    @invariant()
    def within_the_budget(self) -> None:
        assert self.before.new_nbytes() <= self.BUDGET
        assert len({lease.number for lease in self.lent}) == len(self.lent) <= 2

    def teardown(self) -> None:
        self.arenas.close()
        for lease in self.lent:
            self.arenas.release(lease)
        assert self.before.nothing_is_left()


TestAnyOrderOfCalls = Machine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=examples(25), stateful_step_count=20)


def test_memory_that_cannot_be_had_halves_the_arena_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_memory(monkeypatch, lambda: 3 * SPAN_NBYTES)
    fds = open_files()
    with arenas_of(1 << 40) as arenas, caplog.at_level(logging.WARNING, "reknit"):
        lease = acquire(arenas, 13 * SPAN_NBYTES)
        assert lease.nbytes == 3 * SPAN_NBYTES
        arenas.release(lease)
        again = acquire(arenas, 13 * SPAN_NBYTES)
        assert again.arena is lease.arena, "the same size is not tried again"
        arenas.release(again)
    assert [record.getMessage() for record in caplog.records] == [
        f"only {3 * SPAN_NBYTES} of {13 * SPAN_NBYTES} bytes of host memory could be had: saves are streamed "
        "through it, or wait for one another, and block longer"
    ]
    assert open_files() <= fds


def test_without_a_budget_ranks_share_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def available() -> int:
        asked.append(1)
        return 400 * MIB

    monkeypatch.setattr(arenas_module, "available_nbytes", available)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with arenas_of(None) as arenas:
        assert not asked, "the machine is looked at when the first save comes"
        first = acquire(arenas, 50 * MIB)
        second = acquire(arenas, 50 * MIB)
        assert first.nbytes == second.nbytes == 50 * MIB
        arenas.release(first)
        arenas.release(second)
        assert acquire(arenas, 102 * MIB).nbytes == 3 * SPAN_NBYTES
    assert len(asked) == 1


def test_launchers_say_how_many_ranks_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, ranks in one_by_one([("8", 8), ("1", 1), ("", 1), ("0", 1), ("-2", 1), ("many", 1)]):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
        assert local_ranks() == ranks
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        assert local_ranks() == 1
