"""Worker threads copy from and to devices in order with the calling thread, whose stream is any."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.engine.memory import elements
from reknit.engine.memory.devices import Transfer
from reknit.engine.memory.elements import bits, convert, deliver
from reknit.errors import DeadlineError, ReknitError, ShortageError
from reknit.options import LoadOptions, SaveOptions
from reknit.types import devices
from tests.accelerator import installed
from tests.devices import every_device, every_simulated_device, run_simulated
from tests.running.cases import one_by_one, one_by_one_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.accelerator import Accelerator

LIMIT_S = 30.0
LARGE = 3 << 20
"""Elements of a tensor that several workers copy."""
TWO = LoadOptions(threads=2)


def others(device_type: str) -> list[torch.device]:
    """Return two devices, of which the first is not current."""
    return [torch.device(device_type, 1), torch.device(device_type, 0)]


@contextmanager
def on_streams_of_its_own(places: list[torch.device]) -> Iterator[list[Any]]:
    """Let this thread have a stream of its own on each device, but stay on device 0."""
    streams = [torch.get_device_module(place).Stream(place) for place in places]
    with ExitStack() as stack:
        for stream in streams:
            stream.wait_stream(devices.current_stream(stream.device))
            stack.enter_context(devices.on_stream(stream))
        stack.enter_context(devices.on_device(torch.device(places[0].type, 0)))
        yield streams


def held_values(path: Path, like: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return the different values in each tensor of a checkpoint."""
    read = reknit.open(path).read_all(["m"])["m"]
    assert read.keys() == like.keys()
    return {name: tensor.unique().tolist() for name, tensor in read.items()}


@every_simulated_device
def test_a_save_has_what_the_stream_of_the_caller_wrote_before_and_not_what_it_writes_after(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    places = others(device_type)
    state = {}
    for number, place in enumerate(places):
        state[f"plain{number}"] = torch.zeros(LARGE, device=place)
        state[f"turned{number}"] = torch.zeros(1500, 1000, device=place).t()
    with on_streams_of_its_own(places) as streams:
        for stream in streams:
            accelerator.sleep(stream, 100)
        for tensor in state.values():
            tensor.fill_(1)
        reknit.save(tmp_path / "x", {"m": state}, options=SaveOptions(threads=2))
        for tensor in state.values():
            tensor.fill_(2)
    assert held_values(tmp_path / "x", state) == {name: [1.0] for name in state}


@every_simulated_device
def test_a_frozen_tensor_is_compared_as_the_stream_of_the_caller_left_it(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    for changed, folder in one_by_one_in(tmp_path, [False, True]):
        model = torch.nn.Linear(2000, 2000, bias=False, device=f"{device_type}:1").requires_grad_(False)
        with torch.no_grad():
            model.weight.fill_(1)
        reknit.save(folder / "a", {"m": model}, options=SaveOptions(threads=2))
        with on_streams_of_its_own([model.weight.device]) as (stream,), torch.no_grad():
            accelerator.sleep(stream, 100)
            model.weight.fill_(2 if changed else 1)
            report = reknit.save(folder / "b", {"m": model}, options=SaveOptions(threads=2)).result()
        assert (report.reused_nbytes > 0) is not changed
        read = reknit.open(folder / "b").read("m", "weight")
        assert (read == (2 if changed else 1)).all()


def targets(places: list[torch.device]) -> dict[str, torch.Tensor]:
    """Return a tensor for each way by which bytes reach a device."""
    made = {}
    for number, place in enumerate(places):
        made[f"plain{number}"] = torch.full((LARGE,), 5.0, device=place)
        made[f"turned{number}"] = torch.full((1500, 1000), 5.0, device=place).t()
        made[f"cast{number}"] = torch.full((1000, 1000), 5.0, device=place, dtype=torch.bfloat16)
        made[f"part{number}"] = torch.full((1000, 2000), 5.0, device=place)[:, ::2]
        made[f"scalar{number}"] = torch.full((), 5.0, device=place)
    return made


def saved(path: Path, state: dict[str, torch.Tensor]) -> Path:
    """Save a state of ones."""
    reknit.save(path, {"m": {name: torch.ones(tensor.shape) for name, tensor in state.items()}})
    return path


@every_simulated_device
def test_a_load_comes_after_what_the_stream_of_the_caller_wrote_before(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    places = others(device_type)
    state = targets(places)
    path = saved(tmp_path / "x", state)
    with on_streams_of_its_own(places) as streams:
        for stream in streams:
            accelerator.sleep(stream, 100)
        for tensor in state.values():
            tensor.zero_()
        reknit.load(path, {"m": state}, options=LoadOptions(threads=2, cast=True))
        found = {name: tensor.clone() for name, tensor in state.items()}
    with on_streams_of_its_own(places):
        later = {name: tensor.clone() for name, tensor in state.items()}
        assert all(tensor.eq(1).all() for tensor in later.values())
    for place in places:
        torch.accelerator.synchronize(place)
    assert all(tensor.eq(1).all() for tensor in (*found.values(), *state.values()))


@every_simulated_device
def test_what_is_read_is_written_after_the_work_that_had_its_memory_before(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    place = torch.device(device_type, 1)
    path = saved(tmp_path / "x", {"w": torch.empty(LARGE)})
    with on_streams_of_its_own([place]) as (stream,):
        earlier = torch.zeros(LARGE, device=place)
        address = earlier.data_ptr()
        accelerator.sleep(stream, 100)
        earlier.fill_(7)
        del earlier
        read = reknit.open(path, options=TWO).read_all(device=place)["m"]["w"]
        assert read.data_ptr() == address
        assert read.eq(1).all()


@every_simulated_device
def test_states_that_an_optimizer_gets_are_not_overwritten_by_what_made_them(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    place = torch.device(device_type, 1)

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(1500, 1500, device=place)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    reknit.save(tmp_path / "x", {"m": model, "o": optimizer})
    accelerator.reset(max_delay_us=20_000)
    with on_streams_of_its_own([place]) as (stream,):
        fresh, other = make()
        accelerator.sleep(stream, 100)
        reknit.load(tmp_path / "x", {"m": fresh, "o": other}, options=TWO)
        for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(one, two)
            for name, state in optimizer.state[one].items():
                assert torch.equal(state, other.state[two][name])


@every_device
def test_tensors_of_inference_are_filled_too(device_type: str, tmp_path: Path) -> None:
    for (called, made), folder in one_by_one_in(
        tmp_path, product(["for inference", "as ever"], ["for inference", "as ever"])
    ):
        modes = {"for inference": torch.inference_mode, "as ever": torch.no_grad}
        with modes[made]():
            state = targets([torch.device(device_type, 0)])
            state["parameter0"] = torch.nn.Parameter(torch.full((3, 2), 5.0, device=device_type))
        path = saved(folder / "x", state)
        versions = {
            name: None if tensor.is_inference() else tensor._version for name, tensor in state.items()
        }
        with modes[called]():
            reknit.load(path, {"m": state}, options=LoadOptions(threads=2, cast=True))
            read = reknit.open(path).read_all(device=device_type)["m"]
        assert all(tensor.eq(1).all() for tensor in (*state.values(), *read.values()))
        assert all(
            tensor.is_inference() or tensor._version > (versions[name] or 0) for name, tensor in state.items()
        )


@every_simulated_device
def test_memory_on_the_device_is_bounded_and_none_is_taken_for_what_is_contiguous(
    accelerator: Accelerator, device_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elements, "LAID_NBYTES", 64 << 10)
    state = targets([torch.device(device_type, 0)])
    path = saved(tmp_path / "x", state)
    accelerator.reset_peak()
    before = accelerator.in_use()
    plain = {"m": {"plain0": state["plain0"]}}
    reknit.load(path, plain, options=LoadOptions(threads=2, only=("m/plain0",)))
    reknit.save(tmp_path / "y", plain, options=SaveOptions(threads=2))
    assert accelerator.peak() == before
    reknit.load(path, {"m": state}, options=LoadOptions(threads=2, cast=True))
    assert 0 < accelerator.peak() - before <= 64 << 10
    assert all(tensor.eq(1).all() for tensor in state.values())


CASTS = [
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float64", "float16"),
    ("float64", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float8_e4m3fn"),
    ("float32", "float8_e5m2"),
    ("int32", "int64"),
]


@every_device
def test_a_cast_on_the_device_gives_the_bits_of_one_on_the_host(device_type: str) -> None:
    for before, after in one_by_one(CASTS):
        torch.manual_seed(1)
        values = torch.randn(40, 30, dtype=torch.float64) * torch.logspace(-6, 2, 30, dtype=torch.float64)
        source = (values * (1000 if before == "int32" else 1)).to(getattr(torch, before))
        raw = source.view(torch.uint8).reshape(-1).numpy()
        lengths, step = (20, 30), source.element_size()
        strides = (2 * 30 * step, step)
        host = torch.zeros(lengths, dtype=getattr(torch, after))
        there = torch.zeros((30, 20), dtype=host.dtype, device=device_type).t()
        convert(raw, before, lengths, strides, host)
        convert(raw, before, lengths, strides, there)
        assert torch.equal(there.cpu().contiguous().view(torch.uint8), host.view(torch.uint8))


@every_device
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_rectangle_of_every_dtype_comes_to_the_device_unchanged(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most in one_by_one([1, 100, 1 << 20]):
        monkeypatch.setattr(elements, "LAID_NBYTES", most)
        for dtype in (
            torch.uint8,
            torch.bool,
            torch.bfloat16,
            torch.float32,
            torch.complex64,
            torch.complex128,
        ):
            host = torch.arange(4 * 6 * 8).reshape(4, 6, 8).to(dtype)
            step = host.element_size()
            raw = host.view(torch.uint8).reshape(-1).numpy()
            strides = (48 * step, 8 * step, step)
            for first, lengths in ((0, (4, 6, 8)), (9, (2, 3, 5)), (9, (1, 3, 8)), (50, (1, 1, 1))):
                expected = host.view(-1)[first:].as_strided(lengths, (48, 8, 1), first)
                for turned in (False, True):
                    there = torch.zeros(lengths[::-1] if turned else lengths, dtype=dtype, device=device_type)
                    there = there.permute(2, 1, 0) if turned else there
                    deliver(raw[first * step :], lengths, strides, bits(there))
                    assert torch.equal(there.cpu(), expected), (dtype, first, lengths, turned)


@every_simulated_device
def test_the_next_piece_is_read_while_the_device_copies_the_last_one(
    accelerator: Accelerator, device_type: str
) -> None:
    targets = [torch.zeros(1000, device=device_type) for _ in range(3)]
    copied = threading.Event()

    def work() -> None:
        with transfer.arenas(8000, 2) as arena:
            for number, target in enumerate(targets):
                memory = arena.view(4000)
                memory.view(np.float32)[:] = number + 1
                if number == 1:
                    copied.set()  # the first piece is not there yet
                with transfer.copying(arena):
                    deliver(memory, (1000,), (4,), bits(target))

    with Transfer(map(bits, targets), "what is loaded", LIMIT_S) as transfer:
        with accelerator.held(devices.side_stream(targets[0].device)):
            thread = threading.Thread(target=work)
            thread.start()
            assert copied.wait(LIMIT_S)
        thread.join()
    assert all(target.eq(value).all() for target, value in zip(targets, (1, 2, 3), strict=True))


@every_simulated_device
def test_a_copy_that_fails_is_an_error_that_names_what_and_where(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    state = targets([torch.device(device_type, 1)])
    path = saved(tmp_path / "x", state)
    # The calling thread copies small things of a save itself; two workers do this.
    for threads in (1, 2):
        accelerator.fail_copy(1)
        with pytest.raises(ReknitError) as caught:
            reknit.save(tmp_path / "y", {"m": state}, options=SaveOptions(threads=threads))
        assert f"a copy from or to {device_type}:1 failed" in str(caught.value)
        assert "phase stage" in str(caught.value)
        assert re.search("m/0000[0-9]", str(caught.value))
        accelerator.reset()
        assert not (tmp_path / "y").exists() or reknit.latest(tmp_path / "y") is None
        accelerator.fail_copy(1)
        with pytest.raises(ReknitError) as caught:
            reknit.load(path, {"m": state}, options=LoadOptions(threads=threads, cast=True))
        accelerator.reset()
        assert f"a copy from or to {device_type}:1 failed" in str(caught.value)
        # The next call to the device raises the error, so the message may name either tensor.
        assert re.search("; it (copied|was to fill) m/", str(caught.value))
        assert "the target is partly written" in str(caught.value)


@every_simulated_device
def test_a_device_without_memory_to_convert_is_an_error_that_names_what_and_where(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    state = {"cast": torch.zeros(LARGE, device=f"{device_type}:1", dtype=torch.bfloat16)}
    path = saved(tmp_path / "x", state)
    accelerator.refuse_memory(1)
    with pytest.raises(ShortageError) as caught:
        reknit.load(path, {"m": state}, options=LoadOptions(threads=2, cast=True))
    assert f"it was to fill m/cast on {device_type}:1" in str(caught.value)
    assert "the target is partly written" in str(caught.value)
    accelerator.refuse_memory(None)
    reknit.load(path, {"m": state}, options=LoadOptions(threads=2, cast=True))
    assert state["cast"].eq(1).all()
    turned = {"turned": torch.ones(3000, 1000, device=f"{device_type}:1").t()}
    accelerator.refuse_memory()
    with pytest.raises(ShortageError) as caught:
        reknit.save(tmp_path / "y", {"m": turned})
    assert f"; it was to come from {device_type}:1" in str(caught.value)
    assert "phase stage, m/" in str(caught.value)


@every_simulated_device
def test_a_device_that_does_not_come_to_the_copies_is_named_after_the_deadline(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    live = torch.zeros(LARGE, device=f"{device_type}:1")
    path = saved(tmp_path / "x", {"w": live})
    address = live.data_ptr()
    with accelerator.held(devices.side_stream(live.device)):
        with pytest.raises(DeadlineError, match=f"{device_type}:1 had not copied what is saved within 0.3 s"):
            reknit.save(tmp_path / "y", {"m": {"w": live}}, options=SaveOptions(threads=2, timeout_s=0.3))
        with pytest.raises(DeadlineError, match="the target is partly written"):
            reknit.load(path, {"m": {"w": live}}, options=LoadOptions(threads=2, timeout_s=0.3))
        del live
        gc.collect()  # the errors above hold it, too
        other = torch.zeros(LARGE, device=f"{device_type}:1")
        assert other.data_ptr() != address, "memory to which the device may still copy was given away"
    torch.accelerator.synchronize(other.device)
    assert other.eq(0).all()


def contexts_after_save_and_load(device_type: str, folder: str) -> list[int]:
    """Return the devices in use when a process whose current device is 0 has saved and loaded device 1."""
    state = {"m": {"x": torch.ones(LARGE, device=f"{device_type}:1")}}
    reknit.save(f"{folder}/x", state, options=SaveOptions(threads=2))
    state["m"]["x"].zero_()
    reknit.load(f"{folder}/x", state, options=TWO)
    read = reknit.open(f"{folder}/x").read_all(device=f"{device_type}:1")["m"]["x"]
    assert torch.equal(read, state["m"]["x"])
    assert read.eq(1).all()
    device = installed()
    assert device is not None
    return device.contexts()


@pytest.mark.parametrize("device_type", ["cuda", "sim"])
def test_no_device_is_used_but_those_of_the_state(device_type: str, tmp_path: Path) -> None:
    answer = run_simulated(
        1, contexts_after_save_and_load, device_type, str(tmp_path), device_type=device_type
    )
    assert answer == [[1]]


def shared_load(device_type: str, folder: str) -> bool:
    """Load tensors that two ranks want on a stream of its own; return whether the values are right."""
    device, place = installed(), torch.device(device_type, 1)
    assert device is not None
    with on_streams_of_its_own([place]) as (stream,):
        state = {"x": torch.ones(LARGE, device=place), "y": torch.ones(1000, 1000, device=place).t()}
        reknit.save(f"{folder}/x", {"m": state})
        device.sleep(stream, 100)
        for tensor in state.values():
            tensor.zero_()
        options = LoadOptions(threads=2, share="always")
        reknit.load(f"{folder}/x", {"m": state}, options=options)
        return all(tensor.eq(1).all().item() for tensor in state.values())


def test_what_other_ranks_read_comes_after_what_the_stream_of_the_caller_wrote_before(tmp_path: Path) -> None:
    assert run_simulated(2, shared_load, "cuda", str(tmp_path)) == [True, True]


def test_state_in_host_memory_needs_no_device_and_nothing_imports_torch() -> None:
    code = (
        "import sys, numpy; from reknit.engine.memory.devices import Transfer, queue;"
        "data, out = numpy.arange(4, dtype='u1'), numpy.zeros(2, 'u1')\n"
        "with Transfer([data], 'what is saved', 1) as transfer, transfer.arenas(4096) as arena:\n"
        "    with transfer.copying(arena): queue(data, 1, 2, out)\n"
        "assert out.tolist() == [1, 2] and not transfer.is_needed and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
