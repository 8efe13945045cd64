"""Linux's own NFS server and clients, in user-mode Linux: a machine that is a process of this one.

It exports a disk image, and mounts it as two hosts would, as NFS 3 and 4.2.  Its files cannot be reached from
outside, so tests run inside: a file ``NAME.job`` in the spool is a shell script whose first line,
``# SECONDS``, says how long it may take; when it is over, ``NAME.code`` holds its exit status, and
``NAME.said`` what it printed.  The script finds the disk itself in $DISK and the mounts in $VIEWS: a-v3,
a-v4, b-v3, b-v4 (of the hosts a and b), and others, see ``_nfs_init``.  The root of the machine is that of
this one, read-only.

The disk is empty at first.  Where there is a file ``keep``, it is used once as it is, as after a power cut.
The machine goes down by itself when nothing was run in it for an hour.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path

from _process import apt_install, run, spawn

ABOUT = "Linux's NFS server and clients, in user-mode Linux"
AFTER = ()
TIMEOUT_S = 120

PROGRAMS = (
    "linux.uml",
    "rpc.nfsd",
    "rpc.mountd",
    "exportfs",
    "mount.nfs",
    "rpcbind",
    "ip",
    "mkfs.ext4",
    "modprobe",
)
PACKAGES = ("user-mode-linux", "kmod", "nfs-kernel-server", "nfs-common", "rpcbind", "iproute2", "e2fsprogs")
MODULES = Path("/usr/lib/uml/modules")
DISK_NBYTES = 1 << 30
SMALL_NBYTES = 96 << 20
MEMORY = "1500M"


def install(home: Path) -> None:
    """Get the programs, and put the modules where they are looked for."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if any(shutil.which(program, path=path) is None for program in PROGRAMS):
        apt_install(*PACKAGES)
    below = home / "root/lib"
    below.mkdir(parents=True, exist_ok=True)
    if not (below / "modules").is_symlink():
        (below / "modules").symlink_to(MODULES)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it."""
    if (home / "keep").exists():
        (home / "keep").unlink()
    else:
        for name, nbytes in (("disk", DISK_NBYTES), ("small", SMALL_NBYTES)):
            (home / name).unlink(missing_ok=True)
            with open(home / name, "wb") as file:
                file.truncate(nbytes)
            run(["/sbin/mkfs.ext4", "-q", "-F", str(home / name)])
    shutil.rmtree(home / "spool", ignore_errors=True)
    (home / "spool").mkdir()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # it is a file there, without a name
    init = Path(__file__).resolve().parent / "_nfs_init"
    command = [
        str(shutil.which("linux.uml")),
        f"mem={MEMORY}",
        *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"),
        *(f"ubd0={home / 'disk'}", f"ubd1={home / 'small'}"),
        *("con=null", "con0=fd:0,fd:1", "ssl=null", "quiet"),
        *(f"init={init}", "--", str(home)),
    ]
    return {
        "pids": [spawn(command, home / "log", {"TMPDIR": memory}, cwd=home)],
        "log": str(home / "log"),
        "endpoint": str(home / "spool"),
        "home": str(home),
    }


def ready(server: dict) -> None:
    """See that a file can be written through each version."""
    spool = Path(server["endpoint"])
    if not (spool / "ready").exists():
        raise RuntimeError("it is starting")
    job = f"ready-{uuid.uuid4().hex[:8]}"
    script = (
        '# 10\nfor view in a-v3 b-v4; do echo x >"$VIEWS/$view/ready" || exit; done; rm -f "$DISK/ready"\n'
    )
    (spool / f"{job}.new").write_text(script)
    (spool / f"{job}.new").rename(spool / f"{job}.job")
    end = time.monotonic() + 15
    while not (spool / f"{job}.code").exists():
        if time.monotonic() > end:
            raise RuntimeError("it does not run commands")
        time.sleep(0.02)
    if (spool / f"{job}.code").read_text().strip() != "0":
        raise RuntimeError((spool / f"{job}.said").read_text())
    for path in spool.glob(f"{job}.*"):
        path.unlink()
