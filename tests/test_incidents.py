"""Incidents of other checkpoint systems do not happen here; docs/reliability.md lists all of them."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 60.0


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_partial_folder_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer}
    with reknit.Checkpointer(tmp_path / "run") as run:
        run.save(4, state)
    whole = reknit.latest(tmp_path / "run")
    assert whole is not None
    partial = tmp_path / "run" / "step_00000005" / "model"
    partial.mkdir(parents=True)
    (partial / "00000.0123abcd.safetensors").write_bytes(b"the first bytes of a file")
    (tmp_path / "run" / "step_00000006").mkdir()
    assert reknit.latest(tmp_path / "run") == whole
    with reknit.Checkpointer(tmp_path / "run") as run:
        assert run.resume(state) == 5


def test_an_optimizer_that_was_not_saved_or_is_not_loaded_is_told(tmp_path: Path) -> None:
    model, optimizer = trained()
    reknit.save(tmp_path / "model", {"model": model})
    with pytest.raises(reknit.MismatchError, match="optimizer"):
        reknit.load(tmp_path / "model", {"model": model, "optimizer": optimizer})
    reknit.save(tmp_path / "both", {"model": model, "optimizer": optimizer})
    assert reknit.load(tmp_path / "both", {"model": model}).left == ("optimizer",)


def test_a_save_before_the_first_step_takes_no_step(tmp_path: Path) -> None:
    for wait in (True, False):
        folder = tmp_path / f"{wait}"
        folder.mkdir()
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        model(torch.ones(1, 3)).sum().backward()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        copies = [gradient.clone() for gradient in gradients]
        reknit.save(folder / "x", {"model": model, "optimizer": optimizer}, wait=wait).result(LIMIT_S)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), wait
        assert all(map(torch.equal, gradients, copies)), wait
        assert not optimizer.state, wait


def test_tensors_on_the_host_may_change_once_a_background_save_returns(tmp_path: Path) -> None:
    weight, array = torch.arange(1 << 20, dtype=torch.float32), np.arange(1 << 18)
    pending = reknit.save(tmp_path / "x", {"w": weight, "a": array}, wait=False)
    weight.fill_(-1)
    array.fill(-1)
    pending.result(LIMIT_S)
    reknit.load(tmp_path / "x", {"w": weight, "a": array})
    assert torch.equal(weight, torch.arange(1 << 20, dtype=torch.float32))
    assert (array == np.arange(1 << 18)).all()


def test_names_with_dots_and_slashes_do_not_collide_with_nested_ones(tmp_path: Path) -> None:
    def state(values: Iterator[float]) -> dict[str, Any]:
        def tensor() -> torch.Tensor:
            return torch.full((2,), float(next(values)))

        nested = {"a": {"b": tensor()}, "a.b": tensor(), "a/b": tensor(), "a//b": tensor(), "a%2Fb": tensor()}
        return {"m": nested, "m.a": {"b": tensor()}}

    saved, target = state(iter(range(6))), state(iter([-1.0] * 6))
    reknit.save(tmp_path / "x", saved)
    reknit.load(tmp_path / "x", target)
    flat = [*target["m"]["a"].values(), *list(target["m"].values())[1:], target["m.a"]["b"]]
    assert [tensor.tolist() for tensor in flat] == [[float(n)] * 2 for n in range(6)]


def test_no_plan_outlives_the_dtypes_and_shapes_that_it_was_made_for(tmp_path: Path) -> None:
    for wait in (True, False):
        folder = tmp_path / f"{wait}"
        folder.mkdir()
        for number, (shape, dtype) in enumerate(
            [((4, 6), torch.float32), ((4, 6), torch.float64), ((4, 6), torch.int32), ((6, 4), torch.int32)]
        ):
            saved = torch.arange(24).reshape(shape).to(dtype)
            reknit.save(folder / f"{number}", {"w": saved}, wait=wait).result(LIMIT_S)
            target = torch.zeros(shape, dtype=dtype)
            reknit.load(folder / f"{number}", {"w": target})
            assert torch.equal(target, saved), wait


def test_many_tensors_in_shared_memory_need_few_descriptors(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    state: dict[str, Any] = {f"w{n}": torch.full((3,), float(n)) for n in range(300)}
    for tensor in state.values():
        tensor.share_memory_()
    many = {"many": {f"w{n}": torch.full((3,), float(n)) for n in range(3000)}, "shared": state}
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 64, before[1]))
    try:
        reknit.save(tmp_path / "x", many, wait=False).result(LIMIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    target = {"many": {name: torch.zeros(3) for name in many["many"]}, "shared": dict(state)}
    reknit.load(tmp_path / "x", target)
    assert all(tensor[0] == n for n, tensor in enumerate(target["many"].values()))
