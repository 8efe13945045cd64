"""What carries bytes between hosts when the process group of the training is that of a device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.engine.sharing import fetch_tracker
from reknit.testing.accelerator import Accelerator, installed
from reknit.types import devices
from tests.devices import run_simulated
from tests.faults.test_load_exchange import BLOCK, NUMEL, become, reblock, whole
from tests.faults.test_ranks import Answer, attempt
from tests.ranks import run

if TYPE_CHECKING:
    import logging
    from pathlib import Path

NBYTES = 4 * NUMEL
each_kind = pytest.mark.parametrize("device_type", ["cuda", "sim"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save 160 kB, in blocks of 4 kB: ranks on two hosts read it in many exchanges."""
    folder = tmp_path_factory.mktemp("carrier") / "x"
    reknit.save(folder, {"model": {"a": whole("a")}})
    reblock(folder)
    return str(folder)


# What runs in a rank.


def joined(backend: str, hosts: str, bound: bool = False) -> tuple[Accelerator, int, torch.device]:
    """Join the job, on this rank's host; return the simulated device, the rank and its device."""
    accelerator = installed()
    assert accelerator is not None
    device = torch.device(accelerator.type, int(os.environ["RANK"]))
    if not bound:
        torch.get_device_module(device.type).set_device(device.index)
    dist.init_process_group(backend.format(device.type), device_id=device if bound else None)
    return accelerator, become(hosts), device


def load(path: str, target: torch.Tensor, **options: Any) -> reknit.LoadReport:
    how = reknit.LoadOptions(**{"share": "always", "threads": 2, "timeout_s": 60, **options})
    return reknit.load(f"cells://{path}", {"model": {"a": target}}, options=how)


def is_right(target: torch.Tensor) -> bool:
    return bool((target.cpu().numpy() == whole("a")).all())


# Which device.


def load_on_device(path: str, backend: str, hosts: str, bound: bool, share: str) -> Any:
    accelerator, _, device = joined(backend, hosts, bound)
    target = torch.zeros(NUMEL, device=device)
    report = load(path, target, share=share)
    return is_right(target), report.nbytes_received, accelerator.contexts()


@each_kind
@pytest.mark.parametrize("bound", [False, True], ids=["current", "bound"])
def test_hosts_exchange_through_the_group_of_a_device_and_each_rank_uses_its_own(
    path: str, device_type: str, bound: bool
) -> None:
    call = load_on_device, path, "{}:simccl", "ab", bound, "always"
    for rank, (right, received, used) in enumerate(
        run_simulated(2, *call, device_type=device_type, joined=False)
    ):
        assert right
        assert abs(received - NBYTES // 2) < 3 * BLOCK
        assert used == [rank]


def load_on_host(path: str, hosts: str) -> Any:
    accelerator, _, _ = joined("{}:simccl", hosts)
    target, used = torch.zeros(NUMEL), accelerator.contexts()
    report = load(path, target)
    return is_right(target), report.nbytes_received > 0, accelerator.contexts() == used


@each_kind
def test_ranks_of_one_host_share_without_a_device(path: str, device_type: str) -> None:
    answers = run_simulated(2, load_on_host, path, "aa", device_type=device_type, joined=False)
    assert answers == [(True, True, True)] * 2
