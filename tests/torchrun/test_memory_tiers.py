"""Hosts with memory of their own: saved there first, promoted to where all see it, loaded from both."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reknit
from reknit import Checkpointer, Tier
from reknit.policies import latest
from tests.ranks import run
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 60.0
FAST = "mem://run/latest"


def on_hosts(root: str) -> str:
    """Make each pair of ranks a host, with a name, and with memory that no other host sees."""
    host = dist.get_rank() // 2
    os.environ["REKNIT_HOST"] = f"host{host}"
    os.environ["REKNIT_MEMORY"] = f"{root}/memory{host}"
    return f"{root}/lasting"


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(4000 * 37, dtype=torch.float32).reshape(4000, 37) + step
    return {"model": {"w": distribute_tensor(whole, mesh, [Shard(0)])}}


def local(state: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
    part: torch.Tensor = state["model"]["w"].to_local()  # type: ignore[attr-defined]
    return part


def save_twice(root: str, wait: bool) -> None:
    lasting = on_hosts(root)
    for step in (1, 2):
        options = reknit.SaveOptions(promote_to=lasting, timeout_s=LIMIT_S)
        pending = reknit.save(FAST, state(step), step=step, wait=wait, overwrite=True, options=options)
        pending.result(LIMIT_S)
        pending.promoted(LIMIT_S)
    assert reknit.close(LIMIT_S)


def load(root: str) -> list[str]:
    lasting = on_hosts(root)
    target = {"model": {"w": torch.zeros_like(state(0)["model"]["w"])}}
    options = reknit.LoadOptions(replicas=(lasting,), timeout_s=LIMIT_S, share="never")
    report = reknit.load(FAST, target, options=options)
    assert report.step == 2
    assert torch.equal(local(target), local(state(2)))
    return list(report.restored)


@pytest.mark.parametrize("wait", [False, *[True] * is_night()])
def test_each_host_keeps_its_own_files_and_the_lasting_place_has_all(tmp_path: Path, wait: bool) -> None:
    run(4, save_twice, str(tmp_path), wait)
    lasting = {path.name for path in (tmp_path / "lasting").rglob("*") if path.is_file()}
    here = [
        {path.name for path in (tmp_path / f"memory{host}").rglob("*") if path.is_file()} for host in (0, 1)
    ]
    # The first checkpoint is gone, also from the memory that rank 0 does not see.
    assert here[0] | here[1] == lasting
    assert not here[0] & here[1]
    assert {name[:5] for name in here[1]} == {"00002", "00003"}
    assert "manifest.json" in here[0]
    assert reknit.verify(tmp_path / "lasting", "data").ok
    assert run(4, load, str(tmp_path)) == [["model/w"]] * 4
    # One host alone, where half of the files never were.
    assert run(2, load, str(tmp_path)) == [["model/w"]] * 2


def run_of(root: str) -> Checkpointer:
    tiers = [Tier("mem://run", keep=latest(1)), Tier(on_hosts(root), every=2)]
    return Checkpointer(tiers=tiers, options=reknit.SaveOptions(timeout_s=LIMIT_S))


def train(root: str) -> None:
    with run_of(root) as run:
        for step in range(1, 5):
            pending = run.save(step, state(step))
            assert pending is not None
            pending.wait_promoted(LIMIT_S)
            run.wait()
    assert reknit.close(LIMIT_S)


def go_on(root: str) -> int:
    target = {"model": {"w": torch.zeros_like(state(0)["model"]["w"])}}
    with run_of(root) as run:
        step = run.resume(target)
    assert torch.equal(local(target), local(state(4)))
    assert reknit.close(LIMIT_S)
    return step


def test_a_run_keeps_its_steps_in_the_memory_of_each_host(tmp_path: Path) -> None:
    run(4, train, str(tmp_path))
    for host in (0, 1):
        files = [path for path in (tmp_path / f"memory{host}").rglob("*") if path.is_file()]
        assert {path.parts[-3] for path in files if path.suffix == ".safetensors"} == {"step_00000004"}
    assert [each.step for each in reknit.steps(tmp_path / "lasting")] == [2, 4]
    assert run(4, go_on, str(tmp_path)) == [5] * 4
    shutil.rmtree(tmp_path / "memory1")
    assert run(4, go_on, str(tmp_path)) == [5] * 4
