"""The XML dialect of Google Cloud Storage, by a proxy of our own in front of the S3 server.

It is no emulator: it shows that requests have the right form, and what is stored behaves as SeaweedFS does.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path

from _process import free_ports, spawn

ABOUT = "GCS's XML dialect, in front of the S3 server"
AFTER = ("s3",)
TIMEOUT_S = 20

SHIM = Path(__file__).with_name("_gcs_shim.py")


def install(home: Path) -> None:
    """Nothing is needed."""


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it."""
    behind = home / "s3.json"
    behind.write_text(json.dumps(running["s3"]))
    (port,) = free_ports(1)
    return {
        "pids": [spawn([sys.executable, str(SHIM), str(port), str(behind)], home / "log")],
        "log": str(home / "log"),
        "endpoint": f"http://127.0.0.1:{port}",
        "bucket": running["s3"]["bucket"],
    }


def ready(server: dict) -> None:
    """List the bucket, through both."""
    connection = http.client.HTTPConnection(server["endpoint"].removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", f"/{server['bucket']}?list-type=2&max-keys=1")
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise RuntimeError(f"{server['endpoint']} answers {error!r}") from error
    finally:
        connection.close()
    if status != 200:
        raise RuntimeError(f"{server['endpoint']} answers {status}")
