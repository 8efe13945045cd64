"""Records on their way to a sink: no save waits for them, their number is limited, and losses are logged."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from reknit.errors import ShortageError
from reknit.events import outlet as outlet_module
from reknit.events.outlet import MOST_OUTLETS, Outlet, flush_all, outlet_of
from reknit.events.records import DroppedRecord, PhaseRecord, Record
from reknit.events.to_file import JsonLines
from reknit.system import start_thread
from tests.forks import in_fork
from tests.monitor.records import phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pytest

WAIT_S = 60.0
LOCK = type(threading.Lock())


def numbered(number: int) -> PhaseRecord:
    return phase("write", rank=number)


class Kept:
    """A sink that keeps its records, and can be made to fail or to hang."""

    def __init__(self) -> None:
        self.taken: list[Record] = []
        self.fails = False
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()

    def take(self, records: Sequence[Record]) -> None:
        self.entered.set()
        assert self.free.wait(WAIT_S)
        if self.fails:
            raise OSError("no space left")
        self.taken += records

    def ranks(self) -> list[int]:
        return [record.rank for record in self.taken if isinstance(record, PhaseRecord)]

    def lost(self) -> int:
        return sum(record.num_dropped for record in self.taken if isinstance(record, DroppedRecord))


def test_records_arrive_in_order_from_any_thread() -> None:
    kept = Kept()
    outlet = Outlet(kept, "kept")

    def put(first: int) -> None:
        for number in range(first, first + 1000):
            outlet.put(numbered(number))

    threads = [threading.Thread(target=put, args=(first,)) for first in (0, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outlet.flush(WAIT_S)
    for first in (0, 10_000):
        assert [n for n in kept.ranks() if n - n % 10_000 == first] == list(range(first, first + 1000))


def test_a_sink_that_hangs_is_not_waited_for_and_hears_later_how_much_it_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = Kept()
    outlet = Outlet(kept, "the slow one", capacity=10)
    kept.free.clear()
    outlet.put(numbered(0))
    assert kept.entered.wait(WAIT_S)
    for number in range(1, 31):
        outlet.put(numbered(number))
    assert not outlet.flush(0.01), "it hangs"
    for _ in range(100):
        assert not outlet.flush(WAIT_S), "and is not waited for once more"
    assert [record.getMessage() for record in caplog.records] == [
        "events are lost: the slow one: it does not keep up"
    ]
    kept.free.set()
    while not outlet.flush(WAIT_S):
        pass
    assert kept.ranks() == list(range(11))
    assert kept.lost() == 20


def test_a_sink_that_fails_is_told_of_once_in_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    outlet = Outlet(kept, "the full one")
    for outage in (1, 2):
        kept.fails = True
        for number in range(3):
            outlet.put(numbered(number))
            assert outlet.flush(WAIT_S)
        assert len(caplog.records) == outage
        assert "the full one: OSError: no space left" in caplog.text
        kept.fails = False
        outlet.put(numbered(9))
        assert outlet.flush(WAIT_S)
        assert kept.lost() == 3 * outage
    assert kept.ranks() == [9, 9]


def test_a_thread_that_had_nothing_to_do_ends_and_another_one_follows() -> None:
    kept = Kept()
    outlet = Outlet(kept, "kept", idle_s=0.001)
    for number in range(5):
        outlet.put(numbered(number))
        assert outlet.flush(WAIT_S)
        while outlet.busy:
            pass
    assert kept.ranks() == list(range(5))


def test_there_are_never_more_than_so_many_sinks(caplog: pytest.LogCaptureFixture) -> None:
    hanging = Kept()
    found = [outlet_of(("test", n), lambda: Outlet(hanging, "hanging")) for n in range(MOST_OUTLETS + 2)]
    assert found[-1] is None
    assert caplog.text.count("events are lost") == 1
    first = found[0]
    assert first is not None
    assert outlet_of(("test", 0), lambda: Outlet(hanging, "another")) is first
    del first, found
    for number in range(2 * MOST_OUTLETS):  # any number is served one after another
        kept = Kept()
        outlet = outlet_of(("one after another", number), partial(Outlet, kept, "quick"))
        assert outlet is not None
        outlet.put(numbered(number))
        assert outlet.flush(WAIT_S)
        assert kept.ranks() == [number]


def test_sinks_are_flushed_while_other_threads_add_more() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(lambda: [Outlet(Kept(), "new") for _ in range(5_000)])
            while not adding.done():
                flush_all(0.0)
            adding.result()
    finally:
        sys.setswitchinterval(before)


def test_what_several_threads_tell_is_counted_as_lost_where_none_can_serve_the_sink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ShortageError("no further thread")

    with monkeypatch.context() as without_threads, ThreadPoolExecutor(4) as pool:
        without_threads.setattr(outlet_module, "start_thread", refuse)
        kept = Kept()
        outlet = Outlet(kept, "kept")

        def put_all() -> None:
            for number in range(10_000):
                outlet.put(numbered(number))

        putting = [pool.submit(put_all) for _ in range(4)]
        for each in putting:
            each.result()
    outlet.put(numbered(1))
    assert outlet.flush(WAIT_S)
    assert len(kept.ranks()) + kept.lost() == 4 * 10_000 + 1


def ends(call: Callable[[], object]) -> bool:
    """Return whether a call ends, in a thread that it cannot keep."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_handler_that_interrupts_the_start_of_a_sinks_thread_may_record_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink, started = Kept(), list[str]()
    outlet = Outlet(sink, "mine")

    def interrupted(name: str, work: Callable[[], object]) -> threading.Thread:
        started.append(name)
        outlet.put(numbered(2))  # as a handler of a signal does, in the same thread
        return start_thread(name, work)

    monkeypatch.setattr(outlet_module, "start_thread", interrupted)
    assert ends(lambda: outlet.put(numbered(1)))
    assert outlet.flush(WAIT_S)
    assert sink.taken == [numbered(1), numbered(2)]
    assert len(started) == 1


def test_a_handler_that_interrupts_the_search_for_a_sink_finds_sinks_of_its_own() -> None:
    found = list[Outlet | None]()

    def make() -> Outlet:
        made = Outlet(Kept(), "mine")
        if not found:  # as a handler of a signal does, in the same thread
            found.append(None)
            found.append(outlet_of("other", make))
            found.append(outlet_of("mine", make))
        return made

    assert ends(lambda: found.append(outlet_of("mine", make)))
    _, other, inner, mine = found
    assert other is not None
    assert other is not mine
    assert inner is mine


def test_a_forked_process_writes_to_a_sink_that_another_thread_was_writing_to(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl")
    outlet = Outlet(sink, "mine")

    def reported() -> bool:
        outlet.put(numbered(1))
        return outlet.flush(5)

    with ExitStack() as held:
        for lock in (each for each in vars(sink).values() if isinstance(each, LOCK)):
            held.enter_context(lock)
        assert in_fork(reported)
    assert '"rank":1' in (tmp_path / "events.jsonl").read_text()


PROGRAM = """
import multiprocessing, os, sys, warnings
warnings.simplefilter("ignore")
from tests.events.test_outlet import numbered
from reknit.events.outlet import Outlet
from reknit.events.to_file import JsonLines
outlet = Outlet(JsonLines(sys.argv[1]), "file")
outlet.put(numbered(1))
assert outlet.flush(60)
if pid := os.fork():
    os.waitpid(pid, 0)
outlet.put(numbered(2))
if not pid:
    assert outlet.flush(60)
    os._exit(0)
child = multiprocessing.get_context("fork").Process(target=outlet.put, args=(numbered(3),))
child.start()
child.join()
"""


def test_a_process_that_ends_or_was_forked_has_told_everything(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", PROGRAM, events], check=True, timeout=WAIT_S, cwd=os.getcwd())
    reported = [line.partition('"rank":')[2][:1] for line in events.read_text().splitlines()]
    assert sorted(reported) == ["1", "2", "2", "3"]
