"""The log of rank 0 while it takes long; intervals are given, and no test waits for a clock."""

from __future__ import annotations

import io
import logging
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.errors import ShortageError
from reknit.events import progress as module
from reknit.events.phase import Recorder
from reknit.events.progress import Intervals, progress
from reknit.storage.registry import register
from reknit.system import start_thread
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.comm.group import Group

QUICK = Intervals(0.0, 0.001, 0.001)
NEVER = Intervals(3600.0, 0.001, 0.001)
WAIT_S = 60.0


class Lines(logging.Handler):
    """A handler that keeps log records, and lets tests wait for them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._changed = threading.Condition()
        self.reported: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.reported.append(record)
            self._changed.notify_all()

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.reported]

    def wait_for(self, part: str) -> None:
        """Wait until a line has the part."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(part in t for t in self.texts()), WAIT_S), self.texts()


class Threads:
    """Threads that are started together, and joined together."""

    def __init__(self) -> None:
        self.started: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        self.started.append(start_thread(name, work))

    def join(self) -> None:
        for thread in self.started:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("reknit"), Lines()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_log_gets_lines_at_intervals_and_none_after_the_end(lines: Lines) -> None:
    recorder, threads = Recorder("load", path="ck/step_5"), Threads()
    with progress(recorder, threads.start, intervals=QUICK):
        with recorder.phase("open"):
            lines.wait_for("load from ck/step_5: open")
        recorder.expect(300)
        recorder.expect(100)
        lines.wait_for("0 % (0 of 400 B)")
        recorder.advance(100)
        lines.wait_for("25 % (100 of 400 B)")
        recorder.advance(300)
        lines.wait_for("100 % (400 of 400 B)")
    count = len(lines.reported)
    threads.join()
    assert len(lines.reported) == count
    assert {(record.name, record.levelno) for record in lines.reported} == {("reknit", logging.INFO)}


def test_nothing_is_told_of_what_is_short_on_other_ranks_or_unwanted(lines: Lines) -> None:
    for rank, wanted, intervals in ((0, True, NEVER), (1, True, QUICK), (0, False, QUICK)):
        threads = Threads()
        with progress(Recorder("load", rank=rank), threads.start, wanted=wanted, intervals=intervals):
            pass
        threads.join()
        assert bool(threads.started) == (intervals is NEVER)
        assert lines.reported == [], (rank, wanted)


def interrupted(lines: Lines, threads: Threads) -> None:
    with progress(Recorder("save", path="p"), threads.start, intervals=QUICK):
        lines.wait_for("save to p")
        raise KeyboardInterrupt


def test_an_interrupt_passes_and_ends_the_telling(lines: Lines) -> None:
    threads = Threads()
    with pytest.raises(KeyboardInterrupt):
        interrupted(lines, threads)
    threads.join()


def test_a_stream_that_is_no_terminal_gets_no_letter(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress(Recorder("load", path="p"), start_thread, intervals=QUICK):
        lines.wait_for("load from p")
    assert stream.getvalue() == ""


def test_bytes_counted_by_many_threads_are_all_there() -> None:
    recorder = Recorder("load")

    def count(_: Group) -> None:
        for _step in range(1000):
            recorder.advance(3)
            recorder.expect(4)

    run_ranks(4, count)
    assert recorder.progress()[:2] == (12_000, 16_000)


def test_phases_under_way_are_known_while_they_last() -> None:
    recorder = Recorder("save")
    with recorder.phase("commit"), recorder.phase("plan"):
        assert recorder.progress().doing == ("commit", "plan")
    assert recorder.progress().doing == ()


def test_a_slow_save_tells_how_far_it_is_on_rank_0_alone(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVALS", QUICK)
    ProcessMemory.clear("slow")
    plan = [Fault("stall", 2, "finish")]
    register(
        "stalled",
        lambda url, durability: FaultyStorage(
            ProcessMemory("slow"), plan=plan, stall=lambda: lines.wait_for("save to ")
        ),
    )
    state = {"model": {"w": np.ones(1 << 20, np.float32)}, "extra": {"epoch": 1}}
    reknit.save("stalled://slow", state, options=reknit.SaveOptions(progress=True)).result()
    assert lines.reported
    assert {record.name for record in lines.reported} == {"reknit"}
    count = len(lines.reported)
    quiet = reknit.SaveOptions(progress=False)
    plan.clear()
    reknit.save("stalled://slow", state, overwrite=True, options=quiet).result()
    assert [text.split()[0] for text in lines.texts()[count:]] == ["saved"], "that it went well, and no more"


def test_a_save_in_the_background_tells_of_its_end_alone(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVALS", QUICK)
    ProcessMemory.clear("quiet")
    state = {"model": {"w": np.ones(1 << 20, np.float32)}}
    reknit.save("process://quiet/x", state, wait=False).result(WAIT_S)
    assert reknit.close(WAIT_S)
    assert [text.split()[0] for text in lines.texts()] == ["saved"]


def test_a_save_counts_every_byte_of_its_data_files() -> None:
    from reknit.engine.memory.devices import Transfer
    from reknit.engine.memory.images import Entries, Image, LiveImages, Sources
    from reknit.engine.memory.write import Outgoing, Tuner, write_files

    ProcessMemory.clear("counted")
    recorder = Recorder("save")
    images = [
        Image(f"model/{k}", b"h" * n, Entries.of(()), n, Sources(())) for k, n in enumerate((0, 5, 20 << 20))
    ]
    files = [Outgoing(image.path, image.nbytes) for image in images]
    source = LiveImages(images, Transfer([], "it", 10), None)
    write_files(ProcessMemory("counted"), files, source, tuner=Tuner(threads=2), recorder=recorder)
    assert recorder.progress()[:2] == (5 + (20 << 20),) * 2


def test_where_no_thread_can_be_had_nothing_is_told_and_all_goes_on() -> None:
    def scarce(name: str, work: Callable[[], None]) -> None:
        raise ShortageError("no further thread")

    done = []
    with progress(Recorder("load", path="p"), scarce, intervals=QUICK):
        done.append(True)
    assert done
