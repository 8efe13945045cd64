from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reknit.storage.local.store import LocalStorage
from reknit.storage.ranges import NEAR_NBYTES, STRETCH_NBYTES, read_runs

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

DATA = np.random.default_rng(0).bytes(4 * STRETCH_NBYTES)


class Counted:
    """Ranges that were read of `DATA`."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            self.ranges.append((start, buffer.nbytes))
            buffer[:] = DATA[start : start + buffer.nbytes]


@given(st.integers(1, 9000), st.lists(st.integers(0, 12_000), max_size=60), st.integers(0, 1000))
def test_runs_are_read_once_and_holes_only_where_they_are_small(
    nbytes: int, holes: list[int], first: int
) -> None:
    starts = first + np.cumsum([0, *(hole + nbytes for hole in holes)])
    counted, buffer = Counted(), bytearray(len(starts) * nbytes)
    read_runs(counted.read_into, "x", starts, nbytes, memoryview(buffer))
    assert bytes(buffer) == b"".join(DATA[start : start + nbytes] for start in starts.tolist())
    ends = [start + size for start, size in counted.ranges]
    assert all(end <= start for end, (start, _) in zip(ends, counted.ranges[1:], strict=False))
    total = sum(size for _, size in counted.ranges)
    assert total <= len(buffer) + NEAR_NBYTES * len(starts)
    assert all(size <= max(STRETCH_NBYTES, nbytes) for _, size in counted.ranges)


def test_a_local_store_opens_a_file_once_for_all_runs_and_reads_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(DATA)
    seen: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], start: int) -> int:
        seen.append((start, sum(buffer.nbytes for buffer in buffers)))
        return real(fd, buffers, start)

    monkeypatch.setattr(os, "preadv", preadv)
    starts = np.arange(0, len(DATA), 8192)
    buffer = bytearray(len(starts) * 512)
    LocalStorage(tmp_path).read_runs("x", starts, 512, memoryview(buffer))
    assert seen == [(start, 512) for start in starts.tolist()]


def test_a_system_that_reads_less_than_asked_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(DATA)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, start: real(fd, [buffers[0][:100]], start))
    starts = np.arange(0, len(DATA), 8192)
    buffer = bytearray(len(starts) * 512)
    LocalStorage(tmp_path).read_runs("x", starts, 512, memoryview(buffer))
    assert bytes(buffer) == b"".join(DATA[start : start + 512] for start in starts.tolist())
