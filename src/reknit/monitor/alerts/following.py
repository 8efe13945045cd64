"""What have all ranks written to a folder of events since the last look?"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from reknit.monitor.records import record_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.monitor.records import Record

_MOST_NBYTES = 16 << 20
"""Bytes of one file that are read at one look."""


class Following:
    """A folder of files with lines of JSON, and how far each has been read."""

    def __init__(self, folder: str) -> None:
        """Begin with what is written from now on."""
        self._folder = folder
        self._read = {path: size for path, size in self._sizes()}

    def news(self) -> Iterator[Record]:
        """Yield what was written since the last call."""
        for path, size in self._sizes():
            begin = self._read.get(path, 0)
            if size <= begin:
                continue
            try:
                with open(path, "rb") as file:
                    file.seek(begin)
                    found = file.read(min(size - begin, _MOST_NBYTES))
            except OSError:
                continue  # gone, or out of reach for a while
            whole = found.rfind(b"\n") + 1
            if not whole and len(found) == _MOST_NBYTES:
                whole = len(found)  # no line is so long
            self._read[path] = begin + whole
            for line in found[:whole].splitlines():
                try:
                    yield record_of(json.loads(line))
                except (ValueError, TypeError):
                    continue  # the last line of a process that was killed, or of another version

    def _sizes(self) -> list[tuple[str, int]]:
        try:
            with os.scandir(self._folder) as entries:
                return [
                    (entry.path, entry.stat().st_size) for entry in entries if entry.name.endswith(".jsonl")
                ]
        except OSError:
            return []  # not there yet
