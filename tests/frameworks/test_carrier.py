"""Bytes between hosts when the process group of the training is that of a device."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.engine.sharing import shared_read, tracker
from reknit.types import devices
from tests.accelerator import Accelerator, installed
from tests.devices import run_simulated
from tests.faults.test_load_exchange import BLOCK, NUMEL, become, reblock, whole
from tests.faults.test_ranks import Answer, attempt
from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Iterator

NBYTES = 4 * NUMEL


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save 160 kB, in blocks of 4 kB: ranks on two hosts read it in many exchanges."""
    folder = tmp_path_factory.mktemp("carrier") / "x"
    reknit.save(folder, {"model": {"a": whole("a")}})
    reblock(folder)
    return str(folder)


# Functions that run in a rank.


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


def load_shared(path: str, hosts: str, bound: bool) -> Any:
    accelerator, _, _ = joined("{}:simccl", hosts, bound)
    target, used = torch.zeros(NUMEL), accelerator.contexts()
    report = load(path, target)
    return is_right(target), report.nbytes_received, accelerator.contexts(), accelerator.contexts() == used


@pytest.mark.parametrize(("device_type", "bound"), [("cuda", False), ("sim", True)])
def test_hosts_exchange_through_the_group_of_a_device_and_each_rank_uses_its_own(
    path: str, device_type: str, bound: bool
) -> None:
    answers = run_simulated(2, load_shared, path, "ab", bound, device_type=device_type, joined=False)
    for rank, (right, received, used, _) in enumerate(answers):
        assert right
        assert abs(received - NBYTES // 2) < 3 * BLOCK
        assert used == [rank]


def test_ranks_of_one_host_share_without_a_device(path: str) -> None:
    for right, received, _, unused in run_simulated(2, load_shared, path, "aa", False, joined=False):
        assert right
        assert received
        assert unused


# Faults on the way.


def load_badly(path: str, hosts: str, fault: str) -> tuple[Answer, bool, Answer]:
    """Load with a fault on rank 1, and once more without one."""
    accelerator, rank, _ = joined("{}:simccl", hosts)
    target = torch.full((NUMEL,), -1.0)
    reload(path, torch.zeros(NUMEL))  # the ranks have met then, and have imported all that they need
    with FAULTS[fault](accelerator, rank):
        answer = attempt(lambda: load(path, target, timeout_s=5 if fault == "hangs" else 60))
    untouched = bool((target == -1).all())
    wrong = (target != -1) & (target != torch.from_numpy(whole("a")))
    assert not wrong.any(), "a delivered value is the saved one"
    return answer, untouched, attempt(lambda: is_right(target) if fault == "hangs" else reload(path, target))


def reload(path: str, target: torch.Tensor) -> bool:
    load(path, target)
    return is_right(target)


@contextmanager
def out_of_memory(accelerator: Accelerator, rank: int) -> Iterator[None]:
    """Let the device of a rank run out of memory in the exchange."""
    accelerator.refuse_memory(0 if rank == 1 else None)
    yield
    accelerator.refuse_memory(None)


@contextmanager
def silent(accelerator: Accelerator, rank: int) -> Iterator[None]:
    """Lose the sent bytes, as an operation that has failed and looks done."""
    real = dist.all_to_all_single

    def lost(received: torch.Tensor, sent: torch.Tensor, *args: Any, **more: Any) -> Any:
        return real(received if rank == 0 else received.clone(), sent, *args, **more)

    with mock.patch.object(dist, "all_to_all_single", lost):
        yield


@contextmanager
def hung(accelerator: Accelerator, rank: int) -> Iterator[None]:
    """Let a device never run the work that is queued on its streams."""
    device = torch.device(accelerator.type, rank)
    with mock.patch.object(tracker, "_GRACE_S", 0.5), ExitStack() as last:
        for stream in (devices.side_stream(device), devices.current_stream(device)) if rank == 1 else ():
            last.enter_context(accelerator.held(stream))
        yield


FAULTS: dict[str, Any] = {"no memory": out_of_memory, "silent": silent, "hangs": hung}


def test_a_rank_without_memory_on_its_device_is_an_error_on_all_before_anything_changes(path: str) -> None:
    answers = run_simulated(2, load_badly, path, "ab", "no memory", device_type="sim", joined=False)
    for answer, untouched, again in answers:
        assert (answer["type"], answer["rank"]) == ("ShortageError", 1)
        assert "sim:1 has no " in answer["message"]
        assert untouched
        assert again == {"type": "ok", "answer": True}


def test_bytes_that_a_device_lost_are_an_error_that_names_file_and_rank(path: str) -> None:
    for answer, _, again in run_simulated(2, load_badly, path, "ab", "silent", joined=False):
        assert (answer["type"], answer["rank"]) == ("CommError", 1)
        assert ".safetensors came from rank 0 by simccl on " in answer["message"]
        assert again == {"type": "ok", "answer": True}


def test_a_device_that_does_nothing_ends_the_load_in_time_on_all(path: str) -> None:
    for answer, *_ in run_simulated(2, load_badly, path, "ab", "hangs", joined=False):
        assert answer["type"] == "DeadlineError"
        assert "exchange 1 of " in answer["message"]
        assert "with other hosts by simccl on cuda:" in answer["message"]


# Groups of other kinds.


def load_without_a_backend(path: str) -> Any:
    def made(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("odd", made, devices=["xpu"])
    dist.init_process_group("xpu:odd")
    become("ab")
    target, said = torch.zeros(NUMEL), []
    with mock.patch.object(shared_read.logger, "warning", lambda text, *values: said.append(text % values)):
        report = load(path, target)
    return is_right(target), report.nbytes_received, said


def test_hosts_whose_group_has_no_usable_backend_read_by_themselves_and_the_log_says_so(path: str) -> None:
    answers = run(2, load_without_a_backend, path, joined=False)
    said = (
        "ranks of different hosts do not share their reads, and each host reads all bytes: the process group "
        "has no backend for a device that is there"
    )
    assert answers == [(True, 0, [said]), (True, 0, [])]
