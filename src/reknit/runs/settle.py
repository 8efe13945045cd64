"""What an earlier run has begun: wait for it, or keep it from committing behind the back of a new run."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from reknit.engine.saving.commit import manifest_exists
from reknit.engine.stored.pending import begun_in
from reknit.engine.stored.running_agents import at_work
from reknit.engine.stored.steps import numbered
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

_PAUSE_S = 0.2


def settle(root: Storage, timeout_s: float) -> None:
    """Let no save of an earlier run commit a newer step than those that are there when this returns.

    Agents of this host are waited for; those of other hosts cannot be seen.  Then the markers of steps that
    are newer than the newest committed one are removed, without which a save cannot commit.  Older steps are
    left alone: they are not what a run resumes from.
    """
    deadline = Deadline(timeout_s)
    # One that its trainer has left, without a save, may not have read yet what it was given last.
    while (working := at_work(root.url)) and not deadline.passed():
        time.sleep(_PAUSE_S)
    if working:
        pids = sorted({agent.pid for agent in working})
        logger.warning("agents are still writing below %s: processes %s", root.url, pids)
    for number, name in numbered(root):
        folder = root.sub(name)
        if manifest_exists(folder):
            return
        for begun in begun_in(folder):
            folder.delete(begun.path)
            logger.warning(
                "step %d of an earlier run was not finished, and will not be: %s", number, folder.url
            )
