"""Which saves are under way below a folder, and may yet commit?  Wait for them, or keep them from it.

A save may commit as long as its marker is in the folder of its checkpoint (docs/decisions/0007).  A save that
was killed leaves its marker too.  A marker does not say on which host its agents run, and nobody can see the
agents of other hosts, so the two cannot be told apart from outside.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.run_record import newest_run, open_run
from reknit.engine.saving.commit import size_of
from reknit.engine.stored.running_agents import at_work
from reknit.errors import DeadlineError, StorageError, StoragePermissionError
from reknit.format import paths
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reknit.engine.stored.running_agents import AtWork
    from reknit.storage.base import Listed, Storage

logger = logging.getLogger("reknit")

_PAUSES_S = (0.05, 2.0)
_MOST_NAMED = 4


class Begun(NamedTuple):
    """A save that may yet commit: its folder, the marker in it, and the generation of its run."""

    folder: Storage
    path: str
    generation: int

    @property
    def url(self) -> str:
        """Where the marker is."""
        return f"{self.folder.url}/{self.path}"


def begun_in(folder: Storage, files: Iterable[Listed] | None = None) -> list[Begun]:
    """Return the saves that may yet commit in a checkpoint's folder, by its `files` (default: all)."""
    listing = folder.list() if files is None else files
    names = {listed.path: paths.parse_path(listed.path) for listed in listing}
    return [
        Begun(folder, path, name.generation)
        for path, name in names.items()
        if name is not None and name.generation is not None
    ]


def wait_for_saves(root: Storage, timeout_s: float) -> None:
    """Wait until all saves directly below a folder are committed or have failed.

    Saves of this host are waited for from when they are staged, those of other hosts from when their markers
    are up.  A marker of a killed save is waited for until the timeout: agents of another host may still
    commit it.  Raises `DeadlineError` naming what is still there.
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
    """Keep all saves directly below a folder that have put up their marker from ever committing.

    A save that is staged but whose agents have not put up its marker yet is kept from it only where it is of
    a `Checkpointer`.  Where agents of this host are still at work, that is logged; those of other hosts
    cannot be seen.
    """
    if newest_run(root) >= 0:
        open_run(root, 0)
    for begun in _begun_below(root):
        begun.folder.delete(begun.path)
    if working := at_work(root.url):
        logger.warning(
            "agents of this host are at work below %s: %s; what they put up a marker for from now on may "
            "commit: end them first, then fence again",
            root.url,
            _processes(working),
        )


def named(begun: Sequence[Begun]) -> str:
    """Return where markers are, as text, those of the newest runs first."""
    newest = sorted(begun, key=lambda each: (-each.generation, each.url))
    more = f" and {len(begun) - _MOST_NAMED} more" if len(begun) > _MOST_NAMED else ""
    return ", ".join(each.url for each in newest[:_MOST_NAMED]) + more


def _processes(agents: Sequence[AtWork]) -> str:
    return f"processes {sorted({agent.pid for agent in agents})}"


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
