"""Processes that outlive the script which started them, and are found again by their ids."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

GRACE_S = 5


def spawn(
    command: list[str], log: Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> list[int]:
    """Start a process in a session of its own, and return its id and the moment of its start.

    An id alone says nothing for long: the kernel gives it to others.
    """
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
            close_fds=True,
        )
    started = _started(process.pid)
    return [process.pid, -1 if started is None else started]


def runs(pid: list[int]) -> bool:
    """Tell whether this very process runs."""
    return _started(pid[0]) == pid[1]


def stop(server: dict) -> None:
    """End a server's processes with all that they have started, and remove what they leave."""
    pids = server["pids"]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in pids if runs(pid)]
        for pid in left:
            _signal(pid[0], sign)
        end = time.monotonic() + GRACE_S
        while any(runs(pid) for pid in left) and time.monotonic() < end:
            time.sleep(0.05)
    for path in server.get("leaves", ()):
        Path(path).unlink(missing_ok=True)


def free_ports(number: int) -> list[int]:
    """Return ports of loopback that nobody uses, below those that the kernel gives to connections."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found


def pip_install(target: Path, *packages: str) -> None:
    """Install packages into a folder of their own, unless these very ones are there."""
    wanted, told = "\n".join(packages), target / "installed"
    if told.exists() and told.read_text() == wanted:
        return
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    run([*pip, "--upgrade", "--target", str(target), *packages])
    told.write_text(wanted)


def apt_install(*packages: str) -> None:
    """Install packages of Debian, after whoever does that at this moment."""
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
    run([*apt, "update", "-q"])
    run([*apt, "install", "-y", "-q", "--no-install-recommends", *packages])


def apt_unpack(target: Path, package: str) -> None:
    """Unpack a package of Debian into a folder, so that no service of it is started."""
    with tempfile.TemporaryDirectory() as folder:
        run(["apt-get", "update", "-q"])
        run(["apt-get", "download", "-q", package], cwd=Path(folder))
        (found,) = Path(folder).glob("*.deb")
        run(["dpkg-deb", "--extract", str(found), str(target)])


def run(command: list[str], cwd: Path | None = None, timeout_s: float = 600) -> None:
    """Run a command to its end; raise RuntimeError with what it said when it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, timeout=timeout_s, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{command[0]} could not do it: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed: {(done.stderr or done.stdout)[-800:]}")


def _signal(pid: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, sign)  # it leads a group of its own


def _started(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did; None when it is gone or dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
