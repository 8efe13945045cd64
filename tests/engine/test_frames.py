"""How many functions of reknit lie between `reknit.save` and the store that it writes to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

import reknit
from tests.engine.test_frames_load import way_here
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    import pytest

MOST = 9


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
    assert stacks
    for frames in stacks:
        assert len(frames) <= MOST, frames
        assert not [frame for frame in frames if frame.startswith("/comm/")], frames
