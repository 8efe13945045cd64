"""Restrictions of a process: system calls by a filter of the kernel, memory, threads and files by limits.

Only for processes that end with the test, such as ranks of `tests.ranks`: no restriction can be lifted.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from itertools import islice
from pathlib import Path

# By machine: its number in the kernel, and the numbers of the calls.
_CALLS = {
    "x86_64": (
        0xC000003E,
        {
            "clone": 56,
            "clone3": 435,
            "copy_file_range": 326,
            "fadvise64": 221,
            "fallocate": 285,
            "madvise": 28,
            "memfd_create": 319,
            "mlock": 149,
            "pidfd_open": 434,
            "sched_setaffinity": 203,
            "setpriority": 141,
            "unshare": 272,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "clone": 220,
            "clone3": 435,
            "copy_file_range": 285,
            "fadvise64": 223,
            "fallocate": 47,
            "madvise": 233,
            "memfd_create": 279,
            "mlock": 228,
            "pidfd_open": 434,
            "sched_setaffinity": 122,
            "setpriority": 140,
            "unshare": 97,
        },
    ),
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CAP_SYS_ADMIN, _NEW_MOUNTS, _PRIVATE, _READ_ONLY = 21, 0x20000, 0x44000, 1

KNOWN = platform.machine() in _CALLS
"""Whether system calls can be refused here."""


def refuse(calls: dict[str, int]) -> None:
    """Make these system calls fail in this thread and in everything that it starts."""
    machine, numbers = _CALLS[platform.machine()]
    # offsets in the kernel's `struct seccomp_data`: 0 is the call's number, 4 the machine
    rules = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for name, error in calls.items():
        rules += [(_JUMP_IF_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | error)]
    rules.append((_RETURN, 0, 0, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, head, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter")


def may_mount() -> bool:
    """Return whether this process could `hide` folders."""
    return os.geteuid() == 0 and bool(_capabilities() >> _CAP_SYS_ADMIN & 1)


def _capabilities() -> int:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index("CapEff:") + 1], 16)


def hide(*folders: str) -> None:
    """Make folders look empty and read-only to this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.unshare(_NEW_MOUNTS) or libc.mount(None, b"/", None, _PRIVATE, None)
    for folder in folders:
        done = done or libc.mount(b"none", folder.encode(), b"tmpfs", _READ_ONLY, None)
    if done:
        raise OSError(ctypes.get_errno(), f"cannot hide {folders}")


def leave_memory(nbytes: int) -> None:
    """Limit the addresses of this process to `nbytes` more than it has now."""
    fields = Path("/proc/self/status").read_text().split()
    most = int(fields[fields.index("VmSize:") + 1]) * 1024 + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def leave_files(number: int) -> None:
    """Limit the open files of this process to `number` more than it has now."""
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    free = (fd for fd in range(1 << 20) if fd not in used)
    most = next(islice(free, number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leave_threads(number: int) -> None:
    """Limit this process and its children to `number` more threads; root becomes another user for that.

    The limit counts all processes of a user, and so this becomes a user that has no other process.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (number + 1, number + 1))
    user = 1 << 20 | os.getpid()
    os.setresuid(user, user, user)
