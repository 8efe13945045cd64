"""Run commands in the machine that scripts/servers.d/nfs.py starts, and cut its power."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".servers/nfs.json"
_POLL_S = 0.02
_SLACK_S = 30


class Done(NamedTuple):
    """The outcome of a command: its exit status, 124 when it took too long, and all that it printed."""

    code: int
    said: str


class Job:
    """A command that runs in the machine."""

    def __init__(self, spool: Path, command: str, timeout_s: int) -> None:
        self._base = spool / f"job-{uuid.uuid4().hex[:8]}"
        self._end = time.monotonic() + timeout_s + _SLACK_S
        lines = [f"# {timeout_s}", f"cd {shlex.quote(str(ROOT))}", command]
        self._file("new").write_text("\n".join(lines) + "\n")
        self._file("new").rename(self._file("job"))

    def said(self) -> str:
        """Return its output so far."""
        try:
            return self._file("said").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait(self) -> Done:
        """Wait for its end.  Raises `TimeoutError` when the machine does not report it."""
        while not self._file("code").exists():
            if time.monotonic() > self._end:
                raise TimeoutError(f"the machine reports no end; printed so far:\n{self.said()}")
            time.sleep(_POLL_S)
        done = Done(int(self._file("code").read_text()), self.said())
        for path in self._base.parent.glob(f"{self._base.name}.*"):
            path.unlink()
        return done

    def _file(self, kind: str) -> Path:
        return self._base.with_name(f"{self._base.name}.{kind}")


class Machine:
    """The machine.  Its disk is kept when its power is cut, and empty after `up` from nothing."""

    def up(self) -> None:
        """Start it, with an empty disk, unless it runs."""
        self._servers("up")

    def down(self) -> None:
        """Stop it; the content of its disk is lost."""
        self._servers("down")

    @property
    def disk(self) -> Path:
        """The image of its disk."""
        return Path(self._known()["home"], "disk")

    @property
    def spool(self) -> Path:
        """The folder that it shares with this machine: there it is ``/run/spool``."""
        return Path(self._known()["endpoint"])

    def start(self, command: str, timeout_s: int = 300) -> Job:
        """Begin a command of bash, in the root of this repository."""
        return Job(self.spool, command, timeout_s)

    def run(self, command: str, timeout_s: int = 300) -> Done:
        """Run a command of bash, in the root of this repository, to its end."""
        return self.start(command, timeout_s).wait()

    def python(self, module: str, *arguments: object) -> str:
        """Return the command that runs a module, with the interpreter that runs this one."""
        words = [sys.executable, "-m", module, *map(str, arguments)]
        return " ".join(map(shlex.quote, words))

    def cut(self) -> None:
        """Cut its power, which loses all bytes that its kernel had not written to the disk."""
        (pid, _), *_ = self._known()["pids"]
        os.killpg(pid, signal.SIGKILL)
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(_POLL_S)

    def boot(self) -> None:
        """Start it after a cut, with its disk as it was at the cut."""
        Path(self._known()["home"], "keep").touch()
        self._servers("up")

    def _known(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads(STATE.read_text())
        return known

    def _servers(self, action: str) -> None:
        command = [str(ROOT / "scripts/servers"), action, "nfs"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
