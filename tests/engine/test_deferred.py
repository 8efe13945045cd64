"""Saves that are staged lazily: a checkpoint has the values at the call, in spite of all later changes."""

from __future__ import annotations

import copy
import os
import random
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reknit
from reknit.engine.background import at_agent
from reknit.engine.background.snapshot import Deferred, Snapshot
from reknit.engine.memory import images as file_image
from reknit.errors import DeadlineError, StateError
from reknit.storage.registry import register
from tests.forks import fork
from tests.running.examples import examples
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 60.0
LAZY = reknit.SaveOptions(stage="lazy")

State = dict[str, Any]

register("lazy", lambda url, durability: ProcessMemory("lazy").sub(url.removeprefix("lazy://")))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert reknit.close(LIMIT_S)
    ProcessMemory.clear("lazy")


class Gate:
    """A gate: no save copies its deferred tensors before it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        settle = Snapshot.settle

        def held(snapshot: Snapshot, *deferred: Any) -> None:
            assert self.open.wait(LIMIT_S)
            settle(snapshot, *deferred)

        monkeypatch.setattr(Snapshot, "settle", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


class Net(nn.Module):
    """Weights of more and of fewer bytes than one copy takes, and buffers that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 200)
        self.norm = nn.BatchNorm1d(200)
        self.second = nn.Linear(200, 100)
        self.register_buffer("seen", torch.zeros(30_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        out: torch.Tensor = self.second(self.norm(self.first(x)))
        return out


def backward(model: nn.Module) -> None:
    model(torch.randn(8, 100)).square().mean().backward()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=False),
}


def trained(optimizer: str) -> State:
    torch.manual_seed(0)
    model = Net()
    state: State = {"model": model, "optimizer": OPTIMIZERS[optimizer](model.parameters())}
    state["average"] = copy.deepcopy(model)
    backward(model)
    state["optimizer"].step()
    return state


def truth(state: State) -> dict[str, Any]:
    """Return a copy of all tensors of a state, as they are now."""
    found = {}
    for item in ("model", "average"):
        found.update({f"{item}/{name}": t for name, t in state[item].state_dict().items()})
    names = {p: name for name, p in state["model"].named_parameters()}
    for p, states in state["optimizer"].state.items():
        found.update({f"optimizer/state/{names[p]}/{key}": value for key, value in states.items()})
    return {name: t.detach().clone().numpy() for name, t in found.items() if isinstance(t, torch.Tensor)}


def differing(path: str, expected: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that differ in a checkpoint."""
    with reknit.open(path) as checkpoint:
        return [
            name
            for name, value in expected.items()
            if checkpoint.read(*name.partition("/")[::2]).tobytes() != value.tobytes()
        ]


def save(path: str, state: State) -> reknit.PendingSave:
    return reknit.save(path, state, wait=False, options=LAZY)


def proven(state: State) -> None:
    """Save, and let the optimizer step, so that its tensors are deferred from now on."""
    save("lazy://run/first", state).result(LIMIT_S)
    backward(state["model"])
    state["optimizer"].step()


def is_staged(pending: reknit.PendingSave) -> bool:
    try:
        pending.staged(0.0)
    except DeadlineError:
        return False
    return True


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_waits_for_the_copies_and_the_backward_before_it_does_not(gate: Gate, kind: str) -> None:
    state = trained(kind)
    proven(state)
    expected, pending = truth(state), save("lazy://run/second", state)
    assert not is_staged(pending)
    backward(state["model"])
    stepped = threading.Thread(target=state["optimizer"].step)
    stepped.start()
    stepped.join(0.1)
    assert stepped.is_alive()
    gate.open.set()
    stepped.join()
    pending.result(LIMIT_S)
    assert differing("lazy://run/second", expected) == []
    assert not np.array_equal(truth(state)["model/first.weight"], expected["model/first.weight"])


def by_numpy(state: State) -> None:
    state["model"].first.weight.detach().numpy()[:] += 1


def by_replay(state: State) -> None:
    """Change the tensors of a step as the replay of a CUDA graph does: past all hooks and counts."""
    for p, states in state["optimizer"].state.items():
        for tensor in (p, *(s for s in states.values() if isinstance(s, torch.Tensor) and s.ndim)):
            tensor.data.mul_(0.5)


def by_torch(state: State) -> None:
    with torch.no_grad():
        state["model"].second.weight[7, 3] += 1


def by_a_state(state: State) -> None:
    for states in state["optimizer"].state.values():
        next(s for s in states.values() if s.ndim).add_(1)


PAST_THE_BARRIER = [by_numpy, by_replay, by_torch, by_a_state]


@pytest.mark.parametrize("change", PAST_THE_BARRIER)
def test_a_change_that_is_no_step_fails_the_save_and_later_ones_are_copied_at_once(
    gate: Gate, change: Callable[[State], None], caplog: pytest.LogCaptureFixture
) -> None:
    state = trained("adamw, fused")
    proven(state)
    pending = save("lazy://run/second", state)
    assert not is_staged(pending)
    change(state)
    gate.open.set()
    with pytest.raises(StateError, match="was changed while it was staged lazily"):
        pending.result(LIMIT_S)
    assert str(reknit.latest("lazy://run")).endswith("/first")
    gate.open.clear()
    for name in ("third", "fourth"):
        state["optimizer"].step()
        expected, pending = truth(state), save(f"lazy://run/{name}", state)
        assert is_staged(pending)
        change(state)
        pending.result(LIMIT_S)
        assert differing(f"lazy://run/{name}", expected) == []
    reported = [
        record.getMessage() for record in caplog.records if "cannot be made to wait" in record.message
    ]
    assert len(reported) == 1


def test_what_no_optimizer_of_the_state_has_is_copied_before_save_returns(gate: Gate) -> None:
    state = trained("sgd")
    state["frozen"] = frozen = torch.ones(50_000)
    proven(state)
    expected, pending = truth(state), save("lazy://run/second", state)
    assert not is_staged(pending)
    frozen.data.add_(1)
    state["model"](torch.randn(8, 100))
    for p in state["average"].parameters():
        p.data.lerp_(torch.ones_like(p), 0.5)
    gate.open.set()
    pending.result(LIMIT_S)
    assert differing("lazy://run/second", {**expected, "frozen/": np.ones(50_000, np.float32)}) == []


def test_small_and_scattered_tensors_of_an_optimizer_are_copied_before_save_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"above": (1 << 14) + 1, "small": 1 << 14}
    parameters = {name: nn.Parameter(torch.ones(numel)) for name, numel in sizes.items()}
    parameters["scattered"] = nn.Parameter(torch.ones(300, 200).T)
    optimizer = torch.optim.SGD(list(parameters.items()), lr=0.1)
    state: State = {**parameters, "optimizer": optimizer}
    deferred: list[str] = []

    class Noted(Deferred):
        def __init__(self, holdings: Any, images: Any) -> None:
            super().__init__(holdings, images)
            later = [row.shard for image in self.later for row in image.entries.rows()]
            deferred.extend(holdings.shards[number].item for number in later)

    monkeypatch.setattr(at_agent, "Deferred", Noted)
    for number in range(2):
        save(f"lazy://run/{number}", state).result(LIMIT_S)
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert deferred == ["above"], "only contiguous tensors of more than 64 KiB are deferred"


def test_an_optimizer_that_was_not_seen_to_step_is_copied_before_save_returns(gate: Gate) -> None:
    state = trained("sgd")
    assert is_staged(save("lazy://0", state))
    assert is_staged(save("lazy://1", state))
    state["optimizer"].step()
    pending = save("lazy://2", state)
    assert not is_staged(pending)
    gate.open.set()
    pending.staged(LIMIT_S)
    by_replay(state)
    gate.open.clear()
    assert is_staged(save("lazy://3", state))


def test_a_change_of_dtensors_by_their_optimizer_waits_and_one_past_it_is_noticed(gate: Gate) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight: Any = nn.Parameter(distribute_tensor(torch.ones(400, 100), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([("weight", weight)], lr=0.5)
        weight.grad = distribute_tensor(torch.ones(400, 100), mesh, [Shard(0)])
        state = {"optimizer": optimizer, "w": weight}
        for number in range(4):
            expected = weight.to_local().detach().numpy().copy()
            pending = save(f"lazy://{number}", state)
            assert is_staged(pending) == (number == 0)
            if number < 3:
                release = threading.Timer(0.05, gate.open.set)
                release.start()
                optimizer.step()
                pending.result(LIMIT_S)
                release.join()  # the first save, which does not need the gate, may be over before
                assert differing(f"lazy://{number}", {"w/": expected}) == []
                gate.open.clear()
        version = weight.to_local()._version
        with torch.no_grad():
            weight.add_(1)
        assert weight.to_local()._version == version, "torch counts this change: the sample is not needed"
        gate.open.set()
        with pytest.raises(StateError, match="w was changed while"):
            pending.result(LIMIT_S)
        assert reknit.close(LIMIT_S)
    finally:
        dist.destroy_process_group()


def test_a_forked_process_waits_for_no_copies(gate: Gate) -> None:
    state = trained("sgd")
    proven(state)
    pending = save("lazy://run/second", state)
    assert not is_staged(pending)
    child = fork()
    if child == 0:
        try:
            state["optimizer"].step()
            os._exit(7)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gate.open.set()
    pending.result(LIMIT_S)


def by_a_step(state: State) -> None:
    state["optimizer"].step()


def by_two_steps(state: State) -> None:
    for _ in range(2):
        backward(state["model"])
        state["optimizer"].step()


def by_other_memory(state: State) -> None:
    for p in state["model"].parameters():
        p.data = p.data * 2


def by_averaging(state: State) -> None:
    pairs = zip(state["average"].parameters(), state["model"].parameters(), strict=True)
    for average, p in pairs:
        average.data.lerp_(p.data, 0.3)


def by_training_on(state: State) -> None:
    backward(state["model"])
    state["optimizer"].zero_grad()


def by_rows(state: State) -> None:
    state["model"].second.weight.data[10:40] = 7


CHANGES = [*PAST_THE_BARRIER, by_a_step, by_two_steps, by_other_memory, by_averaging, by_training_on, by_rows]


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.lists(st.lists(st.sampled_from(CHANGES), max_size=3), min_size=2, max_size=4),
    st.integers(0, 2**16),
)
def test_a_checkpoint_has_what_was_there_at_the_save_or_there_is_none(
    kind: str, between: list[list[Callable[[State], None]]], seed: int
) -> None:
    state, pace = trained(kind), random.Random(seed)
    settle, copy_runs = Snapshot.settle, file_image.copy_runs

    def slow_settle(snapshot: Snapshot, *deferred: Any) -> None:
        time.sleep(pace.random() * 0.02)
        settle(snapshot, *deferred)

    def torn(addresses: Any, nbytes: Any, out: Any, begin: Any) -> None:
        half = nbytes // 2
        copy_runs(addresses, half, out, begin)
        time.sleep(pace.random() * 0.003)
        copy_runs(addresses + half, nbytes - half, out, begin + half)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Snapshot, "settle", slow_settle)
        patched.setattr(file_image, "copy_runs", torn)
        for number, changes in enumerate(between):
            path = f"lazy://run/{number}"
            expected, pending = truth(state), save(path, state)
            for change in changes:
                change(state)
            try:
                pending.result(LIMIT_S)
            except StateError:
                assert set(changes) & {*PAST_THE_BARRIER, by_rows}
                assert number
            else:
                assert differing(path, expected) == []
        assert reknit.close(LIMIT_S)
    ProcessMemory.clear("lazy")


def test_after_prepare_and_a_step_the_first_save_is_staged_lazily(gate: Gate) -> None:
    state = trained("sgd")
    reknit.prepare("lazy://run", state, options=LAZY)
    state["optimizer"].step()
    assert not is_staged(save("lazy://0", state))
    gate.open.set()
