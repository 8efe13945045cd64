"""How much memory can this process still get, on this machine and within its control groups?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def available_nbytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can still get; `root` has the folders of the system."""
    machine = _fields(root / "proc/meminfo").get("MemAvailable:")
    if machine is not None:
        free = machine * 1024
    else:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *_group_rooms(root)]))


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield the rest of the limit of each control group of this process, of either version.

    Pages of files that were not used lately count as free, as in MemAvailable, because reading data and
    writing checkpoints fills the group with them.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        kinds, _, path = line.partition(":")[2].partition(":")
        if not kinds:
            top, limit, usage, cold = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cold = "total_inactive_file"
        else:
            continue
        inner = Path(path.lstrip("/"))
        # In a container the path may be that of the host, which is not mounted; this group is then the top.
        for group in (inner, *inner.parents):
            folder = root / top / group
            most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdecimal() and used.isdecimal():
                yield int(most) - int(used) + _fields(folder / "memory.stat").get(cold, 0)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name, a number, and perhaps a unit."""
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""  # another kind of system, or not readable: other sources answer
