from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from reknit.comm.meeting.hosts import gather_shape
from reknit.errors import CommError, DeadlineError, UsageError
from reknit.frameworks.torch import torch_job
from reknit.options import CommOptions
from tests.ranks import run

if TYPE_CHECKING:
    from reknit.comm.meeting.rendezvous import Shape


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


class Gone:
    """A store whose host ended."""

    def set(self, *args: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    check = get = set


def test_a_store_that_is_gone_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: store)
    store = torch_job.TorchStore(Gone(), "a")
    with pytest.raises(CommError, match="cannot be reached for 'k'"):
        store.set("k", b"")
    for ask in (lambda: store.get("k", 1.0), lambda: store.get_many(["k"], 1.0)):
        with pytest.raises(CommError, match="Connection reset") as caught:
            ask()
        assert not isinstance(caught.value, DeadlineError)


def tcp_store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_every_kind_of_store_gives_many_values_in_order_and_says_when_it_waited_too_long(
    kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_job, "_BATCH", 7)
    torch_dist: Any = dist
    makers: dict[str, Any] = {
        "tcp": tcp_store,
        "hash": torch_dist.HashStore,
        "file": lambda: torch_dist.FileStore(str(tmp_path / "store"), 1),
    }
    inner = makers[kind]()
    store = torch_job.TorchStore(inner, "a")
    keys = [f"k{number}" for number in range(20)]
    for number, key in enumerate(keys[1:], start=1):
        store.set(key, bytes([number]))
    capfd.readouterr()
    with pytest.raises(DeadlineError, match="no rank put all of 7 keys like 'k0' into torch's store"):
        store.get_many(keys, 0.05)
    with pytest.raises(DeadlineError):
        torch_job.TorchStore(inner, "b").get("k1", 0.1)
    assert capfd.readouterr() == ("", ""), "waiting in vain writes nothing"
    threading.Timer(0.1, store.set, ("k0", b"\x00")).start()
    assert store.get_many(keys, 20) == [bytes([number]) for number in range(20)]
    assert store.get("k19", 1.0) == b"\x13"
    assert store.get_many([], 0) == []


def test_a_store_says_on_which_host_its_values_are_and_a_process_alone_has_none(tmp_path: Any) -> None:
    torch_dist: Any = dist
    assert torch_job.TorchStore(torch_dist.PrefixStore("b", tcp_store()), "a").master == "127.0.0.1"
    assert torch_job.TorchStore(torch_dist.FileStore(str(tmp_path / "store"), 1), "a").master is None
    assert torch_job.current_job() is None


def test_a_store_that_outlives_a_job_does_not_mislead_the_next() -> None:
    server = tcp_store()
    runs = set()
    for lateness_s in (0.0, 0.4):

        def gather(rank: int, late_s: float = lateness_s) -> Shape:
            time.sleep(late_s if rank == 0 else 0)
            own = dist.TCPStore("127.0.0.1", server.port, is_master=False)  # type: ignore[attr-defined]
            store = torch_job.TorchStore(own, "reknit")
            return gather_shape(store, rank, 3, job="job", options=CommOptions(), timeout_s=20)

        with ThreadPoolExecutor(3) as pool:
            shapes = list(pool.map(gather, range(3)))
        assert len({shape.run for shape in shapes}) == 1
        assert shapes[2].topology.hosts == [0, 0, 0]
        runs.add(shapes[0].run)
    assert len(runs) == 2
