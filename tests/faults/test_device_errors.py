"""Errors of a device in the midst of a save or a load: all ranks raise the same, and the next one works."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reknit
from tests.accelerator import install
from tests.devices import run_simulated
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 30.0
STEP = 1 if is_night() else 8
"""The copies and allocations fail in turn, by day each eighth one."""

WAYS: tuple[Any, ...] = ("eager", "lazy", "wait", "load")


class Part:
    """The model of one rank, shared with no other: large and small tensors, one of them not contiguous."""

    def __init__(self, device_type: str, rank: int) -> None:
        self._rank = rank
        torch.accelerator.set_device_index(rank)
        self.model = nn.Linear(200, 200).to(device_type)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.turned = torch.rand(200, 100, device=device_type).t()
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        items = {"model": self.model, "optimizer": self.optimizer, "other": {"turned": self.turned}}
        return {f"{name}{self._rank}": value for name, value in items.items()}

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *states, self.turned]

    def copies(self) -> list[torch.Tensor]:
        return [tensor.to("cpu", copy=True) for tensor in self.tensors]

    def call(self, way: str, path: Path) -> None:
        """Save in some way, or load."""
        if way == "load":
            reknit.load(path, self.state, options=reknit.LoadOptions(timeout_s=LIMIT_S))
            return
        stage: Any = way if way != "wait" else "eager"
        options = reknit.SaveOptions(durability="process", timeout_s=LIMIT_S, stage=stage)
        pending = reknit.save(path, self.state, wait=way == "wait", overwrite=True, options=options)
        pending.result(LIMIT_S)

    def is_stored(self, path: Path) -> bool:
        """Return whether a checkpoint has the present values."""
        expected = self.copies()
        for tensor in self.tensors:
            tensor.fill_(7)
        self.call("load", path)
        return all(map(torch.equal, self.copies(), expected))


def fail_in_turn(device_type: Any, folder: str) -> dict[str, int]:
    """Let each copy, and then each allocation, of the last rank fail in turn; return the numbers of failures.

    After each failure, a save and a load must succeed.
    """
    device, root = install(device_type), Path(folder)
    rank, faulty = dist.get_rank(), dist.get_world_size() - 1
    one = Part(device_type, rank)
    refuse_to_pin(one, device, root / "unpinned")
    one.call("lazy", root / "right")  # from now on lazy saves copy later
    num_failed = {}
    for way in WAYS:
        faults: tuple[Callable[[int | None], None], ...] = (device.fail_copy, device.refuse_memory)
        for fault in faults:
            name = f"{way} {fault.__name__}"
            num_failed[name] = 0
            for after in range(0, 60, STEP):
                one.step()
                path = root / ("right" if way == "load" else f"{name} {after}")
                if way == "load":
                    one.call("eager", path)
                expected = one.copies()
                dist.barrier()
                if rank == faulty:
                    fault(after)
                error = raised(partial(one.call, way, path))
                device.reset()
                dist.barrier()
                if error is None:
                    break
                num_failed[name] += 1
                assert isinstance(error, reknit.ReknitError), (name, after, error)
                assert f"[rank {faulty}" in str(error), (name, after, error)
                assert way == "load" or not (path / "manifest.json").exists(), (name, after)
                if way == "load":
                    for tensor, before in zip(one.tensors, expected, strict=True):
                        tensor.copy_(before)
                else:
                    assert all(map(torch.equal, one.copies(), expected)), (name, after)
                    one.call(way, root / "right")
                assert one.is_stored(root / "right"), (name, after)
            else:
                raise AssertionError(f"{name} never ends")
    assert reknit.close(LIMIT_S)
    return num_failed


def refuse_to_pin(one: Part, device: Any, path: Path) -> None:
    """Let the driver refuse to pin the arena, and check that copies are still right."""
    device.refuse_to_pin()
    one.call("eager", path)
    device.reset()
    assert one.is_stored(path)
    assert reknit.close(LIMIT_S)


def raised(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world", "device_type"), [(2, "cuda"), (1, "sim")] + [(1, "cuda"), (2, "sim")] * is_night()
)
def test_after_an_error_of_a_device_all_ranks_raise_it_and_the_next_save_is_right(
    world: int, device_type: str, tmp_path: Path
) -> None:
    call = (fail_in_turn, device_type, str(tmp_path))
    answers = run_simulated(world, *call, device_type=device_type, timeout=600)
    for num_failed in answers:
        assert num_failed == answers[0]
        # A lazy save without memory to watch its tensors copies them at once.
        assert min(n for call, n in num_failed.items() if call != "lazy refuse_memory") > 0, num_failed
