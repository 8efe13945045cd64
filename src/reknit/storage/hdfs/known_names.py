"""Names in HDFS: their spelling, and a cache of the existing names."""

from __future__ import annotations

import re
from collections import OrderedDict

from reknit.storage.writing import TakenNames

_ESCAPED = re.compile(r"%(?=(?:25)*3A)")
_MOST_FOLDERS = 256


def encoded(path: str) -> str:
    """Return a path as it stands in HDFS, which does not allow colons: ``%3A`` stands for a colon."""
    return _ESCAPED.sub("%25", path).replace(":", "%3A")


def decoded(path: str) -> str:
    """Return the path whose spelling in HDFS is `path`."""
    return re.sub(r"%((?:25)*)3A", lambda match: f"%{match[1][2:]}3A" if match[1] else ":", path)


class HdfsNames(TakenNames):
    """The files that this process is writing, and a cache of the existing names in each folder.

    So each folder is listed once, and no name is looked up by itself.  Files that other processes create
    meanwhile are not in the cache; they are found when a file gets its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folders: OrderedDict[str, set[str]] = OrderedDict()

    def is_listed(self, folder: str) -> bool:
        """Return whether a folder has been listed."""
        with self._lock:
            return folder in self._folders

    def set_names(self, folder: str, names: set[str]) -> None:
        """Note the names in an existing folder."""
        self.add(folder)
        with self._lock:
            self._folders[folder] = names
            self._folders.move_to_end(folder)
            if len(self._folders) > _MOST_FOLDERS:
                self._folders.popitem(last=False)

    def taken(self, path: str) -> bool:
        """Return whether a name existed when it was last seen."""
        folder, _, name = path.rpartition("/")
        with self._lock:
            return name in self._folders.get(folder, ())

    def add(self, path: str) -> None:
        """Note that a file or folder exists, and with it all folders above."""
        with self._lock:
            while path:
                folder, _, name = path.rpartition("/")
                if folder in self._folders:
                    self._folders[folder].add(name)
                path = folder

    def drop(self, path: str) -> None:
        """Note that a file or folder is gone."""
        folder, _, name = path.rpartition("/")
        with self._lock:
            self._folders.pop(path, None)
            if folder in self._folders:
                self._folders[folder].discard(name)
