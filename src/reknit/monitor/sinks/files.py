"""Which file does a process write its events to?"""

from __future__ import annotations

import os
from contextlib import suppress

from reknit.locations import local_path
from reknit.monitor.records import HOST


def file_of_process(path: str | os.PathLike[str], suffix: str) -> str:
    """Return `path`, or the file of this process in it if it is a folder; make folders that are missing."""
    text = local_path(path, "events go to")
    file = os.path.join(text, f"{HOST}-{os.getpid()}.{suffix}") if is_folder(text) else text
    with suppress(FileNotFoundError):
        os.stat(file)  # a path that is too long fails here, before its folders are made
    os.makedirs(os.path.dirname(file) or os.curdir, exist_ok=True)
    return file


def is_folder(path: str) -> bool:
    """Tell whether a path names a folder.

    It does where there is one, where it ends in a slash, and where nothing is there yet and the name has no
    suffix: of a run that is about to begin, events must not be a file in the place of its folder.
    """
    if path.endswith(os.sep) or os.path.isdir(path):
        return True
    return not os.path.splitext(path)[1] and not os.path.lexists(path)


def absolute(path: str) -> str:
    """Return what means the same from any current folder; a path that ends in a slash still does."""
    return os.path.join(os.path.abspath(path), "") if path.endswith(os.sep) else os.path.abspath(path)
