"""Identify this host, the reach of its sockets, and whether another of its processes has ended."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from reknit.environment import host_name

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host() -> str:
    """Return the name of this host, which no other host has.

    It is the value of REKNIT_HOST, or else the name of the machine, the id of its boot and its network
    namespace.  So two containers of one machine are two hosts unless they share a network.
    """
    if (name := host_name()) is not None:
        return name
    parts = [socket.gethostname()]
    with suppress(OSError):  # a system without these distinguishes its hosts by name
        parts.append(_BOOT_ID.read_text(encoding="ascii").strip())
        parts.append(_namespace("net"))
    return " ".join(parts)


def reach() -> str:
    """Return the name that processes share if they reach each other's sockets in private folders.

    It holds their user and their mount namespace, which differs between containers that share a network.  It
    is empty if the system does not show these.
    """
    with suppress(OSError):
        return f"{os.geteuid()} {_namespace('mnt')}"
    return ""


def process() -> str:
    """Return the name of this process for other processes of its machine; empty if the system has none."""
    with suppress(OSError):
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot_id} {_namespace('pid')} {os.getpid()}"
    return ""


def has_ended(other: str) -> bool:
    """Return whether the process with this name has ended; False if that is not visible from here."""
    space, _, number = other.rpartition(" ")
    if not space or space != process().rpartition(" ")[0]:
        return False
    import psutil

    try:
        os.kill(int(number), 0)
        return psutil.Process(int(number)).status() == psutil.STATUS_ZOMBIE
    except ProcessLookupError:
        return True
    except (OSError, ValueError, psutil.Error):
        return False


def _namespace(kind: str) -> str:
    return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
