"""A second S3 server: the gateway of Ceph, with the smallest cluster behind it."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import http.client
import shutil
import uuid
from typing import TYPE_CHECKING

from _process import apt_install, free_ports, run, spawn, stop

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "Ceph, an S3 server"
AFTER = ()
TIMEOUT_S = 120

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool", "radosgw", "radosgw-admin")
PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common")
KEY = "reknit-test"
SECRET = "not-a-secret-it-opens-only-a-server-for-tests"
BUCKET = "reknit"
KEYS = {
    "mon.": ["--cap", "mon", "allow *"],
    "client.admin": ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"],
    "client.rgw": ["--cap", "mon", "allow *", "--cap", "osd", "allow *"],
    "osd.0": ["--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"],
}
CONF = """
[global]
fsid = {fsid}
keyring = {home}/keyring
mon host = v2:127.0.0.1:{mon}
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
osd crush update on start = false
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
osd memory target = 939524096
admin socket =
run dir = {home}/data
crash dir = {home}/data
log file =
log to stderr = true
err to stderr = true
debug ms = 0
[mon.a]
mon data = {home}/data/mon
[osd.0]
osd data = {home}/data/osd
osd objectstore = bluestore
bluestore block create = true
bluestore block size = 8589934592
bluestore fsck on mount = false
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{rgw}
rgw enable usage log = false
rgw verify ssl = false
"""


def install(home: Path) -> None:
    """Get the programs."""
    if any(shutil.which(program) is None for program in PROGRAMS):
        apt_install(*PACKAGES)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Make a new cluster of one monitor and one disk, and start them and the gateway."""
    shutil.rmtree(home / "data", ignore_errors=True)
    for name in ("mon", "osd"):
        (home / "data" / name).mkdir(parents=True)
    fsid, disk = str(uuid.uuid4()), str(uuid.uuid4())
    mon, rgw = free_ports(2)
    conf = home / "ceph.conf"
    conf.write_text(CONF.format(home=home, fsid=fsid, mon=mon, rgw=rgw))
    with_conf = ["-c", str(conf)]
    (home / "keyring").unlink(missing_ok=True)
    for name, caps in KEYS.items():
        create = [] if (home / "keyring").exists() else ["--create-keyring"]
        run(["ceph-authtool", str(home / "keyring"), *create, "--gen-key", "-n", name, *caps])
    monmap = str(home / "data/monmap")
    run(["monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon}]", monmap])
    run(["ceph-mon", *with_conf, "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", str(home / "keyring")])
    server = {
        "pids": [spawn(["ceph-mon", *with_conf, "-i", "a", "-f"], home / "log", cwd=home)],
        "log": str(home / "log"),
        "endpoint": f"http://127.0.0.1:{rgw}",
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
        "bucket": BUCKET,
        "conf": str(conf),
    }
    try:
        _ceph(server, "osd", "new", disk)
        _ceph(server, "auth", "import", "-i", str(home / "keyring"))
        _ceph(server, "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=one")
        run(["ceph-osd", *with_conf, "-i", "0", "--mkfs", "--osd-uuid", disk])
        for command in (
            ["ceph-osd", *with_conf, "-i", "0", "-f"],
            ["radosgw", *with_conf, "-n", "client.rgw", "-f"],
        ):
            server["pids"].append(spawn(command, home / "log", cwd=home))
    except BaseException:
        stop(server)
        raise
    return server


def ready(server: dict) -> None:
    """Make the user and the bucket, where they are not there yet."""
    _ask(server, "GET", "/")
    path = f"/{server['bucket']}"
    if _ask(server, "HEAD", path) == 200:
        return
    access = [f"--access-key={KEY}", f"--secret-key={SECRET}"]
    user = ["radosgw-admin", "-c", server["conf"], "user", "create", "--uid=test", "--display-name=test"]
    run([*user, *access], timeout_s=60)
    if (status := _ask(server, "PUT", path)) != 200:
        raise RuntimeError(f"the gateway answers {status} where a bucket is to be made")


def _ceph(server: dict, *words: str) -> None:
    run(["ceph", "-c", server["conf"], "--connect-timeout", "30", *words], timeout_s=60)


def _ask(server: dict, method: str, path: str) -> int:
    """Send a request, signed in the old way, which is short, and return the status of the answer."""
    date = email.utils.formatdate(usegmt=True)
    text = f"{method}\n\n\n{date}\n{path}"
    digest = base64.b64encode(hmac.digest(SECRET.encode(), text.encode(), hashlib.sha1)).decode()
    connection = http.client.HTTPConnection(server["endpoint"].removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, headers={"Date": date, "Authorization": f"AWS {KEY}:{digest}"})
        return connection.getresponse().status
    except http.client.HTTPException as error:
        raise RuntimeError(f"the gateway answers {error!r}") from error
    finally:
        connection.close()
