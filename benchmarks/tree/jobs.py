"""Jobs of many small processes, and their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]


class Job:
    """The processes of a job, one per rank, each on a host of its own or some together."""

    def __init__(
        self,
        folder: Path,
        size: int,
        spec: dict[str, Any],
        *,
        ranks_per_host: int,
        on_host: Callable[[int, Sequence[str]], Sequence[str]] = lambda _, command: command,
    ) -> None:
        """Start the processes; `on_host` returns the command that runs another command on a host."""
        self._outs = [folder / f"{spec.get('job', 'measure')}.{rank}.json" for rank in range(size)]
        self.log = folder / f"{spec.get('job', 'measure')}.log"
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._ranks: list[subprocess.Popen[bytes]] = []
        with self.log.open("ab") as log:
            for rank, out in enumerate(self._outs):
                host = rank // ranks_per_host
                reported = json.dumps(
                    spec | {"rank": rank, "size": size, "out": str(out), "folder": str(folder)}
                )
                command = [sys.executable, str(Path(__file__).with_name("worker.py")), reported]
                self._ranks.append(
                    subprocess.Popen(
                        on_host(host, command),
                        env=environment | {"REKNIT_HOST": f"host-{host}"},
                        stdout=log,
                        stderr=log,
                    )
                )

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every rank has joined."""
        self._wait(lambda: all(Path(f"{out}.ready").exists() for out in self._outs), timeout_s, "be ready")

    def results(self, timeout_s: float) -> list[Any]:
        """Wait until all ranks have ended, and return their results."""
        self._wait(lambda: all(rank.poll() is not None for rank in self._ranks), timeout_s, "end")
        return [json.loads(out.read_text()) for out in self._outs]

    def kill(self) -> None:
        """Kill the processes that still run."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()

    def _wait(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        end = time.monotonic() + timeout_s
        while not ready():
            failed = [n for n, rank in enumerate(self._ranks) if rank.poll()]
            if failed or time.monotonic() > end:
                self.kill()
                reported = self.log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"ranks {failed or 'unknown'} did not {what} in time:\n{reported}")
            time.sleep(0.05)
