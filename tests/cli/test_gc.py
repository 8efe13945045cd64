"""`reknit gc`: the files of killed saves are listed, and go when asked; checkpoints and live saves stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.cli.gc import age
from reknit.errors import FencedError, MissingExtraError
from reknit.storage.local.memory import sweepable
from reknit.storage.registry import open_storage
from tests.running.examples import is_night
from tests.servers import new_folder, reach, uploads_left

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command

# A process that saves to URL, and at some operation of the store is killed, or waits for an order to go on.
SAVER = """
import sys
import numpy as np
import reknit
from reknit.errors import CommitError, StorageError
from reknit.storage.registry import open_storage, register
from reknit.testing.faulty_storage import Fault, FaultyStorage

url, kind, operation = sys.argv[1:]

def stall():
    print("waiting", flush=True)
    sys.stdin.readline()

def opened(told, durability):
    inner = open_storage(told.partition("://")[2], durability="process")
    return FaultyStorage(inner, plan=[Fault(kind, 1, operation)], stall=stall)

register("faulty", opened)
try:
    reknit.save("faulty://" + url, {"x": np.arange(5 << 19)}, overwrite=True)
except (CommitError, StorageError) as error:
    print(type(error).__name__)
else:
    print("saved")
"""

PARTS = {"s3": "?part_mib=5", "hdfs": "?part_mib=5"}


class Where:
    """A folder on some kind of store."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self.url = kind, url

    def at(self, name: str) -> str:
        return f"{self.url}/{name}{PARTS.get(self.kind, '')}"

    def held(self) -> dict[str, list[str]]:
        """Return the paths of all files, by kind, also of files that no reader sees."""
        sweep = sweepable(open_storage(self.url))
        assert sweep is not None
        held: dict[str, list[str]] = {"file": [], "temporary": [], "upload": []}
        for each in sweep.dated():
            held[each.kind].append(each.path)
        return held


@pytest.fixture(params=["local", "s3", "hdfs"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Where:
    kind = request.param
    if kind == "s3":
        pytest.importorskip("obstore", reason="the object stores need obstore")
        pytest.importorskip("botocore", reason="uploads are listed with botocore")
    url = new_folder(kind, tmp_path / "runs", monkeypatch)
    return Where(kind, url)


def on(*day: str) -> pytest.MarkDecorator:
    """Return the mark of a test of these stores by day, and of all at night."""
    return pytest.mark.parametrize("where", ["local", "s3", "hdfs"] if is_night() else day, indirect=True)


def begun(where: Where, kind: str, operation: str) -> subprocess.Popen[str]:
    """Start a process that saves to the folder ``b``."""
    return subprocess.Popen(
        [sys.executable, "-c", SAVER, where.at("b"), kind, operation],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(where: Where) -> None:
    """Kill a save to the folder ``b`` after its last byte is written, and before its file exists."""
    process = begun(where, "kill", "finish")
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, said


def waiting(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"


def rows(command: Command, where: Where, *arguments: str) -> list[dict[str, Any]]:
    ran = command("gc", where.url, "--json", *arguments)
    assert ran.code == 0, ran.err
    found: list[dict[str, Any]] = ran.json["leftovers"]
    return found


@on("local", "hdfs")
def test_what_runs_left_goes_and_the_records_of_who_owns_the_folder_stay(
    command: Command, where: Where
) -> None:
    state = {"x": np.arange(9)}
    old = reknit.Checkpointer(where.url, wait=True)
    old.save(1, state)
    killed(where)
    with reknit.Checkpointer(where.url, wait=True) as new:
        assert new.resume(state) == 2
        with pytest.raises(FencedError):
            old.save(2, state)
        kept = [path for path in where.held()["file"] if not path.startswith("b/")]
        assert any(path.startswith(".reknit/run.") for path in kept)
        assert {row["name"] for row in rows(command, where, "--older-than", "0", "--delete")} <= {
            "b",
            "step_00000002",
        }
        assert where.held()["file"] == kept
        with pytest.raises(FencedError):
            old.save(2, state)
        new.save(2, state)
    assert [step.step for step in reknit.steps(where.url)] == [1, 2]


def test_what_a_killed_save_left_is_listed_and_goes_and_readers_notice_nothing(
    command: Command, where: Where
) -> None:
    state = {"x": np.arange(1000)}
    reknit.save(where.at("a"), state)
    committed = where.held()["file"]
    killed(where)
    if where.kind == "hdfs" and not where.held()["temporary"]:
        killed(where)  # under load a writer may be killed that was given all, and has sent nothing yet
    left = where.held()
    if where.kind == "s3":
        assert [path.rpartition("/")[0] for path in left["upload"]] == ["b/x"]
    if where.kind == "hdfs":
        assert left["temporary"]

    # The save is young, so it may be under way.
    assert {row["name"] for row in rows(command, where)} == {"b"}
    assert all(row["kept"] for row in rows(command, where, "--delete"))
    assert where.held() == left
    shown = command("gc", where.url)
    assert shown.code == 0
    assert "kept: a save may be under way there" in shown.out

    listed = rows(command, where, "--older-than", "0")
    assert not any(row["kept"] or row["deleted"] for row in listed)
    if where.kind != "hdfs":  # HDFS does not report the size of an open file
        assert sum(row["nbytes"] for row in listed) >= 15 << 20
    assert where.held() == left

    with Reading(where.at("a"), state):
        deleted = rows(command, where, "--older-than", "0s", "--delete")
    assert all(row["deleted"] for row in deleted)
    assert where.held() == {"file": committed, "temporary": [], "upload": []}
    if where.kind == "s3":
        assert uploads_left(where.url) == []
    assert reknit.verify(where.at("a"), "data").ok
    ran = command("gc", where.url, "--older-than", "0")
    assert (ran.code, ran.out) == (0, f"killed saves have left nothing in {where.url}\n")


class Reading:
    """Load a checkpoint again and again while the block runs."""

    def __init__(self, url: str, state: dict[str, Any]) -> None:
        self.url, self.state = url, state
        self.over, self.loads = threading.Event(), 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            while not self.over.is_set() or not self.loads:
                target = {"x": np.zeros(1000, int)}
                reknit.load(self.url, target)
                np.testing.assert_array_equal(target["x"], self.state["x"])
                self.loads += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        self.thread.join()
        if self.error is not None:
            raise self.error


@on("local", "s3")
def test_a_save_under_way_is_left_alone(command: Command, where: Where) -> None:
    """The save is over a checkpoint, which stays as it is until that save commits."""
    reknit.save(where.at("b"), {"x": np.arange(10)})
    process = begun(where, "stall", "finish")
    try:
        waiting(process)
        assert all(row["kept"] for row in rows(command, where, "--delete"))
        said, _ = process.communicate("go on\n", timeout=60)
    finally:
        process.kill()
    assert said == "saved\n"
    assert reknit.verify(where.at("b"), "data").ok
    target = {"x": np.zeros(5 << 19, int)}
    reknit.load(where.at("b"), target)
    assert target["x"][-1] == (5 << 19) - 1


@on("local", "hdfs")
def test_a_save_that_was_taken_for_dead_fails_and_harms_nothing(command: Command, where: Where) -> None:
    """The files of the save are removed while it sleeps, right before it commits."""
    reknit.save(where.at("b"), {"x": np.arange(10)})
    before = where.held()
    process = begun(where, "stall", "commit")
    try:
        waiting(process)
        deleted = rows(command, where, "--older-than", "0", "--delete")
        assert all(row["deleted"] for row in deleted)
        assert where.held() == before
        said, _ = process.communicate("go on\n", timeout=60)
    finally:
        process.kill()
    assert said == "CommitError\n"  # no other run has taken its place: its trainer may go on
    assert reknit.verify(where.at("b"), "data").ok
    assert where.held() == before


@pytest.mark.parametrize("where", ["s3"], indirect=True)
def test_ctrl_c_in_the_middle_of_an_upload_leaves_nothing(where: Where) -> None:
    process = begun(where, "stall", "finish")
    try:
        waiting(process)
        assert len(where.held()["upload"]) == 1
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # the interrupted main thread waits for the one that stalls
        _, said = process.communicate("go on\n", timeout=60)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said
    assert process.returncode != 0
    assert where.held() == {"file": [], "temporary": [], "upload": []}


@pytest.mark.parametrize("where", ["s3"], indirect=True)
def test_uploads_of_others_are_left_alone(command: Command, where: Where) -> None:
    """The uploads are below the same prefix, or below one that only begins alike."""
    reknit.save(where.at("a"), {"x": np.arange(10)})
    for url in (f"{where.url}/backup.tar", f"{where.url}2/model/00000.0123abcd.safetensors"):
        upload_begun(url)
    assert rows(command, where, "--older-than", "0", "--delete") == []
    assert uploads_left(where.url) == [f"{where.url.partition('reknit/')[2]}/backup.tar"]


def upload_begun(url: str) -> None:
    from botocore.session import Session  # type: ignore[import-untyped]

    bucket, _, key = url.partition("://")[2].partition("/")
    client = Session().create_client("s3", region_name="us-east-1")
    client.create_multipart_upload(Bucket=bucket, Key=key)


@pytest.mark.parametrize("where", ["s3"], indirect=True)
def test_without_botocore_it_is_said_what_to_install(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'reknit\[gc\]'"):
        where.held()


@pytest.mark.skipif(find_spec("obstore") is None, reason="the object stores need obstore")
@pytest.mark.parametrize(
    ("name", "reported"), [("gcs", "AbortIncompleteMultipartUpload"), ("azure", "a week")]
)
def test_what_a_store_does_not_list_is_said(
    name: str, reported: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are found there as everywhere."""
    url = reach(name, monkeypatch)
    reknit.save(f"{url}/a", {"x": np.arange(10)})
    storage = open_storage(f"{url}/a")
    storage.put("index.0123abcd.parquet", b"left", if_absent=False)
    ran = command("gc", url)
    assert ran.code == 0
    assert reported in ran.out
    assert "1 file " in ran.out
    assert reported in command("gc", url, "--json").json["unseen"]
    ran = command("gc", url, "--older-than", "0", "--delete")
    assert "4 B deleted" in ran.out
    assert reknit.verify(f"{url}/a", "data").ok
    assert not any(file.path.startswith("index.0123") for file in storage.list())


def test_a_folder_with_nothing_in_it_is_not_found(command: Command, tmp_path: Path) -> None:
    ran = command("gc", tmp_path / "absent")
    assert ran.code == 3
    assert f"-> {tmp_path}/absent does not exist" in ran.err


def test_where_nothing_tells_what_is_dead_nothing_is_touched(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of this host may hold files whose manifest is on another one; fsspec has no dates."""
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    monkeypatch.setenv("REKNIT_MEMORY", str(tmp_path / "memory"))
    for url in ("mem://somewhere", "memory://somewhere"):
        ran = command("gc", url, "--older-than", "0", "--delete")
        assert ran.code == 2, url
        assert "gc cannot find the files that killed saves have left in" in ran.err, url


def test_ages_are_numbers_with_a_unit_and_others_are_refused(command: Command, tmp_path: Path) -> None:
    ages = {"24h": 86400, "0": 0, "1.5d": 129600, "90m": 5400}
    assert {text: age(text) for text in ages} == ages
    for text in ("", "h", "-1h", "24 hours", "1w", "nan"):
        assert command("gc", tmp_path, f"--older-than={text}").code == 2, text


def left_behind(folder: Path, old_s: float) -> Path:
    """Leave a file of a save that was killed so long ago."""
    left = folder / "model/00000.0123abcd.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left")
    at = left.stat().st_mtime - old_s
    os.utime(left, (at, at))
    return left


def test_a_wrong_clock_of_this_host_makes_no_file_older(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(tmp_path / "a", 0)
    left_behind(tmp_path / "b", 5000)
    real = time.time
    for ahead_s in (7200.0, -7200.0):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: real() + ahead_s)
        found = command("gc", tmp_path, "--older-than=1h", "--json").json["leftovers"]
        assert [(row["name"], bool(row["kept"])) for row in found] == [("a", True), ("b", False)], ahead_s
        assert found[0]["age_s"] < 60 < 4990 < found[1]["age_s"] < 5060


def test_old_is_what_was_not_changed_for_so_long(command: Command, tmp_path: Path) -> None:
    left = left_behind(tmp_path / "a", 0)
    for hours, kept in ((23, True), (25, False)):
        modified = time.time() - hours * 3600
        os.utime(left, (modified, modified))
        (row,) = command("gc", tmp_path, "--json").json["leftovers"]
        assert bool(row["kept"]) is kept
    assert "dead" in command("gc", tmp_path).out
    assert "4 B deleted" in command("gc", tmp_path, "--delete").out
    assert not (tmp_path / "a").exists()
