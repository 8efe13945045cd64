"""The files, mappings and threads of this process, by which a test shows that it left none behind.

Each function returns a set.  Take one before, and compare with ``<=`` afterwards, which allows that others
close files or end threads meanwhile: `assert open_files() <= before`.
"""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a size such as ``8m``, or skip the test."""
    target = folder / "disk"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "reknit-test", str(target)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small file system takes root: {error}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def open_files(containing: str = "") -> set[str]:
    """Return the open descriptors of this process, each with its target and the inode.

    Only the inode distinguishes a new file from a closed one: numbers of descriptors are used again, and all
    nameless memory has the same name.
    """
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
            inode = os.stat(f"/proc/self/fd/{fd}").st_ino
        except FileNotFoundError:  # that of the listing itself, or closed meanwhile
            continue
        if containing in target and target != "anon_inode:[eventfd]":  # gRPC makes one after a fork
            found.add(f"{fd} -> {target} (inode {inode})")
    return found


def mapped(containing: str = "reknit-memory") -> dict[str, int]:
    """Return the mappings of files so named, by their addresses, with their sizes in bytes."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if containing in line:
            addresses = line.split()[0]
            first, last = addresses.split("-")
            found[addresses] = int(last, 16) - int(first, 16)
    return found


def threads(prefix: str = "") -> set[threading.Thread]:
    """Return the running threads whose names begin so."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(prefix)}


def shared_memory() -> set[str]:
    """Return the names in shared memory, without the folders and torch's own, which other processes make."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("torch_")}
