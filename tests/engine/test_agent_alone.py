"""An agent with an unforeseen error sends it to its trainer, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

import reknit
from reknit.comm.group import SoloGroup
from reknit.engine.background import link as agent_link
from reknit.engine.background import messages as say
from reknit.engine.background.agent_save import AgentSave
from reknit.engine.memory.workers import Arena
from reknit.engine.memory.write import Tuner
from reknit.engine.messages import RankClaims
from reknit.engine.saving.here import EarlierSaves
from reknit.engine.stored.agents import at_work
from reknit.errors import AgentError, ShortageError
from reknit.options import SaveOptions
from reknit.processes.shared_memory import SharedMemory
from reknit.system import start_thread
from tests.engine.held import task_at
from tests.faults.nursery import wait_until
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from reknit.errors import ReknitError

LIMIT_S = 30.0

# The module of the store is found by other processes, but cannot be imported there.
SCRIPT = """
import pathlib, sys
import numpy as np
import reknit
from reknit.storage.registry import register
from reknit.storage.local.store import LocalStorage

def made(url, durability):
    return LocalStorage(url.removeprefix("odd://"), durability=durability)

code = "from __main__ import made\\ndef factory(url, durability): return made(url, durability)"
pathlib.Path(sys.argv[1], "only_here.py").write_text(code)
sys.path.insert(0, sys.argv[1])
import only_here
register("odd", only_here.factory)
options = reknit.SaveOptions(timeout_s=20, exit_wait_s=20)
state = {"model": {"weight": np.zeros(9)}}
try:
    reknit.save("odd://" + sys.argv[1] + "/a", state, wait=False, options=options).result(30)
except reknit.ReknitError as error:
    print(type(error).__name__, error)
reknit.save(sys.argv[1] + "/b", state, wait=False, options=options).result(30)
print("saved")
"""


def test_a_store_that_the_agent_cannot_import_is_an_error_and_the_next_save_goes_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert "cannot import name 'made'" in first, done.stdout
    assert last == "saved"


def test_an_agent_starts_without_what_only_trainers_need() -> None:
    def printed(script: str) -> list[str]:
        command = [sys.executable, "-c", f"import sys; {script}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    modules = set(printed("import reknit.engine.background.agent; print(*sys.modules)"))
    assert "reknit.engine.background.agent" in modules
    assert modules.isdisjoint({"reknit.api", "reknit.frameworks", "reknit.runs", "torch", "jax", "grpc"})
    joining = set(
        printed(
            "import reknit.engine.background.agent, reknit.comm.tree.tree_group; "
            "from reknit.comm.tree import over_sockets; print(*sys.modules)"
        )
    )
    later = ("grpc", "numpy", "pyarrow", "reknit.engine.saving", "reknit.format", "reknit.storage")
    assert [name for name in joining if name.startswith(later)] == [], "trainers would wait for it"
    named = "import reknit; print(reknit.StorageError.__name__, reknit.transforms.__name__)"
    assert printed(named) == ["StorageError", "reknit.transforms"], "the module of a store may ask for it"


def linked(
    rank: int = 0, *, low_priority: bool = False, signals: Iterable[int] = ()
) -> tuple[agent_link.AgentLink, psutil.Process]:
    """Return a trainer's link to an agent that has joined others, and the process of the agent.

    The process gets `signals` as soon as there is one.
    """
    link = agent_link.AgentLink(rank, in_process=False, send_timeout_s=LIMIT_S)
    for number in signals:
        psutil.Process(link.pid).send_signal(number)
    about: dict[str, Any] = {"job": "agents", "rank": rank, "hosts": [0], "fan_out": 1, "generation": 7}
    link.send(say.Join(**about, comm={}, low_priority=low_priority))
    link.send(say.ConnectParent(""))
    assert link.answer(60) == say.Joined()
    return link, psutil.Process(link.pid)


def test_an_agent_that_is_given_up_is_gone_before_its_arena_is_filled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_link, "_REAP_S", 0.2)
    link, agent = linked()
    running: list[bool] = []
    link.lost = lambda error: running.append(agent.is_running())
    agent.suspend()
    link.channel.shut()
    assert link.ended(60)
    assert running == [False], "after the loss is reported, the arena may be filled: no agent may read it"


def begun(number: int, send: Callable[[say.AgentMessage], bool] = lambda message: False) -> AgentSave:
    """Return a save that begins in an agent, whose messages nobody receives."""
    url, extra = "process://alone", b'{"origin": {}, "metadata": {}}'
    claims = RankClaims("0" * 32, None, b"", None, [])
    begin = say.Begin(
        number=number, url=url, factory=None, overwrite=False, options={}, extra=extra, claims=claims
    )
    task = task_at(ProcessMemory("alone"), SoloGroup(), SaveOptions())
    return AgentSave(begin, task, send, EarlierSaves(), Tuner(threads=1))


def test_a_save_tells_what_made_it_fail_first() -> None:
    agent_save = begun(0)
    agent_save.fail(AgentError("the disk is full"))
    agent_save.fail(AgentError("the trainer is gone"))
    assert agent_save.error is not None
    assert agent_save.error.message == "the disk is full"


def test_a_save_that_fails_ends_after_its_arena_is_free() -> None:
    sent, end = list[str](), threading.Event()

    def receive(message: say.AgentMessage) -> bool:
        if isinstance(message, say.ArenaFree):
            assert not end.wait(0.2), "the trainer forgets a save with its end"
        sent.append(type(message).__name__)
        if isinstance(message, say.SaveDone):
            end.set()
        return True

    save = begun(0, receive)
    save.fail(AgentError("the trainer is gone"))
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(save.commit), pool.submit(save.write, None)]:
            ended.result(LIMIT_S)
    assert sent == ["ArenaFree", "SaveDone"]


def test_the_bytes_of_a_file_are_written_when_the_trainer_has_staged_them() -> None:
    memory, fetched, save = SharedMemory.create(4096), [], begun(0)
    planned = say.Planned(
        number=0, items=["model"], files=[("model", 0, 5)], columns=None, arena=0, ring=4096
    )
    save.take_files(planned, memory)
    files = save.files
    assert files is not None
    writer = start_thread("writer", lambda: fetched.append(bytes(files.piece(0, 0, 5, Arena(5)))))
    writer.join(0.3)
    assert not fetched
    memory.bytes[:5] = list(b"bytes")
    save.note_filled(0)
    writer.join(LIMIT_S)
    assert fetched == [b"bytes"]


def test_an_agent_lives_through_the_signals_that_are_meant_for_its_trainer() -> None:
    for link, agent in (linked(), linked(signals=say.FOR_TRAINERS)):
        assert os.getsid(agent.pid) == agent.pid, "Ctrl-C in a terminal is for the trainer"
        for number in say.FOR_TRAINERS:
            agent.send_signal(number)
        link.send(say.ConnectParent(""))
        assert link.answer(60) == say.Joined()
        link.quit()
        assert link.ended(60)
        assert link.gone is not None
        assert link.gone.message.endswith("has ended"), link.gone


def test_an_agent_gives_way_unless_it_is_asked_not_to() -> None:
    for low_priority, lower_by in ((True, 10), (False, 0)):
        link, agent = linked(low_priority=low_priority)
        assert agent.nice() == min(os.nice(0) + lower_by, 19)
        link.quit()
        assert link.ended(60)


def test_nobody_is_at_work_when_a_save_and_its_promotions_are_over(tmp_path: Path) -> None:
    for step, num_targets in enumerate([0, 1, 3] * 5):
        places = tuple(tmp_path / f"{step}_{number}" for number in range(num_targets))
        options = SaveOptions(durability="process", promote_to=places or None)
        saved = reknit.save(tmp_path / f"step_{step}", {"x": np.zeros(9)}, wait=False, options=options)
        saved.result(LIMIT_S)
        saved.wait_promoted(LIMIT_S)
        # Idle agents of other tests, whose trainers are gone, are listed without a path.
        assert [agent for agent in at_work(str(tmp_path)) if agent.path is not None] == []


def lost_by(link: agent_link.AgentLink) -> ReknitError:
    """Return the error that the trainer has for the loss of its agent."""
    assert link.ended(60)
    assert link.gone is not None
    return link.gone


def test_an_agent_that_cannot_go_on_says_why() -> None:
    link, _ = linked(3)
    memory = os.memfd_create("small")
    try:
        link.send(say.GiveArena(1, 1 << 20), memory)
    finally:
        os.close(memory)
    error = lost_by(link)
    assert type(error) is AgentError
    assert "agent of rank 3" in error.message
    assert "shared memory of 0 bytes has no 1048576 bytes to map" in error.message


def test_an_agent_that_has_too_little_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(name: str, work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("reknit.engine.background.agent.start_thread", scarce)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    link = agent_link.AgentLink(3, in_process=True, send_timeout_s=LIMIT_S)
    error = lost_by(link)
    # After the report to its trainer the thread raises the same error, which the hook of this test takes.
    wait_until(lambda: "reknit-agent-3" not in {thread.name for thread in threading.enumerate()}, LIMIT_S)
    assert type(error) is ShortageError
    assert "no further thread" in error.message
    assert error.rank == 3
    assert error.remedy


def test_an_agent_that_cannot_be_forked_is_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise BlockingIOError(11, os.strerror(11))

    monkeypatch.setattr(subprocess, "Popen", scarce)
    with pytest.raises(ShortageError, match="no further thread or process"):
        agent_link.AgentLink(0, in_process=False, send_timeout_s=LIMIT_S)
