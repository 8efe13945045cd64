"""Does the simulated device show the mistakes that destroy checkpoints, by wrong bytes or an error?"""

from __future__ import annotations

import ctypes
import mmap
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.accelerator import install
from tests.devices import on_simulated_cuda, run_simulated
from tests.ranks import Died

if TYPE_CHECKING:
    from tests.accelerator import Accelerator

NUMEL = 1000


def side(index: int = 0) -> Any:
    return torch.get_device_module("cuda").Stream(torch.device("cuda", index))


def current(device_type: str, index: int = 0) -> Any:
    return torch.get_device_module(device_type).current_stream(torch.device(device_type, index))


@on_simulated_cuda
def test_memory_that_is_freed_under_a_copy_is_overwritten_unless_the_stream_is_recorded(
    accelerator: Accelerator,
) -> None:
    for recorded in (False, True):
        live = torch.full((NUMEL,), 7.0, device="cuda")
        stream, out = side(), torch.zeros(NUMEL, pin_memory=True)
        stream.wait_stream(current("cuda"))
        with accelerator.held(stream):
            with stream:
                out.copy_(live, non_blocking=True)
            if recorded:
                live.record_stream(stream)
            address = live.data_ptr()
            del live
            other = torch.full((NUMEL,), 9.0, device="cuda")
            current("cuda").synchronize()
        stream.synchronize()
        assert (other.data_ptr() == address) is not recorded
        assert out.eq(7 if recorded else 9).all()


@on_simulated_cuda
def test_a_side_stream_that_does_not_wait_copies_what_is_not_yet_written(accelerator: Accelerator) -> None:
    for waits in (False, True):
        live = torch.zeros(NUMEL, device="cuda")
        stream, training = side(), current("cuda")
        out = torch.full((NUMEL,), 5.0, pin_memory=True)
        training.synchronize()
        with accelerator.held(training):
            live.fill_(1)
            if waits:
                stream.wait_stream(training)
            with stream:
                out.copy_(live, non_blocking=True)
            if not waits:
                stream.synchronize()
        stream.synchronize()
        assert out.eq(1 if waits else 0).all()


@on_simulated_cuda
def test_the_host_reads_old_bytes_before_the_event_of_a_copy(accelerator: Accelerator) -> None:
    for waits in (True, False):  # the copy of the last may go on
        live, out = torch.ones(NUMEL, device="cuda"), torch.full((NUMEL,), 5.0, pin_memory=True)
        done, stream = torch.Event(device="cuda"), current("cuda")
        with accelerator.held(stream):
            out.copy_(live, non_blocking=True)
            done.record(stream)
            seen = out.clone()
            assert not done.query()
        if waits:
            done.synchronize()
            seen = out.clone()
        assert seen.eq(1 if waits else 5).all()


@on_simulated_cuda
def test_memory_that_is_unpinned_under_a_copy_breaks_the_device(accelerator: Accelerator) -> None:
    for early in (False, True):
        live, memory = torch.ones(NUMEL, device="cuda"), np.zeros(NUMEL, np.float32)
        assert accelerator.pin(memory.ctypes.data, memory.nbytes) == 0
        stream = current("cuda")
        with accelerator.held(stream):
            torch.from_numpy(memory).copy_(live, non_blocking=True)
            if early:
                assert accelerator.unpin(memory.ctypes.data) == 0
        if early:
            with pytest.raises(RuntimeError, match="pinned no longer"):
                stream.synchronize()
        else:
            stream.synchronize()
            assert accelerator.unpin(memory.ctypes.data) == 0
        assert memory[0] == (0 if early else 1)


@on_simulated_cuda
def test_the_stream_of_the_wrong_device_orders_nothing_on_device_1(accelerator: Accelerator) -> None:
    for forgotten in (False, True):
        live, out = torch.zeros(NUMEL, device="cuda:1"), torch.full((NUMEL,), 5.0, pin_memory=True)
        training = current("cuda", 1)
        training.synchronize()
        # Without an index it is the current device's: device 0 here.
        stream = torch.get_device_module("cuda").Stream() if forgotten else side(1)
        with accelerator.held(training):
            live.fill_(1)
            stream.wait_stream(current("cuda") if forgotten else training)
            with stream:
                out.copy_(live, non_blocking=True)
            end = stream.record_event()
            if forgotten:
                end.synchronize()
                seen = out.clone()
        if not forgotten:
            end.synchronize()
            seen = out.clone()
        assert seen.eq(5 if forgotten else 1).all()


@on_simulated_cuda
def test_bytes_that_go_up_from_pinned_memory_are_read_when_the_stream_is_there(
    accelerator: Accelerator,
) -> None:
    for pinned in (False, True):
        source = torch.ones(NUMEL, pin_memory=pinned)
        target = torch.empty(NUMEL, device="cuda")
        with accelerator.held(current("cuda")):
            target.copy_(source, non_blocking=True)
            source.fill_(2)  # too early for pinned memory; other memory was staged during the call
        assert target.cpu().eq(2 if pinned else 1).all()


@on_simulated_cuda
def test_a_copy_to_memory_that_is_not_pinned_has_ended_when_the_call_returns(
    accelerator: Accelerator,
) -> None:
    accelerator.reset(max_delay_us=20_000)
    live, out = torch.ones(NUMEL, device="cuda"), torch.zeros(NUMEL)
    for value in range(5):
        live.fill_(value)
        out.copy_(live, non_blocking=True)
        assert out.eq(value).all()


@on_simulated_cuda
def test_a_load_returns_before_a_target_that_is_not_contiguous_is_filled(accelerator: Accelerator) -> None:
    for contiguous in (False, True):
        target = torch.zeros(10, 20, device="cuda")
        source = torch.ones(10, 20)
        if not contiguous:
            target, source = target.t(), source.t().contiguous()
        accelerator.reset(max_delay_us=20_000)
        ended = []
        for _ in range(5):
            target.copy_(source)
            ended.append(current("cuda").query())
        assert all(ended) is contiguous


def touch(device_type: Any) -> None:
    install(device_type)
    live = torch.ones(NUMEL, device=device_type)
    torch.accelerator.synchronize()
    ctypes.string_at(live.data_ptr(), 4)


def unmap_early(device_type: Any) -> None:
    device = install(device_type)
    live, memory = torch.ones(NUMEL, device=device_type), mmap.mmap(-1, NUMEL * 4)
    out = np.frombuffer(memory, np.float32)
    assert device.pin(out.ctypes.data, out.nbytes) == 0
    with device.held(current(device_type)):
        torch.from_numpy(out).copy_(live, non_blocking=True)
        ctypes.CDLL(None).munmap(ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(out.nbytes))
    torch.accelerator.synchronize()


def test_a_process_dies_that_touches_the_device_or_unmaps_what_is_copied_to() -> None:
    for mistake in (touch, unmap_early):
        answer = run_simulated(1, mistake, "cuda", some_die=True, joined=False)
        assert answer == [Died(-signal.SIGSEGV)]
