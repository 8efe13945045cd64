"""What a save depends on beside its arguments: read in the trainer at the call, and set in its agent."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from reknit.environment import all_variables, fsspec_config, take_variables
from reknit.errors import DeadlineError
from reknit.monitor.phase import Deadline
from reknit.system import umask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.background.agent_save import AgentSave


class Circumstances(msgspec.Struct, array_like=True):
    """What is true of a whole process, and decides what its saves write and where.

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
    return Circumstances(
        umask(),
        folder,
        all_variables(),
        [os.fsencode(entry) for entry in sys.path if isinstance(entry, str)],
        None if temporary is None else os.fsencode(temporary),
        fsspec_config() or "",  # stores that need settings which only this process has are served by it
    )


class Adapting:
    """The circumstances of an agent's process, which become those of each save that begins."""

    def __init__(self) -> None:
        self._current: Circumstances | None = None
        self._due: Circumstances | None = None

    def adapt(self, due: Circumstances | None, earlier: Sequence[AgentSave], timeout_s: float) -> None:
        """Set the circumstances of a save that begins, None for those of the save before it.

        `earlier` are the saves under way.  They are committed first, and another umask waits for their
        promotions, too.  Other promotions need only what their stores were opened with.  Raises
        `DeadlineError`, and then the next save tries it again.
        """
        self._due = due or self._due
        if self._due is None:
            return
        promoted = self._current is not None and self._current.umask != self._due.umask
        deadline = Deadline(timeout_s)
        for save in earlier:
            if not save.wait(deadline.remaining(), promoted=promoted):
                changed = "umask" if promoted else "environment"
                raise DeadlineError(
                    f"the {changed} has changed, and save {save.number} to {save.url}, which needs the old "
                    f"one, was not over within {timeout_s:g} s",
                    remedy="change it when no save or promotion is under way, or raise timeout_s",
                )
        for save in earlier:
            save.open_targets()
        _set(self._current, self._due)
        self._current, self._due = self._due, None


def _set(old: Circumstances | None, new: Circumstances) -> None:
    """Make the circumstances of another process those of this one."""
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
