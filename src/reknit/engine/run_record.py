"""The record of a run: which run owns a folder of steps, the last that opened it for writing?

Each run that opens the folder puts a file there whose name is its generation, higher than those before, and
deletes theirs.  A save of a run puts its marker up before it reads this record (`saving.marker`), and who
opens the folder deletes markers after it has put its record there.  So of two runs that meet, either the
older one finds the record, or the newer one its marker.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import FencedError, FormatError, StorageError
from reknit.format import paths
from reknit.monitor.phase import now

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.storage.base import Storage

_MOST_NBYTES = 4096


class Run(NamedTuple):
    """A run, as its saves carry it: what opens the store of its folder, and its generation."""

    open: Callable[[], Storage]
    generation: int

    def check(self) -> None:
        """Raise `FencedError` where a newer run has opened the folder."""
        with closing(self.open()) as root:
            newest = newest_run(root)
            if newest <= self.generation:
                return
            raise FencedError(
                f"a newer run (generation {newest}{_who(root, newest)}) has opened {root.url}; this process "
                f"belongs to generation {self.generation} and commits nothing there any more",
                path=f"{root.url}/{paths.run_path(newest)}",
                remedy="end this process if that run has taken its place; if not, give each run a folder of "
                "its own (an evaluation reads with `load`, which does not open the folder for writing)",
            )


def folder_above(url: str) -> str:
    """Return the place of the folder of a run, of whose steps one is at `url`."""
    place, mark, options = url.partition("?") if "://" in url else (url, "", "")
    return f"{place.rstrip('/').rpartition('/')[0]}{mark}{options}"


def open_run(root: Storage, at_least: int) -> int:
    """Open a folder of steps for writing, as the newest run there, and return its generation.

    That is `at_least` so high, and higher than those of the runs before, whatever clocks say.  From then on
    no save of an earlier run can put up a marker there.  Raises `StorageError`.
    """
    while True:
        older = _recorded(root)
        generation = max(at_least, max(older, default=-1) + 1)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "opened": now()}
        mine = paths.run_path(generation)
        if not root.put(mine, json.dumps(about).encode(), if_absent=True):
            continue
        if newest_run(root) > generation:  # opened at the same moment, by a later one
            root.delete(mine)
            continue
        for each in older:
            root.delete(paths.run_path(each))
        return generation


def newest_run(root: Storage) -> int:
    """Return the generation of the run that has opened a folder last, -1 if none has."""
    return max(_recorded(root), default=-1)


def _recorded(root: Storage) -> list[int]:
    """Return the generations of the runs that are on record."""
    found = (paths.run_generation(listed.path) for listed in root.list(paths.RUN_FOLDER))
    return [generation for generation in found if generation is not None]


def _who(root: Storage, generation: int) -> str:
    """Return who opened a run, for messages."""
    try:
        about = json.loads(root.get(paths.run_path(generation), limit=_MOST_NBYTES))
        return f", process {int(about['pid'])} of {str(about['host'])[:64]}"
    except (StorageError, FormatError, ValueError, KeyError, TypeError):
        return ""
