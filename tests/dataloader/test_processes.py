"""Worker processes: real ones, that read ahead while they are saved, crash, and are dealt out anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.dataloader import TokenSet
from reknit.dataloader.token_sets import Prepare
from reknit.errors import ReknitError, ShortageError, UsageError
from reknit.processes.channel import Channel, Message
from reknit.types.shard import Encoded
from tests import ranks
from tests.dataloader.corpora import equal, failing, loader, token_set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.dataloader import TokenLoader

SETS = [token_set("web", 150, 8, 3.0), token_set("code", 60, 4)]


@pytest.fixture
def started() -> Iterator[list[TokenLoader]]:
    loaders: list[TokenLoader] = []
    yield loaders
    for one in loaders:
        one.close()


def real(started: list[TokenLoader], num_workers: int = 2, **more: Any) -> TokenLoader:
    """Return a loader with worker processes."""
    started.append(loader(SETS, num_workers=num_workers, **{"in_process": False, **more}))
    return started[-1]


def pids(one: TokenLoader) -> list[int]:
    return one.worker_pids


def test_batches_stay_the_same_through_three_restarts(started: list[TokenLoader], tmp_path: Path) -> None:
    whole = list(loader(SETS, num_workers=2))
    found = []
    for k in range(4):
        one = real(started, save_every=12)
        if k:
            reknit.load(tmp_path / str(k - 1), {"loader": one})
        found += list(islice(one, 12))
        reknit.save(tmp_path / str(k), {"loader": one}, wait=k % 2 == 0).result()
        next(one)  # made and taken after the save, and gone with the restart
        one.close()
    assert equal(found, whole[:48])


def test_a_planned_state_is_not_asked_for_once_more(
    started: list[TokenLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = real(started, save_every=4)
    list(islice(one, 4))
    asked: list[int] = []
    send = Channel.send

    def noted(channel: Channel, message: Message, fd: int | None = None) -> None:
        if isinstance(message, Prepare):
            asked.append(message.given)
        send(channel, message, fd)

    monkeypatch.setattr(Channel, "send", noted)
    shards = one.sharded_state()
    assert all(isinstance(shard.value, Encoded) for shard in shards)
    assert asked == []


def test_a_state_that_was_planned_for_another_batch_is_not_taken(started: list[TokenLoader]) -> None:
    one = real(started, save_every=4)
    list(islice(one, 6))
    reknit.save("process://loaders/a", {"l": one}, wait=False).result()  # its agent is a thread
    rest = list(one)
    other = real(started)
    reknit.load("process://loaders/a", {"l": other})
    assert equal(list(other), rest)
    assert equal(rest, list(loader(SETS, num_workers=2))[6:])


def test_what_goes_wrong_while_reading_is_raised_by_the_loader(started: list[TokenLoader]) -> None:
    broken = [TokenSet(name="web", open=failing, arguments={"num_samples": 30}, num_partitions=2)]
    one = loader(broken, num_workers=1, in_process=False)
    started.append(one)
    with pytest.raises(ReknitError, match="OSError: this sample is damaged"):
        list(one)


def test_a_worker_that_is_killed_is_told_and_not_waited_for(started: list[TokenLoader]) -> None:
    one = real(started)
    next(one)
    os.kill(pids(one)[1], signal.SIGKILL)
    with pytest.raises(ReknitError, match="ended with status -9"):
        list(one)


def test_a_loader_whose_second_worker_cannot_start_has_none_and_loses_no_sample(
    started: list[TokenLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, popen = real(started), subprocess.Popen
    begun: list[Any] = []

    def scarce(*args: Any, **more: Any) -> Any:
        if begun:
            raise BlockingIOError(11, os.strerror(11))
        begun.append(popen(*args, **more))
        return begun[0]

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", scarce)
        with pytest.raises(ShortageError):
            next(one)
    assert begun[0].poll() is not None
    assert equal(list(one), list(loader(SETS, num_workers=2)))


def test_workers_end_with_their_loader() -> None:
    one = loader(SETS, num_workers=2, in_process=False)
    next(one)
    running = pids(one)
    assert len(running) == 2
    del one
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)


def test_workers_end_when_the_trainer_is_killed() -> None:
    code = (
        "from tests.dataloader.test_processes import *\n"
        "one = loader(SETS, num_workers=2, in_process=False)\nnext(one)\n"
        "print(*pids(one), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    running = [int(pid) for pid in ended.stdout.split()]
    assert len(running) == 2
    deadline = time.monotonic() + 30
    while any(_alive(pid) for pid in running):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return b"reknit.dataloader.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_worker_that_gives_nothing_is_waited_for_only_so_long(started: list[TokenLoader]) -> None:
    one = real(started, 1, timeout_s=0.5)
    os.kill(pids(one)[0], signal.SIGSTOP)
    try:
        with pytest.raises(ReknitError, match=r"gave nothing for 0\.5 s"):
            list(one)
    finally:
        os.kill(pids(one)[0], signal.SIGCONT)


def test_what_a_worker_cannot_import_is_refused_with_a_way_out() -> None:
    local = TokenSet(name="web", open=lambda: [[1, 2]], num_partitions=1)
    assert [b.num_tokens for b in loader([local], num_workers=2)] == [2]
    with pytest.raises(UsageError, match="top-level function"):
        list(loader([local], num_workers=1, in_process=False))


def with_closed_streams() -> None:
    for fd in (0, 1, 2):
        os.close(fd)
    one = loader(SETS, num_workers=1, in_process=False)
    next(iter(one))
    assert {os.readlink(f"/proc/{pids(one)[0]}/fd/{fd}") for fd in (0, 1, 2)} == {"/dev/null"}
    one.close()


def test_a_loader_of_a_process_with_closed_standard_streams_has_workers() -> None:
    ranks.run(1, with_closed_streams, joined=False)
