"""Calls for devices of any kind, and calls that only CUDA has."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.types import devices
from tests.devices import every_device, every_simulated_device, on_cuda, on_simulated_cuda

if TYPE_CHECKING:
    from pathlib import Path

    from tests.accelerator import Accelerator


def test_what_is_on_the_host_has_no_device_and_nothing_imports_torch() -> None:
    code = (
        "import sys, numpy; from reknit.types.devices import device_of, is_captured, is_queued;"
        "data = numpy.zeros(4); assert device_of(data) is None and not is_queued(data) and not is_captured();"
        "assert 'torch' not in sys.modules; import torch; data = torch.zeros(4);"
        "assert device_of(data) is None and not is_queued(data) and not is_captured();"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_kind_that_torch_has_no_streams_for_copies_at_once() -> None:
    tensor = torch.zeros(3, device="meta")
    assert devices.device_of(tensor) == torch.device("meta")
    assert not devices.is_queued(tensor)
    with devices.on_device(tensor.device):
        pass
    assert devices.pin(np.zeros(8, np.uint8), tensor.device) is None


def test_a_torch_that_raises_where_it_has_no_accelerator_saves_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def current_accelerator() -> torch.device:  # torch 2.6
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    state: dict[str, Any] = {"weight": torch.arange(3.0), "rng": reknit.RngState()}
    reknit.save(tmp_path / "one", state)
    state["weight"] = torch.zeros(3)
    reknit.load(tmp_path / "one", state)
    assert torch.equal(state["weight"], torch.arange(3.0))
    assert 'device="cpu"' in devices.memory_remedy("the model")


@every_device
def test_a_stream_and_its_device_are_current_within_the_block_only(device_type: str) -> None:
    module = torch.get_device_module(device_type)
    places = [torch.device(device_type, index) for index in range(module.device_count())]
    before = module.current_device(), [devices.current_stream(place) for place in places]
    device = places[-1]  # the only one of a machine with one device
    side = devices.side_stream(device)
    with devices.on_stream(side):
        assert module.current_device() == device.index
        assert devices.current_stream(device) == side
    assert side != before[1][-1]
    assert before == (module.current_device(), [devices.current_stream(place) for place in places])
    assert devices.side_stream(device) == side
    assert not devices.is_captured()


@on_cuda
def test_registered_memory_is_pinned_for_torch_until_it_is_unregistered() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    unpin = devices.pin(memory, torch.device("cuda", 0))
    assert unpin is not None
    assert torch.from_numpy(memory[4096:8192]).is_pinned()
    unpin()
    assert not torch.from_numpy(memory).is_pinned()
    assert devices.pin(memory[:0], torch.device("cuda", 0)) is None


@on_cuda
def test_kernels_go_on_after_the_driver_refused_to_pin(caplog: pytest.LogCaptureFixture) -> None:
    memory, device = np.zeros(1 << 20, np.uint8), torch.device("cuda", 0)
    unpin = devices.pin(memory, device)
    assert unpin is not None
    devices.log_refused.cache_clear()
    with caplog.at_level(logging.WARNING, "reknit"):
        assert devices.pin(memory, device) is None  # the memory is already registered
        assert devices.pin(memory, device) is None
    assert torch.ones(3, device=device).sum().item() == 3
    unpin()
    (record,) = caplog.records
    assert "could not pin the memory that saves are staged in, so copies are slower" in record.message
    with caplog.at_level(logging.WARNING, "reknit"):
        unpin()
    assert "could not unpin" in caplog.text
    assert torch.ones(3, device=device).sum().item() == 3


@every_simulated_device
def test_no_call_becomes_part_of_a_graph(
    accelerator: Accelerator, device_type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = {"x": torch.ones(3, device=device_type)}
    reknit.save(tmp_path / "a", state)
    monkeypatch.setattr(torch.get_device_module(device_type), "is_current_stream_capturing", lambda: True)
    for call in (
        lambda: reknit.save(tmp_path / "b", state),
        lambda: reknit.save(tmp_path / "b", state, wait=False),
        lambda: reknit.load(tmp_path / "a", state),
    ):
        with pytest.raises(reknit.UsageError, match="while a graph is captured"):
            call()
    assert not (tmp_path / "b").exists()


@on_simulated_cuda
def test_a_driver_that_refuses_for_another_reason_is_logged_with_its_number(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    devices.log_refused.cache_clear()
    accelerator.refuse_to_pin()
    with caplog.at_level(logging.WARNING, "reknit"):
        assert devices.pin(np.zeros(8, np.uint8), torch.device("cuda", 0)) is None
    assert "the CUDA driver answered with error" in caplog.text
