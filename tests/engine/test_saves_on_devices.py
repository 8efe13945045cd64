"""Background saves of tensors on devices store the values at the call, although training goes on at once."""

from __future__ import annotations

import dataclasses
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import reknit
from reknit.engine.background import snapshot
from reknit.engine.memory import arena_pool
from reknit.errors import DEVICE_REMEDY
from reknit.types import devices
from tests.accelerator import install, installed
from tests.devices import every_simulated_device, on_simulated_cuda, on_simulated_own, run_simulated
from tests.faults.nursery import agents_of, stopped
from tests.running.cases import one_by_one, one_by_one_in
from tests.running.examples import at_night

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.accelerator import Accelerator

LIMIT_S = 60.0
NUMEL = 20_000
"""Enough for several copies."""

each_stage = pytest.mark.parametrize(
    ("stage", "device_type"),
    [
        pytest.param("eager", "cuda", marks=on_simulated_cuda),
        pytest.param("lazy", "sim", marks=on_simulated_own),
        pytest.param("eager", "sim", marks=[on_simulated_own, at_night("lazily on this kind")]),
        pytest.param("lazy", "cuda", marks=[on_simulated_cuda, at_night("eagerly on this kind")]),
    ],
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    if installed() is not None:
        assert reknit.close(LIMIT_S)


class Parts(nn.Module):
    """Weights on several devices."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(NUMEL, device=place) for place in places])
        self.register_buffer("seen", torch.zeros(3, device=places[0]))

    def loss(self) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        return torch.stack([part.square().mean().cpu() for part in self.parts]).sum()


class Training:
    """A model and its optimizer, trained without a look at the loss, for which the host would wait."""

    def __init__(self, *places: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Parts(list(places))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step()

    def step(self, num_backward: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(num_backward):
            self.model.loss().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [*(part.detach() for part in self.model.parameters()), *states, self.model.get_buffer("seen")]

    def copies(self) -> list[torch.Tensor]:
        return [tensor.to("cpu", copy=True) for tensor in self.tensors]

    def forget(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(7)

    def save(self, path: Path, stage: Any, **options: Any) -> reknit.PendingSave:
        """Queue that each element becomes one larger, and save at once."""
        for tensor in self.tensors:
            tensor.add_(1)
        options = {"durability": "process", "timeout_s": 60, "stage": stage} | options
        return reknit.save(
            path, self.state, wait=False, overwrite=True, options=reknit.SaveOptions(**options)
        )


def one_larger(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor + 1 for tensor in tensors]


def is_stored(path: Path, into: Training, expected: list[torch.Tensor]) -> bool:
    """Load a checkpoint over queued writes, and return whether it has the expected tensors."""
    into.forget()
    reknit.load(path, into.state)
    return all(map(torch.equal, into.copies(), expected))


@every_simulated_device
def test_each_call_after_a_device_has_failed_raises_an_error_of_that_device(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    training = Training(device_type)
    good, bad, state = tmp_path / "good", tmp_path / "bad", training.state
    reknit.save(good, state)
    eager, lazy = (reknit.SaveOptions(stage=stage, timeout_s=LIMIT_S) for stage in ("eager", "lazy"))
    reknit.prepare(tmp_path, state, options=lazy)
    training.step()  # it waits at its hook, so that the next save is lazy
    new = {"optimizer": torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)}
    calls: dict[str, Callable[[], object]] = {
        "lazy": lambda: reknit.save(bad, state, wait=False, options=lazy).result(LIMIT_S),
        "eager": lambda: reknit.save(bad, state, wait=False, options=eager).result(LIMIT_S),
        "wait": lambda: reknit.save(bad, state, options=eager),
        "load": lambda: reknit.load(good, state),
        "load into a new optimizer": lambda: reknit.load(good, state | new),
        "read": lambda: reknit.open(good).read_all(device=device_type),
    }
    for name in one_by_one(calls):
        accelerator.fail_copy()
        with pytest.raises(RuntimeError, match="CUDA error"):
            training.copies()
        with pytest.raises(reknit.ReknitError, match=r"a device has failed: |a copy from or to ") as caught:
            calls[name]()
        assert caught.value.remedy == DEVICE_REMEDY
        accelerator.reset()
        accelerator.forget_errors()
        assert not (bad / "manifest.json").exists()


@each_stage
def test_what_is_on_two_devices_is_stored_as_it_was_with_each_seed(
    accelerator: Accelerator, device_type: str, stage: str, tmp_path: Path
) -> None:
    places = [f"{device_type}:{index}" for index in (1, 2)]
    one, other = Training(*places), Training(*places, seed=1)
    for seed in range(4):
        torch.accelerator.set_device_index(seed % 3)
        accelerator.reset(seed=seed)
        expected = one_larger(one.copies())
        pending = one.save(tmp_path / "saved", stage)
        one.step()
        one.forget()
        pending.result(LIMIT_S)
        assert is_stored(tmp_path / "saved", other, expected), seed
    torch.accelerator.set_device_index(0)


@each_stage
def test_gradients_go_on_to_be_added_up_while_a_save_copies(
    accelerator: Accelerator, device_type: str, stage: str, tmp_path: Path
) -> None:
    one, other, alone = (Training(device_type, seed=seed) for seed in (0, 1, 0))
    for number in range(3):
        one.optimizer.zero_grad()
        one.model.loss().backward()  # type: ignore[no-untyped-call]
        expected = one_larger(one.copies())
        pending = one.save(tmp_path / "saved", stage)
        one.model.loss().backward()  # type: ignore[no-untyped-call]
        one.optimizer.step()
        pending.result(LIMIT_S)
        assert is_stored(tmp_path / "saved", other, expected), number
        alone.optimizer.zero_grad()
        alone.model.loss().backward()  # type: ignore[no-untyped-call]
        for tensor in alone.tensors:
            tensor.add_(1)
        alone.model.loss().backward()  # type: ignore[no-untyped-call]
        alone.optimizer.step()
    assert all(map(torch.equal, one.copies(), alone.copies())), "training went on as if nothing was saved"


@each_stage
def test_saves_under_way_at_the_same_time_have_each_what_was_there(
    accelerator: Accelerator, device_type: str, stage: str, tmp_path: Path
) -> None:
    one, other = Training(device_type), Training(device_type, seed=1)
    pending, expected = [], []
    for number in range(4):
        accelerator.reset(seed=number)
        expected.append(one_larger(one.copies()))
        pending.append(one.save(tmp_path / str(number), stage))
        one.step()
    for number, save in enumerate(pending):
        save.result(LIMIT_S)
        assert is_stored(tmp_path / str(number), other, expected[number]), number


@every_simulated_device
def test_what_a_forward_pass_changes_is_stored_lazily_as_it_was(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    one, other = Training(device_type), Training(device_type, seed=1)
    one.save(tmp_path / "first", "lazy").result(LIMIT_S)  # from now on lazy saves copy later
    one.step()
    expected = one_larger(one.copies())
    with accelerator.held(devices.side_stream(torch.device(device_type, 0))):
        pending = one.save(tmp_path / "saved", "lazy")
        one.model.loss().item()
    pending.result(LIMIT_S)
    assert is_stored(tmp_path / "saved", other, expected)


@on_simulated_cuda
def test_memory_is_unpinned_before_its_pages_are_given_up(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = dict[int, bool]()

    def recorded(memory: Any, device: torch.device) -> Any:
        unpin = devices.pin(memory, device)
        assert unpin is not None

        def end() -> None:
            ended[memory.ctypes.data] = bool(memory.any())
            unpin()

        return end

    monkeypatch.setattr(arena_pool, "pin", recorded)
    Training("cuda").save(tmp_path / "saved", "eager").result(LIMIT_S)
    assert reknit.close(LIMIT_S)
    ((address, was_there),) = ended.items()
    assert was_there
    assert accelerator.unpin(address) != 0


@on_simulated_own
def test_what_is_larger_than_the_host_memory_is_stored_as_it_was(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    live, other = (torch.zeros(20 << 20, device="sim") for _ in range(2))
    live.fill_(1)
    options = reknit.SaveOptions(durability="process", host_nbytes=64 << 20)
    pending = reknit.save(tmp_path / "x", {"x": live}, wait=False, options=options)
    live.fill_(9)
    pending.result(LIMIT_S)
    reknit.load(tmp_path / "x", {"x": other})
    assert other.eq(1).all().item()


@each_stage
def test_a_save_that_is_called_on_another_stream_waits_for_that_stream(
    accelerator: Accelerator, device_type: str, stage: str, tmp_path: Path
) -> None:
    one, other = Training(device_type), Training(device_type, seed=1)
    one.save(tmp_path / "saved", stage).result(LIMIT_S)  # from now on lazy saves copy later
    one.step()
    expected = one_larger(one.copies())
    module = torch.get_device_module(device_type)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        accelerator.sleep(side, 100)
        pending = one.save(tmp_path / "saved", stage)
        one.step()
    module.current_stream().wait_stream(side)
    pending.result(LIMIT_S)
    assert is_stored(tmp_path / "saved", other, expected)


@every_simulated_device
def test_a_lazy_save_neither_waits_for_the_device_nor_for_what_is_queued_after_it(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    one, other = Training(device_type), Training(device_type, seed=1)
    one.save(tmp_path / "saved", "lazy").result(LIMIT_S)
    one.step()
    expected, waited_s = one_larger(one.copies()), accelerator.waited_s()
    training = devices.current_stream(torch.device(device_type, 0))
    accelerator.sleep(training, 100)
    pending = one.save(tmp_path / "saved", "lazy")
    assert accelerator.waited_s() == waited_s
    accelerator.sleep(training, 1000)
    pending.staged(LIMIT_S)
    pending.result(LIMIT_S)
    assert accelerator.waited_s() == waited_s
    assert not training.query(), "the stream of the training was waited for"
    one.step()
    assert is_stored(tmp_path / "saved", other, expected)


def save_lazily_without_memory(
    accelerator: Accelerator, device_type: str, after: int, tmp_path: Path
) -> None:
    one, other = Training(f"{device_type}:1"), Training(f"{device_type}:1", seed=1)
    one.save(tmp_path / "first", "lazy").result(LIMIT_S)  # from now on its optimizer's steps are waited for
    one.step()
    expected = one_larger(one.copies())
    for tensor in one.tensors:
        tensor.add_(1)
    options = reknit.SaveOptions(durability="process", timeout_s=LIMIT_S, stage="lazy")
    accelerator.refuse_memory(after)
    pending = reknit.save(tmp_path / "saved", one.state, wait=False, options=options)
    accelerator.refuse_memory(None)
    one.forget()  # not a step of the optimizer: a later copy would have other values
    pending.result(LIMIT_S)
    assert is_stored(tmp_path / "saved", other, expected)


@every_simulated_device
def test_a_lazy_save_without_memory_to_watch_tensors_copies_them_before_it_returns(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    for after, folder in one_by_one_in(tmp_path, [0, 1, 3]):
        save_lazily_without_memory(accelerator, device_type, after, folder)


@every_simulated_device
def test_copies_that_come_after_the_deadline_of_their_save_are_not_in_the_next_one(
    accelerator: Accelerator, device_type: str, tmp_path: Path
) -> None:
    late, live, other = (torch.zeros(NUMEL, device=f"{device_type}:{index}") for index in (1, 2, 0))
    options = reknit.SaveOptions(durability="process", timeout_s=LIMIT_S)
    for number, tensor in enumerate((late, live)):
        reknit.save(tmp_path / str(number), {"x": tensor}, wait=False, options=options).result(LIMIT_S)
    hasty = dataclasses.replace(options, timeout_s=0.2)
    late.fill_(1)
    live.fill_(2)
    stream = devices.side_stream(late.device)
    with ExitStack() as held:
        held.enter_context(accelerator.held(stream))
        with pytest.raises(reknit.DeadlineError, match=f"{device_type}:1 had not copied"):
            reknit.save(tmp_path / "late", {"x": late}, wait=False, options=hasty).result(LIMIT_S)
        # By the end of another save, the agent has given back the memory of the late one.
        reknit.save(tmp_path / "between", {"x": torch.ones(1)}, wait=False, options=options).result(LIMIT_S)
        with stopped(agents_of(os.getpid())):
            pending = reknit.save(tmp_path / "next", {"x": live}, wait=False, options=options)
            held.close()
            stream.synchronize()
        pending.result(LIMIT_S)
    reknit.load(tmp_path / "next", {"x": other})
    assert other.eq(2).all().item()


def saved_from_device_1(device_type: Any, folder: str, chosen: bool) -> list[int]:
    """Save tensors of device 1 in all ways, and load them; return the devices in use."""
    device = install(device_type)
    if chosen:
        torch.accelerator.set_device_index(1)
    threads, changed = set[str](), snapshot.Deferred.changed

    def recorded(self: snapshot.Deferred) -> list[str]:
        if len(self):
            threads.add(threading.current_thread().name)
        return changed(self)

    setattr(snapshot.Deferred, "changed", recorded)  # noqa: B010
    one = Training(f"{device_type}:1")
    reknit.prepare(folder, one.state, options=reknit.SaveOptions(durability="process", stage="lazy"))
    for number, stage in enumerate(("eager", "lazy", "lazy")):
        one.save(Path(folder, str(number)), stage).result(LIMIT_S)
        one.step()
    assert threads == {"reknit-stages"}
    reknit.save(f"{folder}/now", one.state)
    for name in (*range(3), "now"):
        reknit.load(f"{folder}/{name}", one.state)
    assert reknit.close(LIMIT_S)
    return device.contexts()


@pytest.mark.parametrize(("chosen", "device_type"), [(True, "cuda"), (False, "sim")])
def test_a_job_on_device_1_uses_no_other(device_type: str, chosen: bool, tmp_path: Path) -> None:
    call = (saved_from_device_1, device_type, str(tmp_path), chosen)
    assert run_simulated(1, *call, device_type=device_type) == [[1]]
