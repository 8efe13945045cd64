"""The properties of a whole process that can be handed over: umask, folder, variables, places of modules."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from contextlib import suppress

import msgspec

from reknit.environment import all_variables, fsspec_config, take_variables
from reknit.system import umask


class Circumstances(msgspec.Struct, array_like=True):
    """The properties of a process on which, beside its arguments, the result of a save depends.

    The variables are the secrets of this user, on their way to another process of this user; nothing may log
    them.  Names are bytes, as the system has them.
    """

    umask: int
    folder: bytes | None
    """The working folder; None where it was removed."""
    variables: dict[bytes, bytes]
    search_path: list[bytes]
    temporary: bytes | None
    """The folder that `tempfile` has chosen; None before its first use."""
    fsspec: str
    """The settings of fsspec, as JSON; empty without any."""

    def __repr__(self) -> str:
        return f"Circumstances(umask={self.umask:o}, folder={self.folder!r}, {len(self.variables)} variables)"


def here() -> Circumstances:
    """Return the circumstances of this process."""
    folder = None
    with suppress(OSError):
        folder = os.getcwdb()
    temporary = tempfile.tempdir
    entries: list[object] = [*sys.path]
    return Circumstances(
        umask=umask(),
        folder=folder,
        variables=all_variables(),
        search_path=[os.fsencode(entry) for entry in entries if isinstance(entry, str)],
        temporary=None if temporary is None else os.fsencode(temporary),
        # Without a text of them, this process itself serves the stores that need these settings.
        fsspec=fsspec_config() or "",
    )


def take(new: Circumstances, old: Circumstances | None) -> None:
    """Adopt the circumstances of another process in this agent, which had `old` of them before."""
    os.umask(new.umask)
    if new.folder is not None:
        with suppress(OSError):  # removed since, or closed to this process: absolute paths need no folder
            os.chdir(new.folder)
    take_variables(new.variables)
    tempfile.tempdir = None if new.temporary is None else os.fsdecode(new.temporary)
    sys.path[:] = [os.fsdecode(entry) for entry in new.search_path]
    importlib.invalidate_caches()
    if new.fsspec or "fsspec.config" in sys.modules:
        _set_fsspec(new.fsspec)
    if old is not None and (registry := sys.modules.get("fsspec.registry")):
        # Connected file systems are kept by their arguments alone, and these may have old credentials.
        for system in set(registry.registry.values()):
            with suppress(Exception):  # anybody's class
                system.clear_instance_cache()


def _set_fsspec(settings: str) -> None:
    with suppress(ImportError):
        from fsspec import config

        config.conf.clear()
        config.conf.update(json.loads(settings) if settings else {})
