"""How many functions of reknit lie between `reknit.save` and the store that it writes to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from reknit.engine.background.trainer.snapshot import Snapshot
from tests.engine.test_frames_load import way_here
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    import pytest

MOST = 8


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


def check(stacks: list[list[str]]) -> None:
    assert stacks
    for frames in stacks:
        way = frames[1:]  # behind the door, which looks at the arguments of all public calls
        assert frames[0] == "/keywords.py:call"
        assert len(way) <= MOST, way
        assert not [frame for frame in frames if frame.startswith("/comm/")], frames
