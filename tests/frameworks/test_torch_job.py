from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from reknit.errors import CommError, DeadlineError, UsageError
from reknit.frameworks import torch_job
from tests.torchrun.harness import run


def test_a_process_alone_has_no_job() -> None:
    assert torch_job.current_job() is None


def meet() -> Any:
    job = torch_job.current_job()
    assert job is not None
    job.store.set(f"of {job.rank}", bytes([job.rank, 0, 255]))
    others = [job.store.get(f"of {rank}", 30.0) for rank in range(job.size)]
    job.store.set("again", b"first")
    again = torch_job.current_job()
    assert again is not None
    assert again.identity is job.identity
    with pytest.raises(DeadlineError, match=r"no rank put 'nothing' into torch's store within 0\.2 s"):
        job.store.get("nothing", 0.2)
    return job.rank, job.size, job.ranks, others


def test_ranks_meet_in_the_store_of_their_job() -> None:
    for rank, answer in enumerate(run(3, meet)):
        assert answer == (rank, 3, (0, 1, 2), [bytes([n, 0, 255]) for n in range(3)])


def meet_in_groups() -> Any:
    low, high, twin = (dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [2, 3]))
    rank = dist.get_rank()
    job = torch_job.subgroup_job(low if rank < 2 else high)
    if job.rank == 0:
        job.store.set("who", str(rank).encode())
    who = job.store.get("who", 30.0)
    with pytest.raises(UsageError, match="not in the process group"):
        torch_job.subgroup_job(high if rank < 2 else low)
    if rank >= 2:
        with pytest.raises(DeadlineError):
            torch_job.subgroup_job(twin).store.get("who", 0.2)
    return job.rank, job.size, job.ranks, who


def test_groups_meet_apart_from_each_other() -> None:
    assert run(4, meet_in_groups) == [
        (0, 2, (0, 1), b"0"),
        (1, 2, (0, 1), b"0"),
        (0, 2, (2, 3), b"2"),
        (1, 2, (2, 3), b"2"),
    ]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_every_kind_of_store_says_when_it_waited_too_long(kind: str, tmp_path: Any) -> None:
    torch_dist: Any = dist
    store = (
        torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if kind == "tcp"
        else torch_dist.FileStore(str(tmp_path / "store"), 1)
    )
    ours = torch_job.TorchStore(store, "a")
    ours.set("k", b"\x00v")
    assert ours.get("k", 1.0) == b"\x00v"
    with pytest.raises(DeadlineError):
        ours.get("other", 0.1)
    with pytest.raises(DeadlineError):
        torch_job.TorchStore(store, "b").get("k", 0.1)


class Gone:
    """A store whose host ended."""

    def set(self, *args: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    wait = get = set


def test_a_store_that_is_gone_is_said_to_be() -> None:
    store = torch_job.TorchStore.__new__(torch_job.TorchStore)
    store._store = Gone()
    with pytest.raises(CommError, match="cannot be reached for 'k'"):
        store.set("k", b"")
    with pytest.raises(CommError, match="Connection reset"):
        store.get("k", 1.0)
