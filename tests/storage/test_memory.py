"""The memory of a host as a store: all processes of one user see it, and it outlives them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import StorageError, StorageFullError, StoragePermissionError, UsageError
from reknit.options import MIB
from reknit.storage.local import memory
from reknit.storage.local.memory import MemoryStorage
from reknit.storage.registry import open_storage
from reknit.testing.storage_suite import listed, read, write
from tests.faults.nursery import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 60.0


def new_url() -> str:
    return f"mem://test-{uuid.uuid4().hex[:12]}"


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start another process that runs `code`."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    reported, _ = process.communicate(timeout=LIMIT_S)
    return reported


def test_the_name_is_the_identity() -> None:
    one, other = new_url(), new_url()
    write(open_storage(one), "a/x", b"1")
    assert listed(open_storage(one).sub("a")) == {"x": 1}
    assert listed(open_storage(other)) == {}
    assert open_storage(one).url == one
    assert open_storage(f"{one}/").sub("a").sub("b").url == f"{one}/a/b"


def test_durability_makes_no_difference_as_memory_needs_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def synced(fd: int) -> None:
        raise AssertionError("memory was synced")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "fdatasync", synced)
    url = new_url()
    reknit.save(f"{url}/x", {"w": np.arange(5)}, options=reknit.SaveOptions(durability="power"))
    assert reknit.verify(f"{url}/x", "data").ok


def test_a_name_is_one_plain_word() -> None:
    for name in ("", "a/b", "..", "a\0", ".a.tmp"):
        with pytest.raises((StorageError, UsageError)):
            MemoryStorage(name)


def test_holes_cost_nothing() -> None:
    assert MemoryStorage("x").reading.gap_nbytes == 0
    assert MemoryStorage("x").sub("y").reading.waste == 0.0


def test_what_one_process_writes_another_reads_after_its_end() -> None:
    code = """
import sys, numpy as np, reknit
reknit.save(sys.argv[1] + "/step", {"m": {"w": np.arange(1000)}}, step=3)
"""
    url = new_url()
    assert output(python(code, url)) == ""
    target = {"w": np.zeros(1000, np.int64)}
    assert reknit.load(f"{url}/step", {"m": target}).step == 3
    assert (target["w"] == np.arange(1000)).all()


KILLED = """
import os, signal, sys
import numpy as np
import reknit
state = {"m": {f"w{k}": np.full(16 << 20, k, np.uint8) for k in range(8)}}
reknit.save(f"{sys.argv[1]}/1", state, step=1, wait=False).result()
for tensor in state["m"].values():
    tensor += 1
reknit.save(f"{sys.argv[1]}/2", state, step=2, wait=False).staged()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_that_is_killed_after_staging_leaves_a_checkpoint_that_others_load() -> None:
    url = new_url()
    trainer = python(KILLED, url)
    output(trainer)
    assert trainer.returncode == -9

    def committed() -> bool:
        try:
            return reknit.open(f"{url}/2").step == 2
        except reknit.CheckpointNotFoundError:
            return False

    wait_until(committed, LIMIT_S)
    for step in (1, 2):
        target = {f"w{k}": np.zeros(16 << 20, np.uint8) for k in range(8)}
        reknit.load(f"{url}/{step}", {"m": target})
        assert all((tensor == k + step - 1).all() for k, tensor in enumerate(target.values()))
    shutil.rmtree(MemoryStorage(url.removeprefix("mem://")).folder)


RACING = """
import sys
from reknit.errors import StorageNotFoundError
from reknit.storage.registry import open_storage

storage, me, other = open_storage(sys.argv[1]), sys.argv[2], sys.argv[3]

def is_ready(path):
    try:
        return storage.size(path) == 0
    except StorageNotFoundError:
        return False

for k in range(50):
    pending = f"{k}/pending-{me}"
    storage.put(pending, b"", if_absent=True)
    storage.put(f"ready/{me}-{k}", b"", if_absent=True)
    while not is_ready(f"ready/{other}-{k}"):
        pass
    print(int(storage.commit(f"{k}/manifest", me.encode(), pending=pending, if_absent=True)), end="")
"""


def test_of_two_processes_that_commit_one_checkpoint_one_wins() -> None:
    url = new_url()
    racers = [python(RACING, url, "a", "b"), python(RACING, url, "b", "a")]
    one, other = (output(racer) for racer in racers)
    assert len(one) == len(other) == 50
    storage = open_storage(url)
    for k, (first, second) in enumerate(zip(one, other, strict=True)):
        assert {first, second} == {"0", "1"}
        assert storage.get(f"{k}/manifest", limit=1) == (b"a" if first == "1" else b"b")


def test_of_two_processes_that_save_one_step_one_wins() -> None:
    code = """
import sys, numpy as np, reknit
try:
    reknit.save(sys.argv[1], {"m": {"w": np.full(1 << 20, int(sys.argv[2]))}})
    print("won")
except (reknit.errors.CommitError, reknit.CheckpointExistsError, reknit.StorageError) as error:
    print(type(error).__name__)
"""
    url = new_url()
    reported = [output(process).strip() for process in [python(code, url, str(k)) for k in range(2)]]
    assert reported.count("won") <= 1  # each may have replaced the other, and then neither exists
    if "won" in reported:
        target = np.zeros(1 << 20, int)
        reknit.load(url, {"m": {"w": target}})
        assert (target == reported.index("won")).all()


# Room


@pytest.fixture
def small_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put stores into a memory of 8 MiB."""
    target = tmp_path / "shm"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "reknit-test", str(target)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system takes root: {error}")
    monkeypatch.setenv("REKNIT_MEMORY", str(target))
    yield target
    subprocess.run(["umount", str(target)], check=True)


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_save_that_does_not_fit_into_memory_says_so_and_leaves_nothing(small_memory: Path) -> None:
    def state(nbytes: int) -> dict[str, Any]:
        return {"m": {"w": np.ones(nbytes, np.uint8)}}

    reknit.save("mem://full/1", state(3 * MIB))
    before = files_below(small_memory)
    for wait in (True, False):
        with pytest.raises(StorageFullError, match="/shm/full/2") as caught:
            reknit.save("mem://full/2", state(9 * MIB), wait=wait).result(LIMIT_S)
        assert "this is host memory: remove old checkpoints from it" in str(caught.value.remedy)
        assert files_below(small_memory) == before
    assert reknit.close(LIMIT_S)  # agents keep the environment of their start
    assert reknit.verify("mem://full/1", "data").ok
    shutil.rmtree(MemoryStorage("full").folder)
    reknit.save("mem://full/2", state(7 * MIB))


def test_what_the_host_has_no_memory_for_is_refused_before_the_kernel_has_to_end_somebody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_nbytes", lambda: MIB)
    storage = open_storage(new_url())
    with pytest.raises(StorageFullError, match="1,048,576 are available") as caught:
        storage.create("x", MIB + 1)
    assert caught.value.path == f"{MemoryStorage(storage.url.removeprefix('mem://')).folder}/x"
    assert listed(storage) == {}
    write(storage, "x", bytes(MIB))
    assert read(storage, "x", 0, MIB) == bytes(MIB)


# Whose


def mode(folder: Path) -> int:
    return stat.S_IMODE(os.lstat(folder).st_mode)


def test_without_the_variable_each_user_has_a_folder_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REKNIT_MEMORY")
    monkeypatch.setattr(memory, "_SHARED", str(tmp_path))
    mine = tmp_path / f"reknit-{os.geteuid()}"
    before = os.umask(0)
    try:
        assert MemoryStorage("run").folder == str(mine / "run")
        assert mode(mine) == 0o700
        shutil.rmtree(mine)  # a cleaner, while the store is in use
        write(MemoryStorage("run"), "x", b"1")
    finally:
        os.umask(before)
    assert mode(mine) == 0o700


def test_a_folder_that_is_removed_under_a_store_is_made_anew_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKNIT_MEMORY", str(tmp_path / "memory"))
    storage = MemoryStorage("run")
    write(storage, "x", b"1")
    shutil.rmtree(tmp_path / "memory")
    storage.put("y", b"2", if_absent=True)
    assert listed(storage) == {"y": 1}
    assert mode(tmp_path / "memory") == 0o700


def test_a_system_without_shared_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REKNIT_MEMORY")
    monkeypatch.setattr(memory, "_SHARED", "/nothing/here")
    with pytest.raises(UsageError, match="set REKNIT_MEMORY"):
        open_storage("mem://x")


def link(place: Path) -> None:
    (place.parent / "target").mkdir()
    place.symlink_to(place.parent / "target")


def of_another_user(place: Path) -> None:
    place.mkdir(0o700)
    try:
        os.chown(place, 65534, -1)
    except PermissionError:
        pytest.skip("only root can make a folder of somebody else")


def open_to_others(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)


def test_a_folder_that_others_may_have_had_their_hands_in_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes: list[Callable[[Path], object]] = [
        link,
        partial(open_to_others, mode=0o777),
        partial(open_to_others, mode=0o770),
        Path.touch,
        of_another_user,
    ]
    for number, make in enumerate(makes):
        place = tmp_path / str(number)
        make(place)
        monkeypatch.setenv("REKNIT_MEMORY", str(place))
        with pytest.raises(StoragePermissionError, match=f"mem:// cannot use {place}"):
            open_storage("mem://x")
