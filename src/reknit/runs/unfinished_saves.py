"""Unfinished saves of an earlier run: wait for their agents, and fence the saves that remain."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from reknit.engine.record.at_path import manifest_in
from reknit.engine.record.late_commits import fence
from reknit.engine.record.marker import begun_in
from reknit.engine.stored.running_agents import at_work
from reknit.engine.stored.steps import numbered
from reknit.errors import FormatError
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from reknit.engine.record.line import Line
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

_PAUSE_S = 0.2
_SILENT_S = 1.0
"""Length of a wait without a line in the log."""
_READ_S = 30.0
"""Longest wait for an agent without a save, which may still have to read a message about its last save.

It may also belong to another run, and stay idle.
"""


def wait_for_agents(root: Storage, timeout_s: float) -> None:
    """Wait for agents of this host that work below a folder; agents of other hosts cannot be seen."""
    deadline, reading = Deadline(timeout_s), Deadline(min(timeout_s, _READ_S))
    silent: Deadline | None = Deadline(_SILENT_S)
    while working := at_work(root.url):
        writing = sorted({agent.pid for agent in working if agent.path is not None})
        if (deadline if writing else reading).passed():
            break
        if silent is not None and silent.passed():
            silent = None
            logger.info(
                "waiting up to %.0f s for agents of an earlier run on this host, which may yet write below "
                "%s: processes %s",
                *((deadline if writing else reading).remaining(), root.url),
                writing or sorted({agent.pid for agent in working}),
            )
        time.sleep(_PAUSE_S)
    if working and writing:
        logger.warning("agents are still writing below %s: processes %s", root.url, writing)


def forbid_markers(root: Storage, line: Line, since: int | None = None) -> None:
    """Delete the markers of saves newer than the newest step of a line, or from the step `since` on.

    A save cannot commit after that.  Markers of older steps stay, because a run does not resume from
    these.  A run that did not resume begins with the step `since`.
    """
    for number, name in numbered(root):
        folder = root.sub(name)
        if since is None and _is_on(line, number, folder):
            return
        if since is not None and number < since:
            return
        for begun in begun_in(folder):
            fence(begun)
            logger.warning(
                "step %d of an earlier run was not finished, and will not be: %s", number, folder.url
            )


def _is_on(line: Line, number: int, folder: Storage) -> bool:
    """Return whether a folder holds the step of its number, on a line."""
    try:
        manifest = manifest_in(folder)
    except FormatError:
        return False
    return manifest is not None and manifest.step == number and line.holds(manifest.generation, number)
