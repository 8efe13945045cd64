"""The agents of this host that are at work, and the checkpoints of each.

An agent keeps a note of its saves in memory that /proc lists among its descriptors.  The same user, and root,
can read it at any time, without the agent's help.  It is gone when the agent ends, also when it is killed.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MODULE = "reknit.engine.background.agent"
"""The module that an agent's process runs."""

_NOTE = "reknit-at-work"
_NBYTES = struct.Struct("<Q")
_LOOKS = 8


class AtWork(NamedTuple):
    """An agent that may yet commit a checkpoint at `path`, or this process before its agent has read of it.

    `path` and `since` are None for an agent without saves whose trainer is gone.  It is about to end, unless
    the trainer sent it a save that it has not read yet.
    """

    pid: int
    rank: int | None
    path: str | None
    since: float | None


unanswered: dict[object, Sequence[str]] = {}
"""The URLs of each save that this process has sent to an agent, whose note may lack it yet."""


class NotedSave(Protocol):
    """A save as a note has it: its time of begin, and all places to which it goes."""

    since: float

    @property
    def places(self) -> Sequence[str]:
        """URLs of the checkpoint, and of the places to which it is promoted."""


class Note:
    """The note of an agent's process about itself; nothing on a system without nameless memory."""

    def __init__(self) -> None:
        self._fd = -1
        self._lock = threading.Lock()
        with suppress(AttributeError, OSError):
            self._fd = os.memfd_create(_NOTE, os.MFD_CLOEXEC)

    def write(self, rank: int, saves: Mapping[int, NotedSave]) -> None:
        """Record the saves in the note, with the places of each."""
        with self._lock:
            if self._fd == -1:
                return
            noted = [[save.since, path] for save in list(saves.values()) for path in save.places]
            record = json.dumps([rank, noted]).encode()
            with suppress(OSError):  # no memory for the note: the saves go on
                os.pwrite(self._fd, _NBYTES.pack(len(record)) + record, 0)

    def close(self) -> None:
        """Close the note; later writes do nothing."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


def at_work(root: str) -> list[AtWork]:
    """Return the agents of this host that work for checkpoints at or below `root`, if this user can see them.

    This process is among them while its agent has not read of a save.  Agents that are threads of a trainer
    are not found: they end with it.
    """
    own = [AtWork(os.getpid(), None, url, None) for urls in list(unanswered.values()) for url in urls]
    return sorted(
        (agent for agent in (*own, *_agents()) if agent.path is None or is_below(agent.path, root)),
        key=lambda agent: (agent.pid, agent.path or ""),
    )


def _agents() -> Iterator[AtWork]:
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if command[1:3] != [b"-m", MODULE.encode()]:
                continue
            # After the name of the program, which may have parentheses and spaces, and the state.
            parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]
            left = _own_number(parent.decode()) != command[4].decode()
            rank, saves = read_note(pid) or (None, [])
        except OSError:  # the process has ended, or belongs to another user
            continue
        for since, path in saves:
            yield AtWork(pid, rank, path, since)
        if not saves and left:
            yield AtWork(pid, rank, None, None)


def _own_number(pid: str) -> str | None:
    """Return the number of a process in its own namespace, such as a container; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((line.split()[-1] for line in lines if line.startswith("NSpid:")), pid)


def read_note(pid: int) -> tuple[int, list[tuple[float, str]]] | None:
    """Return the note of an agent about itself, None if it cannot be read."""
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
            record: Any = json.loads(data[_NBYTES.size :][:nbytes])
            return record[0], record[1]
    return None


def is_below(path: str, root: str) -> bool:
    """Return whether a path is that of a folder or lies in it, with all links followed."""
    path, root = (place if "://" in place else os.path.realpath(place) for place in (path, root))
    return path == root or path.startswith(root.rstrip("/") + "/")


os.register_at_fork(after_in_child=unanswered.clear)
