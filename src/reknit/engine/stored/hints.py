"""Hints for a path that holds no checkpoint: files of other programs, and other paths to try."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from reknit import plugins
from reknit.engine.stored.recognising import is_of_others, manifest_exists
from reknit.errors import CheckpointNotFoundError, StorageError, UsageError, did_you_mean
from reknit.events.phase import Deadline
from reknit.format import paths
from reknit.types.small import Foreign

if TYPE_CHECKING:
    from reknit.storage.base import Listed, Storage

logger = logging.getLogger("reknit")

MOST_FOREIGN = 1_000
"""Files of a folder that are looked at before it is held to be of another program."""
_DEPTH = 3
_MOST_FOLDERS = 2_000
_LOOK_S = 2.0
_NEWEST = 16
"""Folders of a folder, the last by name, that are looked at for a checkpoint."""
_MOST_NAMED = 3


def formats() -> Any:
    """Return the module that recognises the checkpoints of other programs."""
    return plugins.find("reknit.formats", plugins.ANY)


def opener() -> Any:
    """Return the module that opens the checkpoints of other programs."""
    return plugins.find("reknit.formats", "any-read")


def foreign(storage: Storage) -> Foreign | None:
    """Return the kind of files that another program has saved at a path, None if it is unknown."""
    return cast("Foreign | None", formats().recognise(storage))


def foreign_manifest(storage: Storage) -> Foreign | None:
    """Return the kind of a folder with a file that has the name of a manifest, but is not shown to be one."""
    if not is_of_others(storage):
        return None
    return Foreign(
        f"a folder with a {paths.MANIFEST_PATH} that nothing shows to be of reknit",
        "pass the folder of a checkpoint of reknit; if this one was that, restore its manifest from a copy",
    )


def no_checkpoint(storage: Storage) -> CheckpointNotFoundError:
    """Return the error of a path without a checkpoint; it names the files that are there instead."""
    message = f"there is no committed checkpoint at {storage.url}"
    if (other := foreign(storage) or foreign_manifest(storage)) is not None:
        message, remedy = f"{message}: it is {other.what}", other.remedy
    else:
        remedy = suggestion(storage)
    return CheckpointNotFoundError(message, path=storage.url, remedy=remedy)


def absent(root: Storage, what: str = "there is no checkpoint at") -> CheckpointNotFoundError:
    """Return the error of a path without the checkpoints that were expected.  Raises as `refuse_other`."""
    refuse_other(root)
    message = f"{what} {root.url}"
    if (other := foreign_manifest(root)) is not None:
        return CheckpointNotFoundError(f"{message}: it is {other.what}", path=root.url, remedy=other.remedy)
    remedy = elsewhere(
        root, "pass the folder that holds the checkpoints, such as runs for runs/step_00000010"
    )
    return CheckpointNotFoundError(message, path=root.url, remedy=remedy)


def refuse_other(root: Storage, *, of_run: bool = False) -> None:
    """Raise `UsageError` for a path that does not lead to a folder of checkpoints.

    A None instead would make the job start anew, which a user who named a checkpoint does not want.  The
    folder `of_run` may have weights from which the run starts.
    """
    if manifest_exists(root):
        raise UsageError(
            f"{root.url} is a checkpoint, and latest looks for checkpoints in a folder",
            remedy=f"load it as it is, or pass the folder above: {root.url.rpartition('/')[0] or '/'}",
            path=root.url,
        )
    if (other := foreign(root)) is not None and (
        other.is_file or not of_run or not formats().is_start(root, "", other.kind)
    ):
        raise UsageError(
            f"{root.url} is not a folder of checkpoints: it is {other.what}",
            remedy=other.remedy,
            path=root.url,
        )


def foreign_inside(storage: Storage) -> str | None:
    """Name the files of another program in a folder, or in the last ones below; None if they are unknown."""
    if (run := formats().run_of_others(storage)) is not None:
        return f"it is {run.what}; {run.remedy}"
    if (found := formats().newest_of_others(storage)) is not None:
        return f"{found[0]} in it is {found[1].what}; {found[1].remedy}"
    return None


def warn_of_others(root: Storage) -> None:
    """Log a warning if a folder without a checkpoint holds those of another program."""
    if (other := foreign_inside(root)) is not None:
        logger.warning("there is no checkpoint of reknit in %s: %s", root.url, other)


def of_others(replica: Storage) -> str:
    """Return a clause about a replica with the files of another program, empty without such files."""
    try:
        other = foreign(replica)
    except StorageError:
        return ""
    return "" if other is None else f"; the replica {replica.url} is {other.what}"


def suggestion(storage: Storage) -> str:
    """Return the remedy for a path that holds no checkpoint: the path that a user may have meant."""
    if (inside := _newest_in(storage)) is not None:
        return (
            f"it holds checkpoints: did you mean {storage.url}/{inside}?  `reknit ls` lists them, and "
            "reknit.latest finds the newest"
        )
    if _begun(storage):
        return "it holds files of a save that never committed; load an older checkpoint"
    if (other := foreign_inside(storage)) is not None:
        return f"pass the folder of a checkpoint that reknit saved: {other}"
    return elsewhere(
        storage, "pass the folder of a checkpoint: nothing that reknit saved is at or below this one"
    )


def _begun(storage: Storage) -> bool:
    """Return whether a folder holds files of reknit, as far as a short look by this user shows it."""
    try:
        return bool(own_files(storage, Deadline(_LOOK_S)).files)
    except StorageError:
        return False


def elsewhere(storage: Storage, otherwise: str) -> str:
    """Return a remedy that names checkpoints below a path, or in a folder of a similar name.

    If a short look finds no checkpoint, the remedy is `otherwise`.
    """
    if runs := runs_below(storage):
        more = ", and maybe in others" if len(runs) == _MOST_NAMED else ""
        return f"there are checkpoints in {', '.join(runs)}{more}: pass that folder"
    return _missing(storage.url) or otherwise


def runs_below(root: Storage) -> list[str]:
    """Return up to three folders below that hold checkpoints, the highest first, as a short look finds them.

    It goes three folders deep, into no hidden ones, and ends after 2,000 folders or two seconds.
    """
    deadline, left = Deadline(_LOOK_S), _MOST_FOLDERS
    found: list[str] = []
    level = [root]
    for _ in range(_DEPTH + 1):
        below: list[Storage] = []
        for folder in level:
            left -= 1
            if deadline.passed() or left < 0 or len(found) == _MOST_NAMED:
                return found
            if folder is not root and _newest_in(folder) is not None:
                found.append(folder.url)
            else:
                below += _folders(folder)
        level = below
    return found


class OwnFiles(NamedTuple):
    """Files that reknit wrote below a folder; without `is_whole`, the search ended before all were seen."""

    files: list[Listed]
    is_whole: bool


def own_files(storage: Storage, deadline: Deadline | None = None) -> OwnFiles:
    """Return the files below a folder that reknit wrote, of a checkpoint or of a save.

    If none of the first thousand files is of reknit, or none before the deadline, the folder is of another
    program.  It may be as large as a disk, so the search ends.
    """
    files: list[Listed] = []
    for number, listed in enumerate(storage.list()):
        name = paths.parse_path(listed.path)
        if name is not None and name.write_id8 is not None:  # a manifest may be of anybody
            files.append(listed)
        elif not files and (number >= MOST_FOREIGN or (deadline is not None and deadline.passed())):
            return OwnFiles(files, is_whole=False)
    return OwnFiles(files, is_whole=True)


def _newest_in(folder: Storage) -> str | None:
    """Return the last folder in a folder, by name, that holds a checkpoint; None without one."""
    try:
        names = folder.folders()[-_NEWEST:]
    except StorageError:
        return None
    return next((name for name in reversed(names) if _is_checkpoint(folder, name)), None)


def _folders(folder: Storage) -> list[Storage]:
    """Return the folders in a folder, as far as they can be opened, but for hidden ones."""
    found = []
    try:
        for name in folder.folders():
            if not name.startswith("."):
                found.append(folder.sub(name))
    except StorageError:  # closed to this user, or a name that no store takes
        pass
    return found


def _missing(url: str) -> str | None:
    """Name the missing part of a local path, and names that it resembles; None if the path exists."""
    if not os.path.isabs(url) or os.path.exists(url):
        return None
    missing = url
    while not os.path.isdir(above := os.path.dirname(missing)):
        missing = above
    try:
        names = sorted(os.listdir(above))
    except OSError:
        names = []
    shown = ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED)
    )
    question = did_you_mean(os.path.basename(missing), names) or f"{above} holds {shown or 'nothing'}"
    return f"{missing} does not exist: {question}"


def _is_checkpoint(storage: Storage, folder: str) -> bool:
    """Return whether a folder holds a checkpoint, as far as it can be read."""
    try:
        return manifest_exists(storage.sub(folder))
    except StorageError:  # a name that no store takes
        return False
