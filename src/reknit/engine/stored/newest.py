"""Which of several checkpoints side by side is the newest?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.record.at_path import manifest_in
from reknit.engine.record.line import Line
from reknit.engine.record.marker import begun_in, named
from reknit.engine.record.other_formats import own_files, refuse_other, warn_of_others
from reknit.engine.record.run_record import read_line
from reknit.errors import FormatError, StorageError, StoragePermissionError

if TYPE_CHECKING:
    from reknit.engine.record.marker import Begun
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")


class _Age(NamedTuple):
    """The order of checkpoints; one without a step is older than all that have one."""

    step: int
    created: float
    url: str
    generation: int


def newest(root: Storage) -> str | None:
    """Return the path of the newest checkpoint directly below a folder, or None.

    A folder whose manifest is damaged or closed to this user is passed over with a warning.  A store that
    fails is an error: an older checkpoint in place of the newest would be lost work.  Steps that a run gave
    up when it went back to an earlier one do not count.  A warning names the saves that are under way, of the
    run that made the newest or of a later one.
    """
    begun: list[Begun] = []
    ages = [age for name in root.folders() if (age := _age(root, name, begun)) is not None]
    line = read_line(root)[1] if ages else Line()
    line = line.begun([(age.generation, age.step) for age in ages])
    ages = [age for age in ages if age.step < 0 or line.holds(age.generation, age.step)]
    since = max(ages).generation if ages else -1
    if later := [each for each in begun if each.generation >= since]:
        logger.warning(
            "saves below %s are under way, or were killed, and may yet commit: %s; "
            "latest(root, pending='wait') waits for them, and pending='fence' keeps them from it",
            root.url,
            named(later),
        )
    if ages:
        return max(ages).url
    refuse_other(root)
    warn_of_others(root)
    return None


def folder_in(root: Storage, name: str) -> Storage | None:
    """Return a folder that a store has listed; None, with a warning, for a name that it does not take."""
    try:
        return root.sub(name)
    except StorageError as error:
        logger.warning("passed over %r in %s: %s", name, root.url, error.message)
        return None


def _age(root: Storage, name: str, begun: list[Begun]) -> _Age | None:
    """Return the age of the checkpoint in a folder, None without one or with an unreadable manifest.

    Without a checkpoint, the saves under way there are added to `begun`.
    """
    if (folder := folder_in(root, name)) is None:
        return None
    try:
        if (manifest := manifest_in(folder)) is None:
            begun += begun_in(folder, own_files(folder).files)
            return None
    except (FormatError, StoragePermissionError) as error:
        logger.warning("passed over %s: %s", folder.url, error.message)
        return None
    step = -1 if manifest.step is None else manifest.step
    generation = -1 if manifest.generation is None else manifest.generation
    return _Age(step, manifest.created, folder.url, generation)
