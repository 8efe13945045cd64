"""Copies from devices have all writes that were queued before the save, and do not wait for later ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.engine.memory import devices as staging
from reknit.engine.memory.devices import BounceBuffers, Staging
from reknit.engine.memory.elements import Range, Sample, bits
from reknit.errors import DeadlineError, ReknitError
from reknit.types import devices
from tests.accelerator import installed
from tests.devices import every_simulated_device, run_simulated
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.accelerator import Accelerator

LIMIT_S = 30.0
NUMEL = 10_000


def current(device_type: str, index: int = 0) -> Any:
    return devices.current_stream(torch.device(device_type, index))


def nbytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return np.zeros(tensor.nbytes, np.uint8)


def pinned(numel: int) -> tuple[torch.Tensor, NDArray[np.uint8]]:
    """Return pinned memory, as a tensor and as bytes."""
    memory = torch.zeros(numel, pin_memory=True)
    return memory, memory.numpy().view(np.uint8)


@every_simulated_device
@pytest.mark.parametrize("num_devices", [2])
def test_a_copy_has_what_was_queued_before_the_save_and_runs_beside_what_comes_later(
    accelerator: Accelerator, device_type: str, num_devices: int
) -> None:
    waited_s = accelerator.waited_s()
    live = [torch.zeros(NUMEL, device=f"{device_type}:{index}") for index in range(num_devices)]
    others = [torch.zeros(1, device=one.device) for one in live]
    for index, one in enumerate(live):
        accelerator.sleep(current(device_type, index), 100)
        one.fill_(1)
    save = Staging(map(bits, live))
    for index, other in enumerate(others):
        accelerator.sleep(current(device_type, index), 1000)
        other.fill_(1)
    memories, outs = zip(*(pinned(NUMEL) for _ in live), strict=True)
    for one, out in zip(live, outs, strict=True):
        save.add(bits(one), 0, NUMEL, out)
    save.wait(LIMIT_S)
    assert all(memory.eq(1).all() for memory in memories)
    assert accelerator.waited_s() - waited_s < 1000, "the save waited for later writes"
    assert not save.under_way()


@every_simulated_device
def test_memory_that_is_freed_before_its_copy_has_run_is_not_given_away(
    accelerator: Accelerator, device_type: str
) -> None:
    live = torch.ones(NUMEL, device=device_type)
    save, (memory, out) = Staging([bits(live)]), pinned(NUMEL)
    address = live.data_ptr()
    with accelerator.held(devices.side_stream(live.device)):
        save.add(bits(live), 0, NUMEL, out)
        del live
        other = torch.full((NUMEL,), 2.0, device=device_type)
    save.wait(LIMIT_S)
    assert memory.eq(1).all()
    assert other.data_ptr() != address


@every_simulated_device
def test_bytes_that_are_not_pinned_come_by_way_of_two_buffers_beside_what_comes_later(
    accelerator: Accelerator, device_type: str
) -> None:
    for sizes in one_by_one([[], [1], [3, 8, 24, 5, 40, 41, 100, 2, 2]]):
        waited_s = accelerator.waited_s()
        dtypes = [torch.uint8, torch.float32, torch.bfloat16]
        live = [
            torch.arange(size).to(dtypes[number % 3]).to(f"{device_type}:{number % 2}")
            for number, size in enumerate(sizes)
        ]
        expected = [one.cpu().view(torch.uint8).numpy() for one in live]
        buffers = [torch.zeros(40, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(2)]
        save = Staging(map(bits, live), BounceBuffers(buffers, LIMIT_S))
        for one in live:
            accelerator.sleep(current(device_type, one.device.index), 1000)
            one.fill_(9)
        outs = [nbytes_of(one) for one in live]
        for one, out in zip(live, outs, strict=True):
            save.add(bits(one), 0, one.numel(), out)
        save.wait(LIMIT_S)
        assert all(map(np.array_equal, outs, expected))
        assert accelerator.waited_s() - waited_s < 1000


@every_simulated_device
def test_a_buffer_is_waited_for_with_a_deadline(accelerator: Accelerator, device_type: str) -> None:
    live = torch.ones(NUMEL, device=device_type)
    buffers = [torch.zeros(NUMEL, dtype=torch.uint8, pin_memory=True).numpy() for _ in range(2)]
    save, out = Staging([bits(live)], BounceBuffers(buffers, 0.2)), nbytes_of(live)
    with accelerator.held(devices.side_stream(live.device)):
        with pytest.raises(DeadlineError, match="had not copied what is saved within"):
            save.add(bits(live), 0, NUMEL, out)
        assert save.under_way()
    torch.accelerator.synchronize()
    assert not save.under_way()


@every_simulated_device
def test_a_device_that_does_not_come_to_the_copies_is_named_after_the_deadline(
    accelerator: Accelerator, device_type: str
) -> None:
    live = [torch.ones(NUMEL, device=f"{device_type}:{index}") for index in range(2)]
    save, (memory, out) = Staging(map(bits, live)), pinned(2 * NUMEL)
    with accelerator.held(devices.side_stream(live[0].device)):
        for index, one in enumerate(live):
            save.add(bits(one), 0, NUMEL, out[4 * NUMEL * index :][: 4 * NUMEL])
        with pytest.raises(DeadlineError, match=f"{device_type}:0 had not copied what is saved within 0.2 s"):
            save.wait(0.2)
        assert memory[NUMEL:].eq(1).all(), "the other device was waited for"
        assert save.under_way()
    save.wait(LIMIT_S)
    assert memory.eq(1).all()
    assert not save.under_way()


@every_simulated_device
def test_a_copy_that_fails_is_an_error_that_names_the_device(
    accelerator: Accelerator, device_type: str
) -> None:
    live = torch.ones(NUMEL, device=f"{device_type}:1")
    save, (_, out) = Staging(), pinned(NUMEL)
    accelerator.fail_copy()
    save.add(bits(live), 0, NUMEL, out)
    with pytest.raises(ReknitError, match=f"a copy from or to {device_type}:1 failed"):
        save.wait(LIMIT_S)
    assert not save.under_way()


def contexts_after_copies_in_a_thread(device_type: str) -> list[int]:
    """Return the devices in use when a process whose current device is 0 has copied from device 1."""
    live = torch.ones(NUMEL, device=f"{device_type}:1")
    memory = np.zeros(live.nbytes, np.uint8)
    unpin = devices.pin(memory, live.device)
    save, sample = Staging([bits(live)]), Sample([Range(bits(live), 0, NUMEL)])
    save.add(bits(live), 0, NUMEL, memory)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(save.wait, LIMIT_S).result()
        assert pool.submit(lambda: list(sample.changed())).result() == []
        assert not pool.submit(save.under_way).result()
        if unpin is not None:
            pool.submit(unpin).result()
    assert (memory.view(np.float32) == 1).all()
    device = installed()
    assert device is not None
    return device.contexts()


@pytest.mark.parametrize("device_type", ["cuda", "sim"])
def test_only_the_devices_of_sources_are_used_by_whichever_thread(device_type: str) -> None:
    assert run_simulated(1, contexts_after_copies_in_a_thread, device_type, device_type=device_type) == [[1]]


@every_simulated_device
def test_any_flat_range_of_any_strided_tensor_on_a_device_is_staged_in_row_major_order(
    accelerator: Accelerator, device_type: str
) -> None:
    @settings(max_examples=30)
    @given(
        st.lists(st.integers(1, 5), max_size=4).map(tuple),
        st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]),
        st.integers(1, 200),
        st.data(),
    )
    def check(shape: tuple[int, ...], dtype: torch.dtype, budget: int, data: st.DataObject) -> None:
        axes = data.draw(st.permutations(range(len(shape))))
        live = torch.arange(prod(shape)).reshape(shape).to(dtype).permute(axes)
        first = data.draw(st.integers(0, live.numel() - 1))
        numel = data.draw(st.integers(1, live.numel() - first))
        out = np.empty(live.element_size() * numel, np.uint8)
        there = torch.empty_strided(live.shape, live.stride(), dtype=dtype, device=device_type).copy_(live)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "PIECE_NBYTES", budget)
            save = Staging()
            save.add(bits(there), first, numel, out)
            save.wait(LIMIT_S)
        expected = live.reshape(-1)[first : first + numel].contiguous()
        assert out.tobytes() == bytes(expected.view(torch.uint8).tolist())

    accelerator.reset(max_delay_us=0)
    check()


@every_simulated_device
def test_memory_on_the_device_is_bounded_and_none_is_taken_for_what_is_contiguous(
    accelerator: Accelerator, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for transposed in one_by_one([False, True]):
        monkeypatch.setattr(staging, "PIECE_NBYTES", 4096)
        live = torch.arange(4e4, device=device_type).reshape(200, 200)
        source, out = bits(live.t() if transposed else live), nbytes_of(live)
        accelerator.reset_peak()
        before = accelerator.in_use()
        save = Staging([source])
        save.add(source, 7, 39_000, out[: 4 * 39_000])
        save.wait(LIMIT_S)
        # The rest of a row is a piece too, and the memory of one more is free only after its copy has run.
        assert accelerator.peak() - before <= (3 * 4096 if transposed else 0)
        expected = (live.t() if transposed else live).cpu().flatten()[7 : 7 + 39_000]
        assert np.array_equal(out[: 4 * 39_000].view(np.float32), expected.numpy())


@every_simulated_device
def test_copies_that_were_queued_before_an_error_are_waited_for(
    accelerator: Accelerator, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PIECE_NBYTES", 8)
    live = torch.arange(1, 7, dtype=torch.int32, device=device_type).reshape(2, 3).t()
    memory = torch.zeros(6, dtype=torch.int32, pin_memory=True)
    save, before = Staging(), current(device_type)
    accelerator.refuse_memory(1)
    with pytest.raises(torch.OutOfMemoryError):
        save.add(bits(live), 0, 6, memory.numpy().view(np.uint8))
    save.wait(LIMIT_S)
    assert memory.tolist() == [1, 4, 0, 0, 0, 0]
    assert current(device_type) == before


@every_simulated_device
def test_seeds_of_timing_change_nothing(accelerator: Accelerator, device_type: str) -> None:
    for seed in range(20):
        accelerator.reset(seed=seed)
        live, (memory, out) = torch.zeros(NUMEL, device=device_type), pinned(NUMEL)
        for value in range(3):
            live.fill_(value)
        save = Staging([bits(live)])
        save.add(bits(live), 0, NUMEL, out)
        side = torch.get_device_module(device_type).Stream(live.device)
        with ExitStack() as stack:
            stack.enter_context(side)
            other = torch.full((NUMEL,), 9.0, device=device_type)
        del live
        save.wait(LIMIT_S)
        assert memory.eq(2).all(), seed
        assert other.numel() == NUMEL
