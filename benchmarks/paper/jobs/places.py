"""Where do the checkpoints of a table lie?  In a folder of the disk, and on HDFS if it is up or can be."""

from __future__ import annotations

import json
import subprocess
import uuid
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STATE = ROOT / ".servers" / "hdfs.json"
UP_S = 120.0


def hdfs() -> tuple[str, str]:
    """Return the URL of a new folder on HDFS, or "" and the reason.

    The server is started if it is not up, and stays up.
    """
    if find_spec("hdfs_native") is None:
        return "", "hdfs-native is not installed"
    if not STATE.exists():
        try:
            subprocess.run(
                [ROOT / "scripts" / "servers", "up", "hdfs"], check=True, timeout=UP_S, capture_output=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            return "", f"scripts/servers up hdfs: {error}"
    if not STATE.exists():
        return "", "scripts/servers up hdfs started no server"
    return f"{json.loads(STATE.read_text())['endpoint']}/paper-{uuid.uuid4().hex[:12]}", ""
