from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.accelerator import install
from tests.devices import every_simulated_device, on_simulated_cuda, run_simulated

if TYPE_CHECKING:
    from tests.accelerator import Accelerator

MIB = 1 << 20


def of(device_type: str) -> Any:
    return torch.get_device_module(device_type)


# Streams.


@every_simulated_device
def test_work_is_done_in_the_order_of_a_stream_beside_the_host(
    accelerator: Accelerator, device_type: str
) -> None:
    values, done = torch.zeros(3, device=device_type), torch.Event(device=device_type)
    stream = of(device_type).current_stream()
    with accelerator.held(stream):
        for _ in range(10):
            values.add_(1).mul_(2)
        done.record(stream)
        assert not done.query()
        assert not stream.query()
    done.synchronize()
    assert done.query()
    assert values.tolist() == [2046.0] * 3


def drawn(device_type: Any, seed: int) -> list[float]:
    """Return the part of a sum that is seen by two streams that do not wait for each other."""
    device = install(device_type)
    seen = []
    for _ in range(8):
        total = torch.zeros(1, device=device_type)
        torch.accelerator.synchronize()
        device.reset(seed=seed, max_delay_us=3000)
        stream = of(device_type).Stream()
        for _ in range(3):
            total.add_(1)
        with stream:
            copies = [total.clone() for _ in range(3)]
        torch.accelerator.synchronize()
        seen += [copy.item() for copy in copies]
    return seen


def test_other_seeds_give_other_orders() -> None:
    orders = {tuple(run_simulated(1, drawn, "cuda", seed, joined=False)[0]) for seed in range(3)}
    assert len(orders) > 1


@on_simulated_cuda
def test_only_the_sleep_that_the_host_waits_for_is_skipped(accelerator: Accelerator) -> None:
    training, stream = of("cuda").current_stream(), of("cuda").Stream()
    first, later = torch.Event(device="cuda"), torch.Event(device="cuda")
    before = accelerator.waited_s()
    accelerator.sleep(training, 100)
    stream.wait_stream(training)
    first.record(stream)
    accelerator.sleep(training, 1000)
    later.record(training)
    first.synchronize()  # through another stream
    assert 90 < accelerator.waited_s() - before <= 100
    assert not later.query()
    later.synchronize()
    assert 900 < accelerator.waited_s() - before <= 1100


@on_simulated_cuda
def test_what_another_thread_waits_for_is_not_the_wait_of_this_one(accelerator: Accelerator) -> None:
    stream, before = of("cuda").current_stream(), accelerator.waited_s()
    accelerator.sleep(stream, 100)
    thread = threading.Thread(target=stream.synchronize)
    thread.start()
    thread.join()
    assert accelerator.waited_s() == before


# Devices and contexts.


def contexts(device_type: Any) -> list[list[int]]:
    device = install(device_type)
    found = [device.contexts()]
    module = of(device_type)
    assert module.device_count() == device.num_devices == torch.accelerator.device_count()
    found.append(device.contexts())
    with module.device(2):
        event = torch.Event(device=device_type)
        event.record(module.current_stream())
        event.synchronize()
    found.append(device.contexts())
    thread = threading.Thread(target=event.synchronize)  # a new thread has device 0
    thread.start()
    thread.join()
    return [*found, device.contexts()]


@pytest.mark.parametrize("device_type", ["cuda", "sim"])
def test_a_thread_without_a_device_opens_a_context_on_device_0(device_type: str) -> None:
    answer = run_simulated(1, contexts, device_type, device_type=device_type, joined=False)
    assert answer == [[[], [], [2], [0, 2]]]


def in_child(device_type: Any) -> str:
    install(device_type)
    torch.ones(1, device=device_type)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            torch.ones(1, device=device_type)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.wait()
    return os.read(read, 1000).decode()


def test_a_forked_child_cannot_use_the_device_of_its_parent() -> None:
    (answer,) = run_simulated(1, in_child, "sim", device_type="sim", joined=False)
    assert "fork" in answer


# Memory.


@on_simulated_cuda
def test_freed_memory_is_given_out_again_at_once_and_has_a_pattern(accelerator: Accelerator) -> None:
    first = torch.ones(1000, device="cuda")
    address = first.data_ptr()
    del first
    second = torch.empty(1000, device="cuda")
    assert second.data_ptr() == address
    assert second.view(torch.uint8).eq(0xDB).all()


@every_simulated_device
def test_a_device_has_so_much_memory_and_what_is_freed_in_small_pieces_serves_large_ones(
    accelerator: Accelerator, device_type: str
) -> None:
    accelerator.limit(accelerator.in_use(3) + 8 * MIB, 3)
    place = torch.device(device_type, 3)
    pieces = [torch.empty(MIB, dtype=torch.uint8, device=place) for _ in range(8)]
    with pytest.raises(torch.OutOfMemoryError, match="device 3"):
        torch.empty(1, device=place)
    free, total = of(device_type).mem_get_info(3)
    assert (free, total) == (0, accelerator.in_use(3))
    del pieces
    accelerator.reset_peak(3)
    whole = torch.ones(8 * MIB, dtype=torch.uint8, device=place)
    assert accelerator.peak(3) == accelerator.in_use(3) == of(device_type).memory_allocated(3)
    assert whole.cpu().eq(1).all()


@on_simulated_cuda
def test_a_copy_across_the_border_of_pinned_memory_is_refused(accelerator: Accelerator) -> None:
    memory = np.zeros(8192, np.uint8)
    assert accelerator.pin(memory.ctypes.data, 4096) == 0
    with pytest.raises(RuntimeError, match="crosses the border"):
        torch.from_numpy(memory).copy_(torch.ones(8192, dtype=torch.uint8, device="cuda"))
    assert accelerator.unpin(memory.ctypes.data) == 0


@every_simulated_device
def test_each_device_has_random_numbers_that_go_on_from_a_state(
    accelerator: Accelerator, device_type: str
) -> None:
    module, places = of(device_type), [torch.device(device_type, n) for n in (0, 1)]
    torch.manual_seed(5)
    first = [torch.rand(3, device=place).tolist() for place in places]
    states = [module.get_rng_state(place) for place in places]
    second = [torch.rand(3, device=place).tolist() for place in places]
    assert first[0] == first[1] != second[0]
    torch.rand(1, device=places[1])
    for place, state in zip(places, states, strict=True):
        module.set_rng_state(state, place)
    assert [torch.rand(3, device=place).tolist() for place in places] == second
    with pytest.raises(RuntimeError, match="16 bytes"):
        module.set_rng_state(torch.get_rng_state(), places[0])
