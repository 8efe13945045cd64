"""Another process that owns the folder of a run, and the waits of this one, without any real time."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from reknit.engine.stored.heartbeat import Heartbeat
from reknit.engine.stored.run_record import newest_record, open_run
from reknit.errors import StorageNotFoundError
from reknit.format import paths
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage


LONG_S = 60.0


class Waits:
    """The waits of this process, each of which lets the clock go on at once, and calls `during`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ahead_s = 0.0
        self.during: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.during()

    def time(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.seconds


def act_as(patch: pytest.MonkeyPatch, host: str, pid: int, *, in_container: bool = False) -> None:
    """Let this process open folders as another one, of another host or of a container on this one."""
    patch.setattr("reknit.engine.stored.run_record._process", uuid.uuid4().hex)
    if in_container or host != socket.gethostname():
        patch.setattr("reknit.engine.stored.run_record._pids", lambda: "a boot.7")
    patch.setattr("reknit.engine.stored.run_record.socket.gethostname", lambda: host)
    patch.setattr("reknit.engine.stored.run_record.os.getpid", lambda: pid)


def has_ended(root: Storage, record: str) -> bool:
    """Return whether the end of a run is marked."""
    return paths.sign_path(record, "end") in {each.path for each in root.list(paths.RUN_FOLDER)}


class Owner:
    """A process that has opened a folder, on another host or this one, whose heart a test beats."""

    def __init__(self, url: Path | str, host: str = "elsewhere", pid: int = 7, **more: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            act_as(patch, host, pid, **more)
            self.url, self.root = str(url), open_storage(url)
            self.record = open_run(self.root, 0)
        self.heart = Heartbeat(open_storage)
        self.heart.records = {self.url: self.record}

    @property
    def about(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.root.get(self.record, limit=1 << 20))
        return found

    @property
    def beats(self) -> bytes | None:
        """The content of the beat, None without one."""
        try:
            return self.root.get(self.path_of("beat"), limit=1 << 20)
        except StorageNotFoundError:
            return None

    @property
    def has_ended(self) -> bool:
        return has_ended(self.root, self.record)

    def path_of(self, sign: Literal["beat", "end"]) -> str:
        return paths.sign_path(self.record, sign)

    def beat(self, *, ends: bool = False) -> None:
        self.heart.beat(self.url, ends=ends)

    def owns(self) -> bool:
        return newest_record(self.root) == self.record

    def age(self, seconds: float) -> None:
        """Let the last beat be so long ago, by the clock of the file system."""
        path, then = Path(self.url, self.path_of("beat")), time.time() - seconds
        os.utime(path, (then, then))
