"""What a process can be denied: system calls by a filter of the kernel, memory, threads and files by limits.

For processes that are made to be spoilt, such as ranks of `tests.ranks`: nothing of it can be taken back.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from itertools import islice
from pathlib import Path

# By machine: what the kernel calls it, and the numbers of the calls.
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
"""Whether the calls of this machine can be refused here."""


def refuse(calls: dict[str, int]) -> None:
    """Have the kernel answer these system calls of this thread, and of all that it starts, with an error."""
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
    """Have folders empty, and closed to what is new, for this process and all that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.unshare(_NEW_MOUNTS) or libc.mount(None, b"/", None, _PRIVATE, None)
    for folder in folders:
        done = done or libc.mount(b"none", folder.encode(), b"tmpfs", _READ_ONLY, None)
    if done:
        raise OSError(ctypes.get_errno(), f"cannot hide {folders}")


def leave_memory(nbytes: int) -> None:
    """Let this process have so many bytes of addresses more than it has, and none after that."""
    fields = Path("/proc/self/status").read_text().split()
    most = int(fields[fields.index("VmSize:") + 1]) * 1024 + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def leave_files(number: int) -> None:
    """Let this process open so many more files."""
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    free = (fd for fd in range(1 << 20) if fd not in used)
    most = next(islice(free, number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def leave_threads(number: int) -> None:
    """Let this process have so many threads and processes; root must become somebody else for that.

    That somebody is nobody, and must not be met twice: the limit is of all processes of a user.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (number + 1, number + 1))
    user = 1 << 20 | os.getpid()
    os.setresuid(user, user, user)
