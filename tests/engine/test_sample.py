"""A sample of memory: every change of one of its lines is noticed, wherever the memory lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.memory.elements import bits
from reknit.engine.memory.sample import LINE_NBYTES, STRIDE_NBYTES, Range, Sample
from tests.engine.queued_device import install

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.queued_device import Queues


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queues]:
    yield from install(monkeypatch)


@given(st.data(), st.sampled_from(["uint8", "int16", "float32", "float64", "complex128"]))
def test_a_change_of_any_byte_of_a_line_is_noticed_and_no_other_range_is_named(
    data: st.DataObject, dtype: str
) -> None:
    kind = np.dtype(dtype)
    arrays = [
        np.zeros(data.draw(st.integers(LINE_NBYTES, 5 * STRIDE_NBYTES)) // kind.itemsize + 1, kind)
        for _ in range(3)
    ]
    ranges = []
    for array in arrays:
        first = data.draw(st.integers(0, array.size - -(-LINE_NBYTES // kind.itemsize)))
        least = -(-LINE_NBYTES // kind.itemsize)
        ranges.append(Range(bits(array), first, data.draw(st.integers(least, array.size - first))))
    sample = Sample(ranges)
    assert list(sample.changed()) == []
    number = data.draw(st.integers(0, 2))
    one = ranges[number]
    nbytes = one.numel * kind.itemsize
    line = data.draw(st.integers(0, (nbytes - LINE_NBYTES) // STRIDE_NBYTES))
    at = one.first * kind.itemsize + line * STRIDE_NBYTES + data.draw(st.integers(0, LINE_NBYTES - 1))
    arrays[number].view(np.uint8)[at] ^= 1
    assert list(sample.changed()) == [number]
    arrays[number].view(np.uint8)[at] ^= 1
    assert list(sample.changed()) == []


def test_a_run_of_changes_as_long_as_the_stride_and_a_line_is_noticed_wherever_it_begins() -> None:
    array = np.zeros(10 * STRIDE_NBYTES, np.uint8)
    sample = Sample([Range(array, 0, array.size)])
    for first in range(0, 8 * STRIDE_NBYTES, 997):
        array[:] = 0
        array[first : first + STRIDE_NBYTES] = 1
        assert list(sample.changed()) == [0]


def test_on_a_device_the_sample_is_taken_before_what_is_queued_later(device: Queues) -> None:
    live = [torch.zeros(20_000) for _ in range(3)]
    sources: list[Any] = [device.away(one) for one in live]
    device.send(lambda: live[0].fill_(1))
    host = np.zeros(20_000, np.float32)
    sample = Sample([Range(source, 5, 19_000) for source in (*sources, bits(host))])
    assert list(sample.changed()) == [], "what was queued before the sample is no change"
    device.send(lambda: live[1].fill_(2))
    device.compute.drain()
    host[5] = 1
    assert sorted(sample.changed()) == [1, 3]
