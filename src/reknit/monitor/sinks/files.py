"""Which file does a process write its events to?"""

from __future__ import annotations

import os

from reknit.monitor.records import HOST


def file_of_process(path: str | os.PathLike[str], suffix: str) -> str:
    """Return `path`, or the file of this process in it if it is a folder, which is made where it is missing.

    A folder is one that exists, or a path that ends in a slash.
    """
    text = os.fspath(path)
    if not is_folder(text):
        return text
    os.makedirs(text, exist_ok=True)
    return os.path.join(text, f"{HOST}-{os.getpid()}.{suffix}")


def is_folder(path: str) -> bool:
    """Tell whether a path names a folder."""
    return path.endswith(os.sep) or os.path.isdir(path)


def absolute(path: str) -> str:
    """Return what means the same from any current folder; a path that ends in a slash still does."""
    return os.path.join(os.path.abspath(path), "") if path.endswith(os.sep) else os.path.abspath(path)
