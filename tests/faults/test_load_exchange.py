"""Ranks that read together, and one that fails, dies, hangs or is interrupted: real processes, a real disk.

No test here asserts a time, but the run of a test ends long before a rank gives up a wait for a missing rank.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from msgspec import structs

import reknit
from reknit.engine.sharing import shared_read
from reknit.engine.sharing.tracker import HostLink
from reknit.format.checksum import block_digests
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.storage.base import Reading
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultyStorage
from tests.faults.test_ranks import RUN_S, Answer, attempt, place
from tests.ranks import Died, run
from tests.running.examples import is_night, thinned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOAD = reknit.LoadOptions(threads=2, share="always", timeout_s=100)
BLOCK = 4 << 10
WORLD = 4
NUMEL = 40_000
HOSTS = {"one host": "aaaa", "two hosts": "aabb", "four hosts": "abcd"}
KILLED = [(1, 1), (2, 3), (3, 6), (0, 5)]
"""Ranks, and the reads in which they are killed."""
some_hosts = pytest.mark.parametrize("hosts", thinned([HOSTS["two hosts"], HOSTS["one host"]], 2))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save 320 kB of two tensors, and cut them into many small blocks."""
    path = tmp_path_factory.mktemp("exchange") / "x"
    reknit.save(path, {"model": {name: whole(name) for name in "ab"}})
    reblock(path)
    return str(path)


def whole(name: str) -> np.ndarray[Any, Any]:
    return np.arange(NUMEL, dtype=np.float32) + (NUMEL if name == "b" else 0)


def reblock(path: Path) -> None:
    """Give the checkpoint the smallest blocks that the format allows."""
    manifest = decode_manifest((path / "manifest.json").read_bytes())
    files = tuple(
        structs.replace(file, digests=tuple(block_digests((path / file.path).read_bytes(), BLOCK)))
        for file in manifest.files
    )
    (path / "manifest.json").write_bytes(
        encode_manifest(structs.replace(manifest, files=files, block_nbytes=BLOCK))
    )


# Functions that run in a rank.


class Cells(FaultyStorage):
    """A faulty store that is read in small pieces."""

    @property
    def reading(self) -> Reading:
        """The sizes of reads, with small cells."""
        return Reading(0, 0.0, 2 * BLOCK)


PLAN: list[Fault] = []
"""The faults of this process for paths that begin with ``cells://``."""
OPENED: list[Cells] = []


def become(hosts: str, stall: Callable[[], object] = os.getpid) -> int:
    """Set this rank's host, register its store with the faults of `PLAN`, and return the rank."""
    rank = dist.get_rank()
    os.environ["REKNIT_HOST"] = hosts[rank]
    vars(shared_read)["BUCKET_NBYTES"] = 2 * BLOCK

    def factory(url: str, durability: Any) -> Cells:
        inner = LocalStorage(url.removeprefix("cells://"), durability=durability)
        OPENED.append(Cells(inner, plan=list(PLAN), stall=stall))
        return OPENED[-1]

    register("cells", factory)
    return rank


def zeros() -> dict[str, Any]:
    return {"model": {name: np.full(NUMEL, -1, np.float32) for name in "ab"}}


def loaded(path: str, target: dict[str, Any] | None = None, options: reknit.LoadOptions = LOAD) -> int:
    """Load, check the values, and return the number of bytes that came from other ranks."""
    target = zeros() if target is None else target
    report = reknit.load(f"cells://{path}", target, options=options)
    for name, array in target["model"].items():
        assert np.array_equal(array, whole(name)), name
    return report.nbytes_received


def threads() -> list[str]:
    """Return the threads of loads, none of which may be left; the one that shows progress is joined first."""
    for thread in threading.enumerate():
        if thread.name == "reknit-progress":
            thread.join(30)
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("reknit-") and name != "reknit-comm"]


def descriptors() -> tuple[int, int]:
    """Return the number of open descriptors, and that of those to shared memory."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return len(found), sum("reknit-memory" in name for name in found)


# Storage that fails.


def fail_at_each_read(path: str, hosts: str, bad: int) -> tuple[list[Answer], list[str]]:
    rank = become(hosts)
    answers: list[Answer] = []
    while not answers or answers[-1]["type"] != "ok":
        PLAN[:] = [Fault("error", len(answers) + 1, "read_into")] if rank == bad else []
        answers.append(attempt(lambda: loaded(path)))
    return answers, threads()


@pytest.mark.parametrize(("hosts", "bad"), thinned(itertools.product(("aaaa", "aabb"), (1, 2)), 3))
def test_a_read_that_fails_on_one_rank_is_the_same_error_on_all_whichever_it_is(
    checkpoint: str, hosts: str, bad: int
) -> None:
    results = run(WORLD, fail_at_each_read, checkpoint, hosts, bad, timeout=RUN_S)
    each = [answers for answers, _ in results]
    assert [left for _, left in results] == [[]] * WORLD
    assert len({len(answers) for answers in each}) == 1
    assert len(each[0]) > 4, "the rank reads for others more than once"
    for reported in zip(*(answers[:-1] for answers in each), strict=True):
        assert len({place(answer) for answer in reported}) == 1, reported
        kind, message, rank, phase, path = place(reported[0])
        assert (kind, rank, phase) == ("StorageError", bad, "read")
        assert path.endswith(".safetensors")
        assert "injected" in message
        assert message.endswith("partly written")
        assert "left the exchange" not in message
        assert "also failed" not in message
    # The same ranks, tree and process group: after all these failures a load goes well.
    assert all(answers[-1]["answer"] > 0 for answers in each)


def load_damaged(path: str, hosts: str) -> tuple[Answer, list[list[int]]]:
    become(hosts)
    target = zeros()
    answer = attempt(lambda: loaded(path, target))
    # The elements that are neither as before nor as saved.
    return answer, [np.flatnonzero((a != -1) & (a != whole(n))).tolist() for n, a in target["model"].items()]


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_a_block_that_is_damaged_is_delivered_to_nobody_and_named_by_all(tmp_path: Path, hosts: str) -> None:
    path = tmp_path / "x"
    reknit.save(path, {"model": {name: whole(name) for name in "ab"}})
    reblock(path)
    (data,) = (path / "model").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    block = 17
    for at in range(block * BLOCK, (block + 1) * BLOCK):
        content[at] ^= 0x55
    data.write_bytes(bytes(content))
    results = run(WORLD, load_damaged, str(path), hosts, timeout=RUN_S)
    answers = [answer for answer, _ in results]
    assert len({place(answer) for answer in answers}) == 1, answers
    assert (answers[0]["type"], answers[0]["phase"]) == ("CorruptError", "verify")
    assert answers[0]["rank"] in range(WORLD)
    assert f"bytes {block * BLOCK}:{(block + 1) * BLOCK} of model/{data.name}" in answers[0]["message"]
    assert [wrong for _, wrong in results] == [[[], []]] * WORLD


# A rank that dies.


def die_reading(path: str, hosts: str, rank: int, at: int) -> Answer:
    if become(hosts) == rank:
        PLAN[:] = [Fault("kill", at, "read_into")]
    return attempt(lambda: loaded(path))


@pytest.mark.parametrize(
    ("rank", "at", "hosts"), thinned([(*moment, hosts) for moment in KILLED for hosts in ("aaaa", "aabb")], 3)
)
def test_a_rank_killed_while_it_reads_for_others_is_an_error_that_names_it(
    checkpoint: str, hosts: str, rank: int, at: int
) -> None:
    answers = run(WORLD, die_reading, checkpoint, hosts, rank, at, timeout=RUN_S, some_die=True)
    assert answers.pop(rank) == Died(-signal.SIGKILL)
    assert all(answer["comm"] for answer in answers), answers
    assert all(answer["rank"] == rank or f"rank {rank}" in answer["message"] for answer in answers), answers


def die_taking(path: str, hosts: str, rank: int) -> Answer:
    taken: list[int] = []

    def die(link: HostLink, source: int, number: int) -> None:
        taken.append(number)
        if len(taken) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        report_taken(link, source, number)

    report_taken = HostLink.taken
    with mock.patch.object(HostLink, "taken", die if become(hosts) == rank else report_taken):
        return attempt(lambda: loaded(path))


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_a_rank_killed_while_it_takes_from_others_is_an_error_that_names_it(
    checkpoint: str, hosts: str
) -> None:
    answers = run(WORLD, die_taking, checkpoint, hosts, 1, timeout=RUN_S, some_die=True)
    assert answers.pop(1) == Died(-signal.SIGKILL)
    assert all(answer["comm"] for answer in answers), answers
    assert all(answer["rank"] == 1 or "rank 1" in answer["message"] for answer in answers), answers


# A rank that hangs.


def stop_for_a_while(path: str, hosts: str) -> Answer:
    def stop() -> None:
        me = os.getpid()
        with subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {me}"]):
            os.kill(me, signal.SIGSTOP)

    if become(hosts, stop) == 2:
        PLAN[:] = [Fault("stall", 3, "read_into")]
    return attempt(lambda: loaded(path))


@some_hosts
def test_a_rank_that_is_stopped_for_a_while_is_waited_for(checkpoint: str, hosts: str) -> None:
    answers = run(WORLD, stop_for_a_while, checkpoint, hosts, timeout=RUN_S)
    assert [answer["type"] for answer in answers] == ["ok"] * WORLD, answers


def hang(path: str, hosts: str) -> tuple[Answer, bool, Answer]:
    released = threading.Event()
    if become(hosts, released.wait) == 2:
        PLAN[:] = [Fault("stall", 3, "read_into")]
    target = zeros()
    answer = attempt(lambda: loaded(path, target, replace(LOAD, timeout_s=5)))
    before = {name: array.copy() for name, array in target["model"].items()}
    released.set()
    while threads():
        time.sleep(0.01)
    untouched = all(np.array_equal(array, before[name]) for name, array in target["model"].items())
    PLAN.clear()
    return answer, untouched, attempt(lambda: loaded(path))


@some_hosts
def test_storage_that_hangs_on_one_rank_is_an_error_on_all_in_time_and_a_later_load_goes_well(
    checkpoint: str, hosts: str
) -> None:
    results = run(WORLD, hang, checkpoint, hosts, timeout=RUN_S)
    answers = [answer for answer, _, _ in results]
    assert len({place(answer) for answer in answers}) == 1, answers
    assert answers[0]["type"] == "DeadlineError"
    assert re.search(r"rank 2|\.safetensors", answers[0]["message"]), answers[0]
    assert "within 5 s" in answers[0]["message"] or "than 5 s" in answers[0]["message"]
    assert [untouched for _, untouched, _ in results] == [True] * WORLD
    assert [again["type"] for _, _, again in results] == ["ok"] * WORLD, results


# A rank that is interrupted.


def interrupt(path: str, hosts: str, at: int) -> tuple[Answer, list[str], Answer]:
    if become(hosts, lambda: os.kill(os.getpid(), signal.SIGINT)) == 1:
        PLAN[:] = [Fault("stall", at, "read_into")]
    answer = attempt(lambda: loaded(path))
    left = threads()
    PLAN.clear()
    return answer, left, attempt(lambda: loaded(path))


@pytest.mark.parametrize(("hosts", "at"), thinned(itertools.product(("aaaa", "aabb"), (1, 4)), 3))
def test_an_interrupt_ends_the_load_on_all_ranks_and_leaves_no_thread(
    checkpoint: str, hosts: str, at: int
) -> None:
    results = run(WORLD, interrupt, checkpoint, hosts, at, timeout=RUN_S)
    assert results[1][0]["type"] == "KeyboardInterrupt"
    others = [answer for rank, (answer, _, _) in enumerate(results) if rank != 1]
    assert len({place(answer) for answer in others}) == 1
    assert (others[0]["type"], others[0]["rank"]) == ("ReknitError", 1)
    assert "KeyboardInterrupt" in others[0]["message"]
    assert [left for _, left, _ in results] == [[]] * WORLD
    assert [again["type"] for _, _, again in results] == ["ok"] * WORLD, results


# Many loads.


def load_often(path: str, hosts: str) -> Any:
    rank = become(hosts, lambda: os.kill(os.getpid(), signal.SIGINT))
    counts = []
    outcomes = []
    for number in range(32):
        PLAN.clear()
        if number % 4 == 1 and rank == number % 3:
            PLAN[:] = [Fault("error", number % 5 + 1, "read_into")]
        if number % 4 == 3 and rank == number % 3:
            PLAN[:] = [Fault("stall", number % 5 + 1, "read_into")]
        outcomes.append(attempt(lambda: loaded(path))["type"])
        if number in (7, 31):
            OPENED.clear()
            gc.collect()
            # The process group connects when it is first used, and again when a rank ends.
            dist.barrier()
            counts.append((threads(), *descriptors()))
            dist.barrier()
    return counts, outcomes


@pytest.mark.parametrize("hosts", ["aabb", *["aaaa", "abcd"] * is_night()])
def test_thirty_loads_that_go_well_or_fail_leave_nothing_behind(checkpoint: str, hosts: str) -> None:
    for (early, late), outcomes in run(WORLD, load_often, checkpoint, hosts, timeout=RUN_S):
        assert late[0] == []
        assert late[1] <= early[1]
        assert late[2] == 0
        assert outcomes[::2] == ["ok"] * 16
        assert outcomes[1::4] == ["StorageError"] * 8
        assert set(outcomes[3::4]) <= {"KeyboardInterrupt", "ReknitError"}
