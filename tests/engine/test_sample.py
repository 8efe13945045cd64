"""A sample of memory: every change of one of its lines is noticed, wherever the memory lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.memory import elements as sample_module
from reknit.engine.memory.elements import LINE_NBYTES, STRIDE_NBYTES, Range, Sample, bits
from tests.devices import every_simulated_device
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    import pytest

    from tests.accelerator import Accelerator


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


@every_simulated_device
def test_on_a_device_the_sample_is_taken_before_what_is_queued_later(
    accelerator: Accelerator, device_type: str
) -> None:
    live: list[Any] = [torch.zeros(20_000, device=device_type) for _ in range(3)]
    accelerator.sleep(torch.get_device_module(device_type).current_stream(), 100)
    live[0].fill_(1)
    host = np.zeros(20_000, np.float32)
    sample = Sample([Range(bits(one), 5, 19_000) for one in (*live, host)])
    assert list(sample.changed()) == [], "a write that was queued before the sample is not a change"
    live[1].fill_(2)
    torch.get_device_module(device_type).synchronize()
    host[5] = 1
    assert sorted(sample.changed()) == [1, 3]
    live[1].zero_()
    torch.get_device_module(device_type).synchronize()
    assert sorted(sample.changed()) == [3]


@every_simulated_device
def test_a_fill_with_a_round_number_is_noticed(accelerator: Accelerator, device_type: str) -> None:
    for value in one_by_one([1.0, 2.0, -2.0, 2.0**64, float("inf")]):
        live = torch.zeros(1 << 20, device=device_type)
        sample = Sample([Range(bits(live), 0, live.numel())])
        live.fill_(value)
        torch.get_device_module(device_type).synchronize()
        assert list(sample.changed()) == [0]


@every_simulated_device
def test_a_sample_keeps_little_on_the_device(accelerator: Accelerator, device_type: str) -> None:
    live = torch.zeros(32 << 20, dtype=torch.uint8, device=device_type)
    before = accelerator.in_use()
    accelerator.reset_peak()
    sample = Sample([Range(bits(live), first, 1 << 20) for first in range(0, 32 << 20, 1 << 20)])
    torch.get_device_module(device_type).synchronize()
    assert accelerator.in_use() - before <= 64 << 10
    assert accelerator.peak() - before <= 4 * LINE_NBYTES * (live.numel() // STRIDE_NBYTES)
    assert list(sample.changed()) == []


@every_simulated_device
def test_on_a_device_every_change_of_a_line_is_noticed_however_ranges_are_cut(
    accelerator: Accelerator, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator.reset(max_delay_us=0)
    for lot_lines in (1, 2, 3, 100):
        monkeypatch.setattr(sample_module, "LOT_LINES", lot_lines)
        live = torch.zeros(9 * STRIDE_NBYTES, dtype=torch.uint8, device=device_type)
        cuts = [(0, LINE_NBYTES), (64, 5 * STRIDE_NBYTES), (6 * STRIDE_NBYTES, 2 * STRIDE_NBYTES + 64)]
        sample = Sample([Range(bits(live), first, numel) for first, numel in cuts])
        assert list(sample.changed()) == []
        lines = [(0, 0), (1, 64), (1, 64 + 4 * STRIDE_NBYTES), (2, 6 * STRIDE_NBYTES), (2, 8 * STRIDE_NBYTES)]
        for number, first in lines:
            for at, bit in ((first, 1), (first + 7, 128), (first + LINE_NBYTES - 1, 64)):
                live[at] ^= bit
                torch.get_device_module(device_type).synchronize()
                assert list(sample.changed()) == [number], (lot_lines, at)
                live[at] ^= bit
    torch.get_device_module(device_type).synchronize()
    assert list(sample.changed()) == []
