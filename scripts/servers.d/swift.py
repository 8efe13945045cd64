"""An S3 server that knows no conditional writes, and answers 501: OpenStack Swift, four processes.

It is asked without its cache: the S3 door needs none, and does without one that does not answer.
"""

from __future__ import annotations

import base64
import email.utils
import getpass
import hashlib
import hmac
import http.client
import shutil
import sys
from pathlib import Path

from _process import free_ports, pip_install, run, spawn

ABOUT = "OpenStack Swift with its S3 door, which refuses conditional writes"
AFTER = ()
TIMEOUT_S = 60

PACKAGE = "swift==2.35.0"  # from 2.36 on it knows one of the two conditions
ACCOUNT, USER, SECRET = "test", "tester", "testing"
BUCKET = "reknit"
PARTS = ("account", "container", "object")
NODE = Path(__file__).with_name("_swift_node.py")
RING = Path(__file__).with_name("_swift_ring.py")

SHARED = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
log_level = CRITICAL
user = {user}
swift_dir = {folder}
log_address = {folder}/no-such-socket
devices = {folder}/devices
mount_check = false
fallocate_reserve = 0
"""
STORAGE = """
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{nobody}
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{tester} = {secret} .admin
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""


def install(home: Path) -> None:
    """Get the programs."""
    pip_install(home / "package", PACKAGE)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Lay out an empty cluster of one disk, and start its processes."""
    folder, paths = home / "data", {"PYTHONPATH": str(home / "package")}
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "devices/one").mkdir(parents=True)
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n")
    proxy, nobody, *ports = free_ports(2 + len(PARTS))
    shared = {"user": getpass.getuser(), "folder": folder}
    for name, port in zip(PARTS, ports, strict=True):
        (folder / f"{name}.conf").write_text((SHARED + STORAGE).format(name=name, port=port, **shared))
        ring = [sys.executable, str(RING), str(folder / f"{name}.ring.gz"), str(port), "one"]
        run(["env", f"PYTHONPATH={paths['PYTHONPATH']}", *ring])
    keys = {"account": ACCOUNT, "tester": USER, "secret": SECRET, "nobody": nobody}
    told = SHARED.format(port=proxy, **shared) + PROXY.format(**keys)
    (folder / "proxy.conf").write_text(told)
    pids = [
        spawn([sys.executable, str(NODE), str(folder), name], home / "log", paths, cwd=home)
        for name in (*PARTS, "proxy")
    ]
    return {
        "pids": pids,
        "log": str(home / "log"),
        "endpoint": f"http://127.0.0.1:{proxy}",
        "access_key_id": f"{ACCOUNT}:{USER}",
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "bucket": BUCKET,
    }


def ready(server: dict) -> None:
    """Make the bucket; it may be there."""
    path, date = f"/{server['bucket']}", email.utils.formatdate(usegmt=True)
    signed = hmac.digest(SECRET.encode(), f"PUT\n\n\n{date}\n{path}".encode(), hashlib.sha1)
    who = f"AWS {server['access_key_id']}:{base64.b64encode(signed).decode()}"
    connection = http.client.HTTPConnection(server["endpoint"].removeprefix("http://"), timeout=10)
    try:
        connection.request("PUT", path, headers={"Date": date, "Authorization": who, "Content-Length": "0"})
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise RuntimeError(f"{server['endpoint']} answers {error!r}") from error
    finally:
        connection.close()
    if status not in (200, 409):
        raise RuntimeError(f"{server['endpoint']} answers {status} where a bucket is to be made")
