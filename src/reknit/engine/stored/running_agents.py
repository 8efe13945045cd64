"""Which agents of this host are at work, and for which checkpoints?

An agent keeps a note of that in memory whose name stands among its descriptors in /proc.  So whoever may look
there (the same user, or root) can read it, at any time and whatever the agent does, and nothing is left of it
when the agent ends, however that comes about.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reknit.engine.background.agent_save import AgentSave

MODULE = "reknit.engine.background.agent"
"""What an agent's process runs."""

_NOTE = "reknit-at-work"
_NBYTES = struct.Struct("<Q")
_LOOKS = 8


class AtWork(NamedTuple):
    """An agent that may yet make a checkpoint exist at `path`.

    `path` and `since` are None for one whose trainer is gone, and that says nothing of what it will do: it is
    about to end, or to find out.
    """

    pid: int
    rank: int | None
    path: str | None
    since: float | None


class Note:
    """What the process of an agent says about itself; nothing on a system without nameless memory."""

    def __init__(self) -> None:
        self._fd = -1
        self._lock = threading.Lock()
        with suppress(AttributeError, OSError):
            self._fd = os.memfd_create(_NOTE, os.MFD_CLOEXEC)

    def tell(self, rank: int, errands: Mapping[int, AgentSave]) -> None:
        """Say which saves there are, and where each goes."""
        with self._lock:
            if self._fd == -1:
                return
            saves = [[errand.since, path] for errand in list(errands.values()) for path in errand.places]
            said = json.dumps([rank, saves]).encode()
            with suppress(OSError):  # no memory for it: the work itself goes on
                os.pwrite(self._fd, _NBYTES.pack(len(said)) + said, 0)

    def close(self) -> None:
        """Say no more."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


def at_work(root: str) -> list[AtWork]:
    """Return the agents of this host at work for checkpoints at or below `root`, as far as we may see them.

    Agents that are threads of a trainer are not found: they end with it.
    """
    return sorted(
        (agent for agent in _agents() if agent.path is None or _is_below(agent.path, root)),
        key=lambda agent: (agent.pid, agent.path or ""),
    )


def _agents() -> Iterator[AtWork]:
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if command[1:3] != [b"-m", MODULE.encode()]:
                continue
            # After the name of the program, which may hold anything, and the state.
            parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]
            rank, saves = _note_of(pid) or (None, [])
        except OSError:  # gone meanwhile, or not ours to look at
            continue
        for since, path in saves:
            yield AtWork(pid, rank, path, since)
        if not saves and parent != command[4]:
            yield AtWork(pid, rank, None, None)


def _note_of(pid: int) -> tuple[int, list[tuple[float, str]]] | None:
    """Return what an agent says of itself, None where that cannot be known."""
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:{_NOTE}"):
                return _read(f"{folder}/{number}")
    return None


def _read(path: str) -> tuple[int, list[tuple[float, str]]] | None:
    for _ in range(_LOOKS):  # it may be written at this moment
        with open(path, "rb") as file:
            data = file.read()
        with suppress(ValueError, struct.error):
            (nbytes,) = _NBYTES.unpack_from(data)
            said: Any = json.loads(data[_NBYTES.size :][:nbytes])
            return said[0], said[1]
    return None


def _is_below(path: str, root: str) -> bool:
    path, root = (place if "://" in place else os.path.realpath(place) for place in (path, root))
    return path == root or path.startswith(root.rstrip("/") + "/")
