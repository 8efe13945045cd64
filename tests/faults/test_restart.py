"""A job that is started again while agents of its last run are still at work: it waits, or fences."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import reknit
from reknit.engine.stored import agents, leftovers
from reknit.engine.stored.agents import AtWork, Note, at_work
from tests.cli.command import Command
from tests.faults.nursery import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 60.0
OPTIONS = reknit.SaveOptions(durability="process", threads=1)

# Saves step 1, and dies when step 2 is staged.  Its agent waits with the commit until there is a gate.
DIES = """
import os, signal, sys
import numpy as np
import reknit
from reknit.testing.faulty_storage import Fault
from tests.storage.killpoint import faulty_url, register_faulty

register_faulty()
root = sys.argv[1]
options = reknit.SaveOptions(durability="process", threads=1, timeout_s=50)
reknit.save(root + "/step_1", {"x": np.full(1000, 1)}, step=1, options=options)
url = faulty_url(root + "/step_2", Fault("stall", 1, "commit"), gate=root + ".gate")
reknit.save(url, {"x": np.full(1000, 2)}, step=2, wait=False, options=options)
os.kill(os.getpid(), signal.SIGKILL)
"""

# Saves once, and lives on until it may end.
IDLE = """
import sys
import numpy as np
import reknit

reknit.save(sys.argv[1], {"x": np.zeros(9)}, wait=False).result(60)
print("saved", flush=True)
sys.stdin.read()
"""


class DeadRun:
    """A run that died; its agent is about to commit step 2, as soon as that is allowed."""

    def __init__(self, folder: Path) -> None:
        self.root, self._gate = folder / "steps", folder / "steps.gate"
        command = [sys.executable, "-W", "ignore", "-c", DIES, str(self.root)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.wait(LIMIT_S) == -signal.SIGKILL
        self.wait(lambda: list((self.root / "step_2").glob("pending.*")) != [])

    def wait(self, until: Any) -> None:
        wait_until(until, LIMIT_S)

    def open_gate(self) -> None:
        """Let the agent go on."""
        self._gate.touch()

    def let_commit(self) -> str:
        """Let the agent go on, and return its standard error stream to its end."""
        self.open_gate()
        said: str = self._process.communicate(timeout=LIMIT_S)[1]
        return said


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[DeadRun]:
    run = DeadRun(tmp_path)
    yield run
    run.let_commit()


def value(path: str | Path) -> int:
    assert reknit.verify(path, "data").ok
    with reknit.open(path) as checkpoint:
        return int(checkpoint.read("x", "")[0])


def test_latest_tells_of_a_save_that_the_last_run_has_under_way(
    dead: DeadRun, caplog: pytest.LogCaptureFixture
) -> None:
    assert reknit.latest(dead.root) == str(dead.root / "step_1")
    (warning,) = (record.getMessage() for record in caplog.records)
    assert f"{dead.root}/step_2/pending." in warning
    assert "pending='wait'" in warning
    dead.let_commit()
    caplog.clear()
    assert reknit.latest(dead.root) == str(dead.root / "step_2")
    assert caplog.records == []


def test_what_was_killed_before_the_newest_checkpoint_is_not_told_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step, generation in ((5, 7), (4, 6)):
        options = reknit.SaveOptions(comm=reknit.CommOptions(generation=generation))
        reknit.save(tmp_path / f"step_{step}", {"x": np.zeros(9)}, step=step, options=options)
    os.rename(tmp_path / "step_4" / "manifest.json", tmp_path / "step_4" / f"pending.{6:016x}.01234567")
    assert reknit.latest(tmp_path) == str(tmp_path / "step_5")
    assert caplog.records == []


def test_a_new_run_can_wait_for_what_the_last_one_staged(dead: DeadRun) -> None:
    with pytest.raises(reknit.DeadlineError, match=r"step_2/pending\.") as caught:
        reknit.latest(dead.root, pending="wait", timeout_s=0.3)
    assert "pending='fence'" in str(caught.value.remedy)
    threading.Timer(0.3, dead.open_gate).start()
    newest = reknit.latest(dead.root, pending="wait", timeout_s=LIMIT_S)
    assert newest == str(dead.root / "step_2")
    assert value(newest) == 2


def test_a_new_run_can_keep_the_last_one_from_committing_and_save_in_its_place(dead: DeadRun) -> None:
    assert reknit.latest(dead.root, pending="fence") == str(dead.root / "step_1")
    said = dead.let_commit()
    assert reknit.latest(dead.root) == str(dead.root / "step_1"), "a fenced checkpoint never appears"
    assert "Traceback" not in said
    reknit.save(dead.root / "step_2", {"x": np.full(1000, 7)}, step=2, options=OPTIONS)
    assert value(dead.root / "step_2") == 7


def test_waiting_and_fencing_where_nothing_is_under_way_change_nothing(tmp_path: Path) -> None:
    reknit.save(tmp_path / "step_1", {"x": np.zeros(9)}, step=1, options=OPTIONS)
    (tmp_path / "odd\nname").mkdir()
    (tmp_path / "empty").mkdir()
    files = sorted(tmp_path.rglob("*"))
    ways: tuple[Literal["wait", "fence"], ...] = ("wait", "fence")
    for how in ways:
        # Agents of other tests may be about to end; this call waits for them, too.
        assert reknit.latest(tmp_path, pending=how, timeout_s=60.0) == str(tmp_path / "step_1")
    assert sorted(tmp_path.rglob("*")) == files
    assert reknit.latest(tmp_path / "nothing", pending="wait") is None
    with pytest.raises(reknit.UsageError, match="'tell', 'wait' or 'fence'"):
        reknit.latest(tmp_path, pending="never")  # type: ignore[arg-type]


def test_a_save_of_this_host_whose_marker_is_not_up_yet_is_waited_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "step_2" / f"pending.{5:016x}.01234567"
    looks = iter([["agent"], ["agent"], []])

    def at_work_at(root: str) -> list[str]:
        found = next(looks)
        if not found:  # the save has put its marker up meanwhile, and is killed
            marker.parent.mkdir()
            marker.touch()
        return found

    monkeypatch.setattr(leftovers, "at_work", at_work_at)

    def remove() -> None:
        wait_until(marker.exists, LIMIT_S)
        marker.unlink()

    threading.Thread(target=remove).start()
    assert reknit.latest(tmp_path, pending="wait", timeout_s=LIMIT_S) is None
    assert not marker.exists()


# Who is at work.  Agents of other tests are listed everywhere, without a path, while they are about to end.


def test_agents_of_a_dead_run_are_listed_by_the_folder_they_work_for_and_waited_for(
    dead: DeadRun, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(capsys)
    # The place as the agent has it: the folder after the scheme of a store that waits for the gate.
    root = f"faulty://stall@commit:1{dead.root}"

    def for_root() -> list[AtWork]:
        return [agent for agent in at_work(root) if agent.path is not None]

    wait_until(lambda: len(for_root()) == 1, LIMIT_S)
    (found,) = for_root()
    assert (found.rank, found.path) == (0, f"{root}/step_2?gate={dead.root}.gate")
    assert found.since is not None
    assert abs(time.time() - found.since) < 10 * LIMIT_S
    listed = command("agents", root)
    assert (listed.code, listed.err) == (0, "")
    assert [str(found.pid), "0", found.path] in [line.split()[:3] for line in listed.out.splitlines()[1:]]
    assert found._asdict() in command("agents", "--json", root).json
    for elsewhere in (f"{root}/step_1", f"{root}/step", str(dead.root)):
        wait_until(lambda place=elsewhere: at_work(place) == [], LIMIT_S)  # type: ignore[misc]
    assert "no agent on this host is at work" in command("agents", "--wait", str(dead.root)).out
    threading.Timer(0.5, dead.open_gate).start()
    waited = command("agents", "--wait", root)
    assert waited.code == 0
    assert re.search(r"waiting for \d agent", waited.err)
    assert "no agent on this host is at work" in waited.out
    assert value(dead.root / "step_2") == 2, "the save of the agent is committed at the end of the wait"


def test_an_agent_with_nothing_to_do_is_not_listed_while_its_trainer_lives(tmp_path: Path) -> None:
    state = {"x": np.zeros(9)}
    reknit.save(tmp_path / "step_1", state, step=1, options=OPTIONS, wait=False).result(LIMIT_S)
    wait_until(lambda: at_work(str(tmp_path)) == [], LIMIT_S)
    assert reknit.close()


def test_an_agent_with_nothing_to_do_in_a_container_is_not_listed_outside(tmp_path: Path) -> None:
    contained = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*contained, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        pytest.skip("no process may have numbers of its own here: unshare --pid is refused")
    command = [*contained, sys.executable, "-c", IDLE, str(tmp_path / "step_1")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"saved\n"
        wait_until(lambda: at_work(str(tmp_path)) == [], LIMIT_S)
        trainer.communicate(b"end", LIMIT_S)


def test_a_note_says_what_is_promoted_to_which_place_and_is_found_by_any_name_of_a_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    agent_save = SimpleNamespace(since=5.0, places=[f"{tmp_path}/real/a", "s3://bucket/b"])
    note = Note()
    try:
        note.write(7, {3: agent_save})
        rank, saves = agents.read_note(os.getpid()) or (None, [])
        assert rank == 7
        assert [tuple(save) for save in saves] == [(agent_save.since, path) for path in agent_save.places]
        note.write(7, {})
        assert agents.read_note(os.getpid()) == (7, []), "a shorter note leaves nothing of a longer one"
    finally:
        note.close()
    note.write(7, {3: agent_save})  # too late, and no error
    below = agents.is_below
    assert below(f"{tmp_path}/real/a", f"{tmp_path}/link")
    assert below("s3://bucket/run/b", "s3://bucket/run/")
    assert not below("s3://bucket/runs", "s3://bucket/run")
