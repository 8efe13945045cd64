"""Processes that start in milliseconds: forks of one that has imported everything and has no threads.

``python -m tests.faults.nursery`` reads one call per line and forks a process for it.  Nobody waits for the
forked processes, unlike those of a launcher; the agents that they start are processes of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reknit.api import checks
from reknit.events.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reknit.comm.group import Group

_ROOT = Path(__file__).parents[2]
_POLL_S = 0.001


class Nursery:
    """Forks processes that call a function of `tests.faults.trainers`, and finds their agents."""

    def __enter__(self) -> Nursery:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.faults.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def start(self, name: str, log: Path, **arguments: Any) -> Child:
        """Call a function in a process of its own, which writes lines to `log`.

        The function is one of `tests.faults.trainers`, or of the module that is named before a colon.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        call = {"name": name, "log": str(log), "arguments": arguments}
        self._server.stdin.write(json.dumps(call, default=str).encode() + b"\n")
        self._server.stdin.flush()
        return Child(int(self._server.stdout.readline()), log)

    def start_job(self, name: str, root: Path, size: int, **arguments: Any) -> list[Child]:
        """Call a function of `tests.faults.trainers` on every rank of a job that has the folder `root`."""
        for folder in ("meet", "steps", "temporary"):
            (root / folder).mkdir(parents=True)
        return [
            self.start(name, root / f"log-{rank}", root=root, rank=rank, size=size, **arguments)
            for rank in range(size)
        ]


class Child:
    """A forked process, which writes its progress to a log, and its agents."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log

    def lines(self) -> list[str]:
        """Return the whole lines that it has written."""
        try:
            return self.log.read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []

    def said(self, word: str) -> list[str]:
        """Return the lines that begin with a word, without that word."""
        return [line.partition(" ")[2] for line in self.lines() if line.split(" ")[0] == word]

    def alive(self) -> bool:
        """Return whether it runs."""
        return is_running(self.pid)

    def agents(self) -> list[int]:
        """Return its agents, also after its own death."""
        return agents_of(self.pid)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, if it is there."""
        send(self.pid, number)

    def reported(self) -> str:
        """Return the standard error stream of the process and its agents."""
        errors = Path(f"{self.log}.err")
        return errors.read_text() if errors.exists() else ""


def send(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a process a signal, if it is there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # the process has ended by itself


def is_running(pid: int) -> bool:
    """Return whether a process runs, and is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def agents_of(trainer: int) -> list[int]:
    """Return the processes that are agents of a trainer, dead or alive."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if (
                command[1:3] == [b"-m", b"reknit.engine.background.agent"]
                and command[4] == str(trainer).encode()
            ):
                found.append(int(name))
    return found


def agent_of(group: Group) -> int:
    """Return the agent of this process in a group."""
    session = checks.backgrounds[group][False].supervisor.session
    assert session is not None
    assert session.link.pid is not None
    return session.link.pid


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Suspend processes."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def wait_for_ends(trainers: Sequence[Child], timeout_s: float) -> None:
    """Wait until each trainer has ended by itself and left no agent."""
    for trainer in trainers:
        wait_until(lambda t=trainer: not t.alive(), timeout_s, trainer.reported)  # type: ignore[misc]
        assert trainer.said("end"), trainer.reported()
        assert not trainer.agents(), trainer.reported()


def wait_until(ready: Callable[[], object], timeout_s: float, what: Callable[[], str] = lambda: "") -> None:
    """Wait for `ready`, and fail with the text of `what` after a timeout."""
    deadline = Deadline(timeout_s)
    while not ready():
        assert not deadline.passed(), f"not within {timeout_s:g} s: {what()}"
        time.sleep(_POLL_S)


def _nurse(calls: IO[str]) -> None:
    import tests.faults.trainers  # noqa: F401 - imported once, and not in every fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in calls:
        pid = os.fork()
        if pid == 0:
            _be(json.loads(line))
        os.write(1, f"{pid}\n".encode())


def _be(call: dict[str, Any]) -> None:
    """Run the call of a forked process, and end it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(call["log"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for here, there in ((null, 0), (null, 1), (errors, 2)):
            os.dup2(here, there)
        os.close(null)
        os.close(errors)
        module, _, name = call["name"].rpartition(":")
        work = getattr(importlib.import_module(module or "tests.faults.trainers"), name)
        work(log=call["log"], **call["arguments"])
        code = 0
    except BaseException:  # after any error, the code of the server must not run in the fork
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _nurse(sys.stdin)
