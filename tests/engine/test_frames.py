"""The functions of reknit between `reknit.save`, or `reknit.load`, and the store: few, and none of `comm`."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit.engine.background.snapshot import Snapshot
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from types import FrameType

    import pytest

SOURCES = str(Path(reknit.__file__).parent)


def frames_of(thread: int) -> list[str]:
    """Return the functions of reknit on the stack of a thread, outermost first, as module:name."""
    frame: FrameType | None = sys._current_frames()[thread]
    found = []
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(SOURCES):
            found.append(f"{path.removeprefix(SOURCES)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


def settled(thread: int) -> list[str]:
    """Return the frames of a thread once it has come to rest."""
    before, now = [""], frames_of(thread)
    while before != now or now[-1].endswith(":start"):  # a thread that it waits for may begin later
        time.sleep(0.05)
        before, now = now, frames_of(thread)
    return now


def way_here(caller: int) -> list[str]:
    """Return the functions on the stack of the calling thread, and on that of this one if it is another."""
    here = threading.get_ident()
    return [*(settled(caller) if here != caller else ()), *frames_of(here)]


def check(stacks: list[list[str]], most: int = 8) -> None:
    assert stacks
    for frames in stacks:
        way = frames[1:]  # behind the door, which looks at the arguments of all public calls
        assert frames[0] == "/keywords.py:call"
        assert len(way) <= most, "\n".join(way)
        assert not [frame for frame in frames if frame.startswith("/comm/")], frames


def test_a_load_reaches_the_store_in_few_frames_and_none_of_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    ProcessMemory.clear("frames-load")
    reknit.save("process://frames-load", {"model": {"w": np.arange(1000.0)}})
    caller, stacks = threading.get_ident(), list[list[str]]()
    plain = ProcessMemory.read_into

    def watched(self: ProcessMemory, path: str, start: int, buffers: list[memoryview]) -> None:
        if path.endswith(".safetensors"):
            stacks.append(way_here(caller))
        plain(self, path, start, buffers)

    monkeypatch.setattr(ProcessMemory, "read_into", watched)
    target = np.zeros(1000)
    reknit.load("process://frames-load", {"model": {"w": target}})
    assert (target == np.arange(1000.0)).all()
    check(stacks, most=10)


def test_a_save_reaches_the_store_in_few_frames_and_none_of_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    ProcessMemory.clear("frames-save")
    caller, stacks = threading.get_ident(), list[list[str]]()
    plain = ProcessMemory.create

    def create(self: ProcessMemory, path: str, nbytes: int) -> Any:
        writer = plain(self, path, nbytes)
        write = writer.write

        def watched(start: int, data: memoryview) -> None:
            if path.endswith(".safetensors"):
                stacks.append(way_here(caller))
            write(start, data)

        monkeypatch.setattr(writer, "write", watched)
        return writer

    monkeypatch.setattr(ProcessMemory, "create", create)
    reknit.save("process://frames-save", {"model": {"w": np.arange(1000.0)}})
    check(stacks)


def test_a_save_that_does_not_wait_comes_to_its_copy_in_few_frames_and_none_of_comm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ProcessMemory.clear("frames-copy")
    caller, stacks = threading.get_ident(), list[list[str]]()
    plain = Snapshot.take

    def watched(self: Snapshot) -> None:
        stacks.append(way_here(caller))
        plain(self)

    monkeypatch.setattr(Snapshot, "take", watched)
    for _ in range(2):  # with and without an agent that is there
        state = {"model": {"w": np.arange(1000.0)}}
        reknit.save("process://frames-copy", state, wait=False, overwrite=True).result(60)
    check(stacks)
