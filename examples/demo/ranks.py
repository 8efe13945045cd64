"""Processes that run a script, and the agents they start: watched, killed by id, and never left behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

_POLL_S = 0.005


class JobFailed(Exception):
    """A rank failed, or the job did not get where it should in time."""


class Job:
    """One process per rank, as torchrun would start them; all are gone when the `with` block ends,
    and so are the agents that they started.

    What a rank prints goes to `{logs}/{name}-{rank}.txt`.
    """

    def __init__(self, name: str, script: Path, arguments: Sequence[str], *, world: int, logs: Path) -> None:
        self.name = name
        self._command = [sys.executable, str(script), *arguments]
        self._logs = [logs / f"{name}-{rank}.txt" for rank in range(world)]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._agents: dict[int, int] = {}  # by process, the rank whose agent it is

    def __enter__(self) -> Job:
        environment = dict(os.environ, **_environment(len(self._logs)))
        try:
            for rank, path in enumerate(self._logs):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with path.open("wb") as out:
                    self.processes.append(
                        subprocess.Popen(
                            self._command, env={**environment, **place}, stdout=out, stderr=subprocess.STDOUT
                        )
                    )
        except BaseException:
            self.end(grace_s=0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(grace_s=0.0)
        for pid in self._agents:
            _kill_agent(pid)

    def wait(self, timeout_s: float) -> None:
        """Return when all ranks have ended well.  Raises `JobFailed` as soon as one did not."""
        ended = lambda: all(process.poll() == 0 for process in self.processes)  # noqa: E731
        self.wait_until(ended, "the end of all ranks", timeout_s)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Return when `condition` holds, which `what` describes.

        Raises `JobFailed` when a rank fails before that, or time runs out.
        """
        stop = time.monotonic() + timeout_s
        while not condition():
            for rank, process in enumerate(self.processes):
                if process.poll() not in (None, 0):
                    raise JobFailed(f"{self.name}: rank {rank} ended with {process.poll()}")
            if time.monotonic() > stop:
                raise JobFailed(f"{self.name}: waited {timeout_s:.0f} s for {what}")
            time.sleep(_POLL_S)

    def kill(self, *ranks: int, agents: bool = False) -> None:
        """Kill ranks with SIGKILL, which leaves them no time for a last word; with `agents` theirs, too."""
        self._note_agents()
        for rank in ranks:
            self.processes[rank].kill()
        for pid, rank in self._agents.items():
            if agents and rank in ranks:
                _kill_agent(pid)

    def wait_for_agents(self, timeout_s: float) -> None:
        """Return when all agents that were there at the last `kill` have ended."""
        stop = time.monotonic() + timeout_s
        while any(_is_agent(pid) for pid in self._agents):
            if time.monotonic() > stop:
                raise JobFailed(f"{self.name}: agents still run after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def end(self, grace_s: float) -> list[int]:
        """Wait up to `grace_s` seconds for the ranks to end by themselves, then kill the rest.

        Returns those that had to be killed.
        """
        stop = time.monotonic() + grace_s
        while time.monotonic() < stop and any(process.poll() is None for process in self.processes):
            time.sleep(_POLL_S)
        killed = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        self.kill(*killed)
        for process in self.processes:
            process.wait()
        return killed

    def said(self, rank: int) -> str:
        """Return the output of a rank."""
        return self._logs[rank].read_text(errors="replace")

    def _note_agents(self) -> None:
        """Record the agents of the ranks that live; the parent of an agent is lost with its rank."""
        ranks = {process.pid: rank for rank, process in enumerate(self.processes)}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # a process that has ended meanwhile
                pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
                if parent in ranks and _is_agent(pid):
                    self._agents[pid] = ranks[parent]

    def last_words(self) -> str:
        """Return the last lines that each rank and its agent printed."""
        lines = []
        for rank, log in enumerate(self._logs):
            said = self.said(rank).splitlines()[-25:] if log.exists() else []
            lines += [f"{self.name}, rank {rank}:", *(f"    {line}" for line in said or ["(nothing)"])]
        return "\n".join(lines)


def _is_agent(pid: int) -> bool:
    """Return whether a process is a living agent; a dead one, reaped or not, has an empty command line."""
    try:
        return b"reknit.engine.background.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill_agent(pid: int) -> None:
    if _is_agent(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    """Return an unused port of loopback, which the kernel gives to no other before rank 0 takes it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _environment(world: int) -> dict[str, str]:
    """Return the environment from which ranks of torch meet on this machine alone."""
    port = _free_port()
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
