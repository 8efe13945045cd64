"""Ranks send rank 0 their hosts through a store, also if an earlier run has left entries there."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reknit.comm.meeting import hosts, rendezvous
from reknit.comm.meeting.hosts import gather_shape
from reknit.comm.meeting.rendezvous import FolderStore, Shape, Store
from reknit.errors import CommError, DeadlineError, ProtocolError, ReknitError, UsageError
from reknit.options import CommOptions
from tests.comm.memory_store import MemoryStore
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.comm.conftest import Notices

_where = threading.local()


@pytest.fixture(autouse=True)
def named_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each thread choose its host."""
    real = rendezvous.host
    monkeypatch.setattr(rendezvous, "host", lambda: getattr(_where, "host", None) or real())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "meet")


class Asked:
    """A store that sets an event when `number` ranks have called one of its methods."""

    def __init__(self, store: Store, number: int, method: str) -> None:
        self._store, self._number, self._method = store, number, method
        self._ranks: set[int] = set()
        self.by_all = threading.Event()
        if not number:
            self.by_all.set()

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._ranks.add(_where.rank)
        if len(self._ranks) == self._number:
            self.by_all.set()
        return getattr(self._store, name)


def gather(
    store: Store,
    ranks: Iterable[int],
    size: int,
    *,
    where: Sequence[str] = (),
    options: Mapping[int, CommOptions] | None = None,
    sizes: Mapping[int, int] | None = None,
    late: Iterable[int] = (),
    late_s: float = 0.0,
    after: str = "get",
    timeout_s: float = 20.0,
) -> dict[int, Shape | BaseException]:
    """Connect ranks, each in a thread, and return the result or the error of each.

    Late ranks come so long after all others have first called a method of the store.
    """
    ranks, late = list(ranks), set(late)
    asked: Any = Asked(store, len(set(ranks) - late), after)

    def be(rank: int) -> Shape | BaseException:
        _where.host, _where.rank = where[rank] if where else None, rank
        if rank in late:
            assert asked.by_all.wait(timeout_s)
            time.sleep(late_s)
        chosen = (options or {}).get(rank, CommOptions())
        try:
            return gather_shape(
                store if rank in late else asked,
                rank,
                (sizes or {}).get(rank, size),
                job="job",
                options=chosen,
                timeout_s=timeout_s,
            )
        except (ReknitError, KeyboardInterrupt) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(be, ranks), strict=True))


def shapes(found: Mapping[int, Shape | BaseException]) -> list[Shape]:
    for answer in found.values():
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in found.values() if isinstance(answer, Shape)]


def errors(found: Mapping[int, Shape | BaseException]) -> list[ReknitError]:
    assert all(isinstance(answer, ReknitError) for answer in found.values()), found
    return [answer for answer in found.values() if isinstance(answer, ReknitError)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), st.integers(1, 5))
def test_every_rank_learns_which_ranks_share_a_host(where: list[str], fan_out: int) -> None:
    chosen = {0: CommOptions(fan_out=fan_out)}
    found = shapes(gather(MemoryStore(), range(len(where)), len(where), where=where, options=chosen))
    assert len({shape.run for shape in found}) == 1
    assert len({shape.generation for shape in found}) == 1
    for shape in found:
        numbers = shape.topology.hosts
        assert [[numbers[a] == numbers[b] for a in range(len(where))] for b in range(len(where))] == [
            [one == other for one in where] for other in where
        ]
        assert shape.topology.fan_out == fan_out
        assert shape.topology.digest == found[0].topology.digest


def test_ranks_of_one_machine_are_on_one_host(store: Store) -> None:
    for shape in shapes(gather(store, range(3), 3)):
        assert shape.topology.hosts == [0, 0, 0]


def test_a_rank_that_comes_late_is_waited_for(store: Store) -> None:
    for late in (0, 2):
        found = gather(store, range(3), 3, late=[late], late_s=0.4)
        assert len({shape.run for shape in shapes(found)}) == 1


def test_those_that_came_hear_who_did_not(store: Store) -> None:
    for error in errors(gather(store, [0, 1, 4], 6, timeout_s=0.6)):
        assert isinstance(error, DeadlineError)
        assert "ranks 2-3, 5 did not come to the rendezvous of job 'job' within 0.6 s" in error.message


def test_without_rank_0_the_others_give_up(store: Store) -> None:
    for error in errors(gather(store, [1, 2], 3, timeout_s=0.4)):
        assert isinstance(error, DeadlineError)
        assert "rank 0 did not come to the rendezvous" in error.message


@pytest.mark.parametrize(
    ("late", "said"),
    [
        ([2], ["rank 0 has waited 0.5 s for rank 2"]),
        ([1, 2], ["rank 0 has waited 0.5 s for ranks 1-2"]),
        ([0], ["rank 1 has waited 0.5 s for rank 0", "rank 2 has waited 0.5 s for rank 0"]),
    ],
)
def test_a_rank_says_long_before_the_deadline_whom_it_waits_for(
    store: Store, late: list[int], said: list[str], notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "NOTICE_S", 0.5)
    monkeypatch.setattr(hosts, "_SLICES_S", (0.02, 0.1))
    early = [rank for rank in range(3) if rank not in late]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(gather, store, early, 3)
        texts = sorted(notices.next() for _ in said)
        monkeypatch.setattr(hosts, "NOTICE_S", 60.0)  # ranks that come now do not log
        found = {**gather(store, late, 3), **waiting.result()}
    assert len({shape.run for shape in shapes(found)}) == 1
    assert [text.partition(" at the rendezvous of job 'job': every rank has")[0] for text in texts] == said
    assert notices.rest == []


def test_a_job_that_starts_again_is_not_misled_by_what_its_last_run_left(store: Store) -> None:
    before = shapes(gather(store, range(3), 3, where=["a", "b", "c"]))
    # The ranks that read the name of the old run come well before rank 0 writes that of the new.
    after = shapes(gather(store, range(3), 3, where=["x", "x", "y"], late=[0], late_s=0.4))
    assert {shape.run for shape in after} != {shape.run for shape in before}
    assert len({shape.run for shape in after}) == 1
    assert all(shape.topology.hosts == [0, 0, 1] for shape in after)
    assert after[0].generation > before[0].generation


def test_a_run_that_died_while_it_formed_is_left_behind(store: Store) -> None:
    store.set("reknit/job/run", b"dead")
    store.set("reknit/job/dead/host/2", b"anything")
    found = shapes(gather(store, range(3), 3, late=[0], late_s=0.4))
    assert len({shape.run for shape in found}) == 1
    assert found[0].run != "dead"


def test_a_run_that_failed_is_followed_by_one_that_does_not(store: Store) -> None:
    errors(gather(store, [0, 1], 3, timeout_s=0.3))
    shapes(gather(store, range(3), 3, late=[0, 1], late_s=0.35))


def test_who_waits_for_a_new_run_in_vain_hears_what_became_of_the_last(store: Store) -> None:
    errors(gather(store, [0, 1], 3, timeout_s=0.3))
    (error,) = errors(gather(store, [2], 3, timeout_s=0.3))
    assert isinstance(error, DeadlineError)
    assert "only entries of an earlier run" in error.message
    assert "rank 2 did not come" in error.message


def test_words_of_another_version_do_not_keep_a_new_run_from_forming(store: Store) -> None:
    store.set("reknit/job/run", b"\xff\x00")
    store.set("reknit/job/\ufffd\x00/shape", b"\xc1 not ours")
    shapes(gather(store, range(2), 2, late=[0], late_s=0.3))


def test_a_new_run_clears_away_what_the_last_left_and_nothing_else(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.set("reknit/job-2/other", b"kept")
    store.set(f"{rendezvous.base('job/3')}/other", b"kept too")
    counts = []
    for _ in range(3):
        shapes(gather(store, range(3), 3, late=[1, 2], late_s=0.1))
        counts.append(len(list(tmp_path.iterdir())))
    assert counts == [7, 7, 7]  # the name of the run, three ranks, their shape, and two keys of other jobs


def test_a_rank_0_whose_place_was_taken_says_so(store: Store) -> None:
    def take() -> None:
        store.get("reknit/job/run", 30.0)  # rank 0 has come
        store.set("reknit/job/run", b"another")

    thread = threading.Thread(target=take)
    thread.start()
    (error,) = errors(gather(store, [0], 2))
    thread.join()
    assert isinstance(error, CommError)
    assert "taken the place of rank 0" in error.message


class ReplacingStore(MemoryStore):
    """A store in which another run begins as soon as all ranks of the first have arrived."""

    def get_many(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        values = [self.get(key, timeout_s) for key in keys]
        self.set("reknit/job/run", b"another")
        return values


def test_a_rank_0_whose_place_was_taken_at_the_last_moment_says_so_too() -> None:
    found = gather(ReplacingStore(), range(2), 2, timeout_s=3)
    assert isinstance(found[0], CommError)
    assert "taken the place of rank 0" in found[0].message


class HauntedStore(MemoryStore):
    """A store in which the rank 0 of an old run still answers, when another run has begun already."""

    def set(self, key: str, value: bytes) -> None:
        super().set(key, value)
        if key == "reknit/job/old/host/1":
            super().set("reknit/job/run", b"coming")
            reported = [2, 16, 1, zlib.compress(bytes(8)), None]
            super().set("reknit/job/old/shape", msgspec.msgpack.encode(reported))


def test_a_rank_that_an_old_rank_0_answers_goes_to_the_new_one() -> None:
    store = HauntedStore()
    store.set("reknit/job/run", b"old")
    found = shapes(gather(store, range(2), 2, late=[0], late_s=0.2))
    assert len({shape.run for shape in found}) == 1
    assert found[0].run != "old"


def test_what_rank_0_tells_is_unpacked_no_further_than_it_may_be_long() -> None:
    store = MeddlingStore(msgspec.msgpack.encode([2, 16, 0, zlib.compress(bytes(1 << 26)), None]))
    tracemalloc.start()
    try:
        found = gather(store, range(2), 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found[1], ProtocolError)
    assert peak < 1 << 23


def test_ranks_that_disagree_about_the_size_all_hear_of_it(store: Store) -> None:
    for error in errors(gather(store, range(3), 3, sizes={2: 4})):
        assert isinstance(error, ProtocolError)
        assert "rank 2 joins job 'job' with size 4, rank 0 with size 3" in error.message
    found = gather(store, [0, 1], 2, sizes={1: 5})
    assert all("size 5, rank 0 with size 2" in error.message for error in errors(found))


def test_a_rank_beyond_the_size_hears_of_it_alone(store: Store) -> None:
    # Once all of the group have come, it would take their run for an old one.
    found = gather(store, range(3), 2, sizes={2: 3}, late=[1], after="set")
    assert isinstance(found[0], Shape)
    assert isinstance(found[2], ProtocolError)
    assert "rank 2 joins job 'job' with size 3, rank 0 with size 2" in found[2].message


def test_the_generation_is_that_of_rank_0_and_others_may_not_say_otherwise(store: Store) -> None:
    chosen = {0: CommOptions(generation=7), 1: CommOptions(generation=7)}
    found = shapes(gather(store, range(3), 3, options=chosen))
    assert {shape.generation for shape in found} == {7}
    chosen[1] = CommOptions(generation=6)
    answers = gather(store, range(3), 3, options=chosen)
    assert isinstance(answers[1], ProtocolError)
    assert "rank 1 is of generation 6, rank 0 of 7" in answers[1].message


def test_a_group_of_one_needs_nobody(store: Store) -> None:
    (shape,) = shapes(gather(store, [0], 1))
    assert shape.topology.size == 1


def test_a_rank_outside_of_the_group_is_refused(store: Store) -> None:
    for rank in (-1, 2):
        with pytest.raises(UsageError, match="rank must be within"):
            gather_shape(store, rank, 2, job="job", options=CommOptions(), timeout_s=1)


class CountingStore(MemoryStore):
    """A store that gives many values at once, and counts the requests for each of them."""

    def __init__(self, interrupt: bool = False) -> None:
        super().__init__()
        self.gets: list[str] = []
        self.many = 0
        self._interrupt = interrupt

    def get(self, key: str, timeout_s: float) -> bytes:
        self.gets.append(key)
        return super().get(key, timeout_s)

    def get_many(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        if self._interrupt:
            time.sleep(0.3)
            raise KeyboardInterrupt
        values = [MemoryStore.get(self, key, timeout_s) for key in keys]
        self.many += 1
        return values


def test_rank_0_asks_a_store_that_can_for_all_ranks_at_once_and_the_others_for_one_key() -> None:
    store = CountingStore()
    shapes(gather(store, range(8), 8))
    assert store.many == 1
    assert not [key for key in store.gets if "/host/" in key]


def test_ranks_hear_that_rank_0_was_interrupted() -> None:
    found = gather(CountingStore(interrupt=True), range(2), 2)
    assert isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[1], CommError)
    assert "rank 0 left the rendezvous: KeyboardInterrupt" in found[1].message


class MeddlingStore(MemoryStore):
    """A store in which another entry replaces that of rank 0."""

    def __init__(self, reported: bytes) -> None:
        super().__init__()
        self._told = reported

    def set(self, key: str, value: bytes) -> None:
        super().set(key, self._told if key.endswith("/shape") else value)


def test_anything_else_in_the_place_of_the_shape_is_refused() -> None:
    pack = msgspec.msgpack.encode
    for reported in (
        b"",
        b"\xc1",
        pack([2, 16, 0, b"not packed", None]),
        pack([2, 0, 0, zlib.compress(bytes(8)), None]),
        pack([2, 16, 0, zlib.compress(bytes(4)), None]),
        pack([2, 16, 0, zlib.compress(bytes(1 << 24)), None]),
    ):
        found = gather(MeddlingStore(reported), range(2), 2)
        assert isinstance(found[1], ProtocolError), reported
        assert "a wrong value" in found[1].message


def test_anything_else_in_the_place_of_a_rank_is_refused_on_all() -> None:
    class Meddling(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            super().set(key, b"\xc1" if key.endswith("/host/2") else value)

    for error in errors(gather(Meddling(), range(3), 3)):
        assert isinstance(error, ProtocolError)


PRINT = "from reknit.comm.meeting.rendezvous import host; print(host(), end='')"


def test_processes_of_one_machine_name_the_same_host_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reported() -> Any:
        return subprocess.run(
            [sys.executable, "-c", PRINT], capture_output=True, text=True, check=True
        ).stdout

    monkeypatch.delenv("REKNIT_HOST", raising=False)
    assert reported() == rendezvous.host() != ""
    monkeypatch.setenv("REKNIT_HOST", "rack 7")
    assert reported() == rendezvous.host() == "rack 7"


def test_rank_0_that_waited_alone_hears_that_all_ranks_have_to_call(store: Store) -> None:
    (error,) = errors(gather(store, [0], 4, timeout_s=0.3))
    assert "ranks 1-3 did not come" in error.message
    assert "not rank 0 alone as with torch.save" in str(error.remedy)
    others = errors(gather(store, [0, 1], 4, timeout_s=0.3))
    assert not any("torch.save" in str(error.remedy) for error in others)


def test_a_rank_beyond_the_size_that_comes_late_hears_of_both_sizes(store: Store) -> None:
    shapes(gather(store, range(2), 2))
    (error,) = errors(gather(store, [2], 3, timeout_s=0.3))
    assert isinstance(error, DeadlineError)
    assert "it has 2 ranks, and this one joins as rank 2 of 3" in error.message
    assert "with the same size" in str(error.remedy)


def test_a_run_whose_clock_was_set_back_has_a_higher_generation_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = []
    for moment in (1000.0, 998.0, 1000.0005, 1002.0):
        monkeypatch.setattr(hosts, "now", lambda moment=moment: moment)
        generations.append({shape.generation for shape in shapes(gather(store, range(2), 2))})
    assert generations == [{1_000_000}, {1_000_001}, {1_000_002}, {1_002_000}]
