"""Processes that run a script: started, watched, killed by their own id, and never left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

_POLL_S = 0.005


class JobFailed(Exception):
    """A rank failed, or the job did not get where it should in time; the message has what the rank wrote."""


class Job:
    """One process per rank, as torchrun would start them; all are gone when the `with` block ends.

    What a rank prints goes to `{logs}/{name}-{rank}.txt`.
    """

    def __init__(self, name: str, script: Path, arguments: Sequence[str], *, world: int, logs: Path) -> None:
        self.name = name
        self._command = [sys.executable, str(script), *arguments]
        self._logs = [logs / f"{name}-{rank}.txt" for rank in range(world)]
        self.processes: list[subprocess.Popen[bytes]] = []

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

    def wait(self, timeout_s: float) -> None:
        """Return when all ranks have ended well.  Raises `JobFailed` as soon as one did not."""
        self.wait_until(lambda: all(process.poll() == 0 for process in self.processes), timeout_s)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return when `condition` holds.  Raises `JobFailed` when a rank fails before, or time runs out."""
        stop = time.monotonic() + timeout_s
        while not condition():
            for rank, process in enumerate(self.processes):
                if process.poll() not in (None, 0):
                    raise JobFailed(
                        f"{self.name}: rank {rank} ended with {process.poll()}\n{self._tail(rank)}"
                    )
            if time.monotonic() > stop:
                raise JobFailed(f"{self.name}: not done after {timeout_s:.0f} s\n{self._tail(0)}")
            time.sleep(_POLL_S)

    def kill(self, rank: int) -> None:
        """Kill one rank with SIGKILL: it cannot say good-bye."""
        self.processes[rank].kill()

    def end(self, grace_s: float) -> list[int]:
        """Wait up to `grace_s` seconds for the ranks to end by themselves, then kill the rest.

        Returns those that had to be killed.
        """
        stop = time.monotonic() + grace_s
        while time.monotonic() < stop and any(process.poll() is None for process in self.processes):
            time.sleep(_POLL_S)
        killed = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for rank in killed:
            self.processes[rank].kill()
        for process in self.processes:
            process.wait()
        return killed

    def said(self, rank: int) -> str:
        """Return what a rank printed."""
        return self._logs[rank].read_text(errors="replace")

    def _tail(self, rank: int) -> str:
        return "\n".join(f"    {line}" for line in self.said(rank).splitlines()[-25:])


def _environment(world: int) -> dict[str, str]:
    """Return what torch reads from the environment, for ranks that meet on this machine alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
