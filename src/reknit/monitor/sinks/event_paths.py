"""Which file does a process write its events to?"""

from __future__ import annotations

import os
from contextlib import suppress

from reknit.locations import local_path
from reknit.monitor.records import HOST


def file_of_process(path: str | os.PathLike[str], suffix: str) -> str:
    """Return `path`, or the file of this process in it if it is a folder; make missing folders."""
    text = local_path(path, "events go to")
    file = os.path.join(text, f"{HOST}-{os.getpid()}.{suffix}") if is_folder(text) else text
    with suppress(FileNotFoundError):
        os.stat(file)  # a path that is too long fails here, before its folders are made
    os.makedirs(os.path.dirname(file) or os.curdir, exist_ok=True)
    return file


def is_folder(path: str) -> bool:
    """Return whether a path names a folder.

    It does if the folder exists, if the path ends in a slash, and if nothing exists there and the name has no
    suffix.  The events of a new run must not become a file in the place of its folder.
    """
    if path.endswith(os.sep) or os.path.isdir(path):
        return True
    return not os.path.splitext(path)[1] and not os.path.lexists(path)


def absolute(path: str) -> str:
    """Return an absolute path, which still ends in a slash if `path` does."""
    with suppress(OSError):  # the current folder may be gone
        return os.path.join(os.path.abspath(path), "") if path.endswith(os.sep) else os.path.abspath(path)
    return path
