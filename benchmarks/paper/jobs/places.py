"""The places of the checkpoints of a table: a folder of the disk, or a server, which is started."""

from __future__ import annotations

import json
import subprocess
import uuid
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SERVERS = ROOT / ".servers"
UP_S = 120.0


def hdfs() -> tuple[str, str]:
    """Return the URL of a new folder on HDFS, or "" and the reason."""
    if find_spec("hdfs_native") is None:
        return "", "hdfs-native is not installed"
    if why := started("hdfs"):
        return "", why
    endpoint = json.loads((SERVERS / "hdfs.json").read_text())["endpoint"]
    return f"{endpoint}/paper-{uuid.uuid4().hex[:12]}", ""


def started(server: str) -> str:
    """Start a server if it is not up, and leave it up; return the reason if that fails, else ""."""
    state = SERVERS / f"{server}.json"
    if not state.exists():
        command = [str(ROOT / "scripts" / "servers"), "up", server]
        try:
            subprocess.run(command, check=True, timeout=UP_S, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"scripts/servers up {server}: {error}"
    return "" if state.exists() else f"scripts/servers up {server} started no server"
