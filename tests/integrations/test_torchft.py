"""torchft: a replica that comes back gets the state of a healthy one through a checkpoint of reknit."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import UsageError
from tests import ranks
from tests.integrations.random_death import death
from tests.optional import needs

pytestmark = needs("torchft", "torchft")

run = partial(ranks.run, warm="torchft")

PATIENCE = timedelta(seconds=20)
STEPS = 30
OPTIONS = reknit.SaveOptions(durability="process", threads=2, timeout_s=60)


def transport(root: str) -> Any:
    from reknit.integrations.torchft import ReknitTransport

    return ReknitTransport(root, options=OPTIONS)


def waited(path: Path) -> str:
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def written(path: Path, text: str) -> None:
    (part := path.with_suffix(".part")).write_text(text)
    part.rename(path)


def replica(root: Path, number: int, seed: int | None) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Train as one replica; return its steps, and its weights in the end."""
    import torchft

    rank = int(os.environ["RANK"])
    torch.manual_seed(number + os.getpid())  # only the recovery makes replicas equal
    model = torch.nn.Linear(6, 3)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=PATIENCE,
        use_async_quorum=False,
        replica_id=f"replica_{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=waited(root / "lighthouse"),
        hostname="127.0.0.1",
        checkpoint_transport=transport(str(root / "states")),
    )
    written(root / f"ready-{rank}", "")
    for other in {1, 2} - {rank} if rank < 3 else ():  # none may be done, or die, before the other has begun
        waited(root / f"ready-{other}")
    optimizer = torchft.Optimizer(manager, inner)
    reached = (lambda _: None) if seed is None else death(seed, 4, 8)
    steps = []
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        inputs = torch.ones(2, 6) * (manager.current_step() % 5)
        model(inputs).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        steps.append(manager.current_step())
        reached(len(steps))
        if rank == 1 and manager.current_step() == STEPS // 3:
            waited(root / "ready-3")
        time.sleep(0.05)
    manager.shutdown(wait=False)
    return steps, {name: value.clone() for name, value in model.state_dict().items()}


def lives(folder: str, seed: int) -> Any:
    """Be the lighthouse, a healthy replica, one that dies, or the one that comes after it."""
    from torchft.coordination import LighthouseServer

    root, rank = Path(folder), int(os.environ["RANK"])
    if rank == 0:
        lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, heartbeat_timeout_ms=1000
        )
        port = lighthouse.address().rpartition(":")[2]
        written(root / "lighthouse", f"http://127.0.0.1:{port}")
        for number in range(2):
            waited(root / f"done-{number}")
        lighthouse.shutdown()
        return None
    if rank == 2:
        written(root / "dies", str(os.getpid()))
    if rank == 3:
        pid = int(waited(root / "dies"))
        while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.05)
    number = 0 if rank == 1 else 1
    result = replica(root, number, seed if rank == 2 else None)
    written(root / f"done-{number}", "")
    return result


def test_a_replica_that_died_comes_back_with_the_state_of_the_other(tmp_path: Path) -> None:
    _, healthy, died, back = run(4, lives, str(tmp_path), 5, some_die=True, joined=False, timeout=90)
    assert died == ranks.Died(-signal.SIGKILL)
    steps, weights = back
    assert steps[0] > 4  # not from the beginning
    assert steps[-1] == STEPS == healthy[0][-1]
    assert all(torch.equal(weights[name], healthy[1][name]) for name in weights)
    folders = [folder for folder in (tmp_path / "states").iterdir() if reknit.latest(folder) is not None]
    assert folders


def test_a_state_of_any_form_arrives_as_it_was_sent(tmp_path: Path) -> None:
    sender, receiver = transport(str(tmp_path)), transport(str(tmp_path))
    state: dict[str, Any] = {
        "user": {"m": {"w": torch.arange(6.0).view(2, 3)}, "o": {"state": {0: {"step": torch.tensor(3.0)}}}},
        "torchft": {"step": 5, "betas": (0.9, 0.99)},
    }
    sender.send_checkpoint([1], 5, state, PATIENCE)
    state["user"]["m"]["w"].zero_()
    found = receiver.recv_checkpoint(0, sender.metadata(), 5, PATIENCE)
    assert torch.equal(found["user"]["m"].pop("w"), torch.arange(6.0).view(2, 3))
    assert found["user"]["o"] == {"state": {0: {"step": torch.tensor(3.0)}}}
    assert found["torchft"] == {"step": 5, "betas": (0.9, 0.99)}
    with pytest.raises(reknit.CheckpointNotFoundError):
        receiver.recv_checkpoint(0, sender.metadata(), 6, timedelta(seconds=0.1))
    sender.shutdown()
    receiver.shutdown()


def _sends_a_dtensor(root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    tensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)))
    with pytest.raises(UsageError, match="has a DTensor"):
        transport(root).send_checkpoint([1], 1, {"w": tensor}, PATIENCE)


def test_a_state_with_a_dtensor_is_refused(tmp_path: Path) -> None:
    run(1, _sends_a_dtensor, str(tmp_path))


def test_a_state_with_a_part_of_a_larger_tensor_is_refused(tmp_path: Path) -> None:
    part: Any = torch.zeros(1, 4)
    part.global_shape, part.global_offsets = (2, 4), ((0, 0),)
    part.local_offsets, part.local_sizes = ((0, 0),), ((1, 4),)
    with pytest.raises(UsageError, match="has a part of a larger tensor"):
        transport(str(tmp_path)).send_checkpoint([1], 1, {"w": part}, PATIENCE)
