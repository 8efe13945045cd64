"""Background saves: nothing is written where others may clear it away, and a run keeps its generation."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.comm.group import SoloGroup
from reknit.format.manifest_file import decode_generation
from reknit.format.paths import parse_path
from reknit.storage.registry import register
from reknit.storage.wrappers.forwarding import ForwardingStorage
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.storage.base import Storage, Writer

LIMIT_S = 60.0
LONG_S = 0.3
"""Long enough for a rank that does not wait to begin a file."""


class Hesitant(ForwardingStorage):
    """A store that delays each marker, and records the markers during whose delay a data file is begun."""

    begun = threading.Event()
    early: list[str] = []  # noqa: RUF012

    def around(self, inner: Storage, path: str) -> Storage:
        return Hesitant(inner)

    def put(self, path: str, data: bytes, *, if_absent: bool) -> bool:
        name = parse_path(path)
        assert name is not None
        assert name.kind == "marker"
        self.begun.clear()
        if self.begun.wait(LONG_S):
            self.early.append(path)
        return super().put(path, data, if_absent=if_absent)

    def create(self, path: str, nbytes: int) -> Writer:
        self.begun.set()
        return super().create(path, nbytes)


@pytest.fixture
def url() -> Iterator[str]:
    ProcessMemory.clear("hesitant")
    Hesitant.early.clear()
    yield "hesitant://"
    assert reknit.close(LIMIT_S)


register("hesitant", lambda url, durability: Hesitant(ProcessMemory("hesitant")))


def test_a_save_that_overwrites_begins_no_file_before_its_marker_is_there(url: str) -> None:
    state = {"model": {"w": np.zeros(5000)}}
    for step in range(4):
        reknit.save(url, state, step=step, wait=False, overwrite=True).result(LIMIT_S)
        assert Hesitant.early == [], step
    with reknit.open(url) as checkpoint:
        assert checkpoint.step == 3


@pytest.mark.parametrize("wait", [True, False])
def test_the_manifest_tells_the_generation_of_the_group_that_saved(tmp_path: Path, wait: bool) -> None:
    for generation in (7, 1 << 40):
        group = SoloGroup(generation)
        path = tmp_path / str(generation)
        reknit.save(path, {"x": 1}, wait=wait, group=group).result(LIMIT_S)
        assert decode_generation((path / "manifest.json").read_bytes()) == generation
    with pytest.raises(reknit.errors.FencedError):
        reknit.save(path, {"x": 2}, wait=wait, overwrite=True, group=SoloGroup(9)).result(LIMIT_S)
    assert reknit.close(LIMIT_S)
