"""Stores that agents import, and that note the context of the process that opens them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsspec import config
from fsspec.implementations.local import LocalFileSystem

from reknit.storage.local.store import LocalStorage
from reknit.system import umask

if TYPE_CHECKING:
    from reknit.options import Durability

WAIT_S = 60.0
NAMES = ("TRIED", "AWS_SESSION_TOKEN", "HTTPS_PROXY")
HELD = "held"
"""The file beside a checkpoint that keeps its store from being written to."""


def seen() -> dict[str, Any]:
    """Return the context of this process."""
    return {
        "umask": umask(),
        "folder": os.getcwd(),
        "variables": [repr(os.environ.get(name)) for name in NAMES],
        "search path": list(sys.path),
        "temporary": tempfile.gettempdir(),
        "fsspec": dict(config.conf),
    }


class SeenStorage(LocalStorage):
    """A folder whose files are not made while a file `HELD` is beside it."""

    def create(self, path: str, nbytes: int) -> Any:
        """Start a new file, when it may be."""
        deadline = time.time() + WAIT_S
        while (Path(self.url).parent / HELD).exists() and time.time() < deadline:
            time.sleep(0.01)
        return super().create(path, nbytes)


def open_seen(url: str, durability: Durability) -> SeenStorage:
    """Open a folder, and note the context beside it."""
    folder = Path("/", url.partition("://")[2])
    folder.parent.mkdir(parents=True, exist_ok=True)
    noted = folder.parent / f"{folder.name}.{os.getpid()}.json"
    noted.write_text(json.dumps(seen()))
    return SeenStorage(folder, durability="process")


def noted(folder: Path, pid: int) -> dict[str, Any]:
    """Return the context in which a process opened a folder last."""
    found: dict[str, Any] = json.loads((folder.parent / f"{folder.name}.{pid}.json").read_text())
    return found


class Ours(LocalFileSystem):  # type: ignore[misc]
    """A file system of fsspec whose URLs are absolute paths."""

    protocol = "ours"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(f"/{path.partition('://')[2]}"))
