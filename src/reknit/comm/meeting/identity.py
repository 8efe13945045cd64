"""Identify this host, who can reach its sockets, and whether another of its processes has ended."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from reknit.environment import host_name

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host() -> str:
    """Return what the ranks of this host have in common, and those of others do not.

    That is what REKNIT_HOST says; else the name of the machine, the id of its boot and its network namespace,
    so that two containers of one machine are two hosts unless they share a network.
    """
    if (name := host_name()) is not None:
        return name
    parts = [socket.gethostname()]
    with suppress(OSError):  # a system without these tells its hosts apart by name
        parts.append(_BOOT_ID.read_text(encoding="ascii").strip())
        parts.append(_namespace("net"))
    return " ".join(parts)


def reach() -> str:
    """Return what processes of one host share that reach each other's sockets in private folders.

    That is their user and their mount namespace, which differs between containers that share a network.
    Empty where it cannot be told.
    """
    with suppress(OSError):
        return f"{os.geteuid()} {_namespace('mnt')}"
    return ""


def process() -> str:
    """Return what names this process to the others of its machine; empty where it cannot be told."""
    with suppress(OSError):
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot_id} {_namespace('pid')} {os.getpid()}"
    return ""


def has_ended(other: str) -> bool:
    """Tell whether the process that named itself so has ended; false where that cannot be seen from here."""
    space, _, number = other.rpartition(" ")
    if not space or space != process().rpartition(" ")[0]:
        return False
    try:
        os.kill(int(number), 0)
        return psutil.Process(int(number)).status() == psutil.STATUS_ZOMBIE
    except ProcessLookupError:
        return True
    except (OSError, ValueError, psutil.Error):
        return False


def _namespace(kind: str) -> str:
    return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
