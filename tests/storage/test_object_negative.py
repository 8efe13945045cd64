"""Real servers without conditional writes: rclone overwrites despite a condition, Swift answers 501."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the object stores need obstore")

import obstore

import reknit
from reknit.errors import CheckpointExistsError, StorageError
from reknit.storage.object.store import open_object
from reknit.storage.registry import open_storage
from tests.servers import reach, server

EACH = pytest.mark.parametrize("url", ["rclone", "swift"], indirect=True)
RCLONE = pytest.mark.parametrize("url", ["rclone"], indirect=True)
SWIFT = pytest.mark.parametrize("url", ["swift"], indirect=True)
LOCKED = pytest.mark.filterwarnings("ignore:.*(lock object|returns whole objects)")

SAVER = """
import sys, warnings
import numpy as np
import obstore

import reknit
from reknit.errors import CheckpointExistsError, CommitError

warnings.simplefilter("ignore")
url, number = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
try:
    reknit.save(url, {"x": np.full(1000, number)})
except (CheckpointExistsError, CommitError) as error:
    print(type(error).__name__)
else:
    print("saved")
"""
COMMITTER = """
import sys, warnings
from reknit.storage.registry import open_storage

warnings.simplefilter("ignore")
storage, number = open_storage(sys.argv[1]), sys.argv[2]
storage.put(f"pending.{number}", b"", if_absent=False)
print("ready", flush=True)
sys.stdin.readline()
print(storage.commit("manifest.json", number.encode(), pending=f"pending.{number}", if_absent=True))
"""


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return reach(request.param, monkeypatch)


def files_below(url: str) -> list[str]:
    return sorted(file.path for file in open_storage(url).list())


def folder_of(url: str) -> Path:
    """Return the folder of this machine that rclone serves under a URL."""
    return Path(server("rclone")["data"]) / url.partition("://")[2].partition("?")[0]


def together(code: str, url: str, number: int) -> list[str]:
    """Run processes that begin at the same moment, and return the last output of each."""
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", code, url, str(k)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(number)
    ]
    try:
        for process in begun:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return [process.communicate("go\n", timeout=60)[0].strip() for process in _released(begun)]
    finally:
        for process in begun:
            process.kill()
            process.wait()


def _released(begun: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for process in begun:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return begun


@EACH
def test_a_save_is_refused_by_default_and_takes_place_under_the_lock_after_a_warning(url: str) -> None:
    with pytest.raises(StorageError, match=r"(?s)conditional create.*\?conditional=lock"):
        reknit.save(f"{url}?retries=1", {"x": np.arange(5)})
    assert files_below(url) == []
    with pytest.warns(RuntimeWarning) as reported:
        reknit.save(f"{url}?retries=1&conditional=lock", {"x": np.arange(5)})
    assert "saves use a lock object" in str(reported[0].message)
    assert "manifest.json" in files_below(url)
    assert not any("pending" in path for path in files_below(url))
    never_overwritten(f"{url}?retries=1&conditional=lock")


def never_overwritten(url: str) -> None:
    """Neither a second save nor a bare conditional write overwrites a checkpoint, although rclone would."""
    storage = open_storage(url)
    before = storage.get("manifest.json", limit=1 << 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointExistsError):
            reknit.save(url, {"x": np.arange(6)})
        assert not storage.put("manifest.json", b"{}", if_absent=True)
        storage.put("pending.1", b"", if_absent=False)
        assert not storage.commit("manifest.json", b"{}", pending="pending.1", if_absent=True)
    assert storage.get("manifest.json", limit=1 << 20) == before


@EACH
def test_of_processes_that_commit_at_once_under_the_lock_one_is_first(url: str) -> None:
    reported = together(COMMITTER, f"{url}?retries=1&conditional=lock", 3)
    assert sorted(reported) == ["False", "False", "True"]
    assert open_storage(url).get("manifest.json", limit=100) == b"%d" % reported.index("True")


@RCLONE
@LOCKED
def test_a_marker_that_another_save_removes_before_it_is_read_back_was_put_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(f"{url}?retries=1&conditional=lock")
    storage.put("pending.0", b"", if_absent=True)
    get = obstore.get

    def removed(client: Any, key: str) -> Any:
        if key.endswith("pending.1"):
            obstore.delete(client, key)
        return get(client, key)

    monkeypatch.setattr(obstore, "get", removed)
    assert storage.put("pending.1", b"", if_absent=True)
    assert files_below(url) == ["pending.0"]


@RCLONE
def test_of_processes_that_save_at_once_under_the_lock_at_most_one_commits(url: str) -> None:
    """The others receive the reason.  The checkpoint is whole, and belongs to the process that succeeded."""
    reported = together(SAVER, f"{url}?retries=1&conditional=lock", 2)
    # Two processes may remove each other's marker at the same moment; then neither can name the owner.
    assert set(reported) <= {"saved", "FencedError", "CheckpointExistsError", "CommitError"}
    assert reported.count("saved") <= 1
    if "saved" in reported:
        target = {"x": np.zeros(1000, int)}
        reknit.load(folder_of(url), target)
        assert (target["x"] == reported.index("saved")).all()
    else:
        assert not (folder_of(url) / "manifest.json").exists()


@RCLONE
@LOCKED
def test_an_endpoint_without_ranges_gives_an_error_and_no_bytes(url: str) -> None:
    """The endpoint returns whole objects; the checkpoint can be loaded once it is copied to a folder."""
    state = {"x": np.arange(3 << 18)}
    with pytest.warns(RuntimeWarning, match="cannot be loaded from here"):
        reknit.save(f"{url}?retries=1&conditional=lock&part_mib=5", state)
    target = {"x": np.full(3 << 18, -1)}
    with pytest.raises(StorageError, match=r"(?s)non-partial.*copy them to a folder"):
        reknit.load(url, target)
    assert (target["x"] == -1).all()
    problems = reknit.verify(url, "data").problems
    assert problems
    assert all("non-partial" in problem for problem in problems)
    storage = open_storage(url)
    into = bytearray(b"-" * 10)
    data = next(path for path in files_below(url) if path.startswith("x/"))
    with pytest.raises(StorageError, match="non-partial"):
        storage.read_into(data, 5, [memoryview(into)])
    with pytest.raises(StorageError, match="non-partial"):
        storage.read_runs(data, np.array([3, 5 << 20]), 5, memoryview(into))
    assert into == b"-" * 10
    reknit.load(folder_of(url), target)
    assert (target["x"] == state["x"]).all()


@SWIFT
@LOCKED
def test_an_endpoint_that_knows_no_conditions_is_asked_for_one_once(url: str) -> None:
    """The client takes the refusal for a temporary failure, and retries for seconds."""
    storage = open_object(f"{url}?retries=1&conditional=lock")
    assert storage.put("x", b"1", if_absent=True)
    assert storage.bucket.conditions.unknown
    reknit.save(f"{url}/run?retries=1&conditional=lock", {"x": np.arange(3 << 18)})
    target = {"x": np.zeros(3 << 18, int)}
    reknit.load(f"{url}/run", target)
    assert (target["x"] == np.arange(3 << 18)).all()
