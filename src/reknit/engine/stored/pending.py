"""Which saves are under way below a folder, and may yet commit?  Wait for them, or keep them from it.

A save may commit as long as its marker is in the folder of its checkpoint (docs/decisions/0007).  A save that
was killed leaves its marker too.  A marker does not name the hosts of its agents, and agents of other hosts
are not visible, so the two look the same from outside.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine.record.at_path import size_of
from reknit.engine.record.late_commits import fence
from reknit.engine.record.marker import RETURNS_WITHIN_S, Begun, begun_in, named
from reknit.engine.stored.running_agents import at_work
from reknit.errors import DeadlineError, StorageError, StoragePermissionError
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.stored.running_agents import AtWork
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

_PAUSES_S = (0.05, 2.0)


def wait_for_saves(root: Storage, timeout_s: float) -> None:
    """Wait until all saves directly below a folder are committed or have failed.

    Saves of this host are waited for from when they are staged, those of other hosts from when their markers
    are up.  A marker of a killed save is waited for until the timeout: agents of another host may still
    commit it.  Raises `DeadlineError` that names the saves left.
    """
    deadline, pause_s = Deadline(timeout_s), _PAUSES_S[0]
    waited_for, working = _begun_below(root), at_work(root.url)
    while waited_for or working:
        if deadline.passed():
            here = _processes(working) if working else "no agent"
            raise DeadlineError(
                f"saves below {root.url} were not over within {timeout_s:g} s: "
                f"{named(waited_for) or 'no marker is up yet'}; at work on this host: {here}",
                path=root.url,
                remedy="wait longer; or, if the processes of that run are dead on all hosts, keep its saves "
                "from ever committing with latest(root, pending='fence')",
            )
        time.sleep(min(pause_s, deadline.remaining()))
        pause_s = min(_PAUSES_S[1], pause_s * 1.5)
        if working and not (working := at_work(root.url)):
            waited_for = _begun_below(root)
        else:
            waited_for = [each for each in waited_for if size_of(each.folder, each.path) is not None]


def fence_off(root: Storage) -> None:
    """Fence all saves directly below a folder that have put their marker: they can never commit.

    A save that just begins may put its marker again, as if a rival had removed it.  So this takes some
    seconds, and looks again until no marker returns.

    A staged save without a marker is not fenced.  A warning names the agents of this host that are still at
    work; agents of other hosts cannot be seen.
    """
    begun = _begun_below(root)
    while begun:
        for each in begun:
            fence(each)
        time.sleep(RETURNS_WITHIN_S)
        begun = [again for each in begun for again in begun_in(each.folder) if again.save == each.save]
    if working := at_work(root.url):
        logger.warning(
            "agents of this host are at work below %s: %s; saves whose markers they put from now on may "
            "commit: end them first, then fence again",
            root.url,
            _processes(working),
        )


def _processes(agents: Sequence[AtWork]) -> str:
    own, pids = os.getpid(), sorted({agent.pid for agent in agents})
    return f"processes {', '.join(f'{pid} (this one)' if pid == own else str(pid) for pid in pids)}"


def _begun_below(root: Storage) -> list[Begun]:
    found: list[Begun] = []
    for name in root.folders():
        try:
            folder = root.sub(name)
        except StorageError:  # a name that no store takes
            continue
        with suppress(StoragePermissionError):  # `newest` passes such a folder over
            found += begun_in(folder)
    return found
