"""Finds out whose files are in the folder of a run of Lightning, before a training begins in it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.engine.foreign.programs import is_start, newest_of_others
from reknit.engine.record.foreign_folders import checkpoint_of_others, run_of_others
from reknit.engine.record.recognising import manifest_exists
from reknit.engine.record.run_record import read_line
from reknit.engine.stored.steps import numbered
from reknit.errors import CheckpointExistsError, ReknitError, UsageError
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from reknit.storage.base import Storage

_SUFFIX = ".ckpt"


class FolderContents(NamedTuple):
    """The contents of the folder of a run: numbers of its steps, and whether a run has opened it."""

    steps: tuple[int, ...]
    is_opened: bool


def contents(root: str) -> FolderContents:
    """Return the contents of a folder."""
    with closing(open_storage(root)) as storage:
        steps = tuple(number for number, name in numbered(storage) if manifest_exists(storage.sub(name)))
        return FolderContents(steps, is_opened=read_line(storage)[0] >= 0)


def refuse_others(root: str, files: Any) -> None:
    """Raise `UsageError` if a folder without steps has checkpoints of Lightning, or of another program.

    `files` is the file system of fsspec in which the folder is.
    """
    if newest := _newest_file(root, files):
        raise UsageError(
            f"{root} has no step of reknit, but checkpoints of Lightning; the newest is {newest}",
            path=root,
            remedy=f"pass ckpt_path={newest!r} to go on from it; to begin at step 0, give ReknitCheckpoint "
            "another dirpath, or resume=False",
        )
    with closing(open_storage(root)) as storage:
        if (what := _others(storage)) is not None:
            raise UsageError(
                f"{root} has no step of reknit, but {what}",
                path=root,
                remedy="give ReknitCheckpoint another dirpath; or load the weights with reknit.load, and "
                "pass resume=False to begin at step 0 beside these files",
            )


def refuse_later(root: str, step: int) -> None:
    """Raise `CheckpointExistsError` if a run has saved steps after the one after which a training begins.

    Raises `UsageError` for a folder that is a checkpoint.
    """
    with closing(open_storage(root)) as storage:
        if manifest_exists(storage):
            raise UsageError(
                f"{root} is itself a checkpoint, and no folder for the steps of a run",
                path=root,
                remedy="give ReknitCheckpoint another dirpath, such as the folder above",
            )
    if later := [number for number in contents(root).steps if number > step]:
        raise CheckpointExistsError(
            f"{root} has the steps of an earlier run up to {max(later)}, and this training begins after step "
            f"{step}",
            path=root,
            remedy='pass ckpt_path="last" to fit, to go on after the newest; or give ReknitCheckpoint '
            "another dirpath; or later_steps='move', which puts those steps aside, or 'replace', which "
            "removes them",
        )


def _newest_file(root: str, files: Any) -> str | None:
    """Return the newest file, or folder, with a name as Lightning gives it to its checkpoints."""
    try:
        names = [str(name) for name in files.ls(root, detail=False) if str(name).endswith(_SUFFIX)]
    except OSError:
        return None
    newest = max(names, key=files.modified, default=None)
    # The names of a remote file system lack the scheme, without which Lightning finds a local file.
    return newest if newest is None or "://" not in root else str(files.unstrip_protocol(newest))


def _others(storage: Storage) -> str | None:
    """Return a description of checkpoints of other programs in a folder, or in folders of it; or None."""
    for found in (checkpoint_of_others(storage), run_of_others(storage)):
        if found is not None and not is_start(storage, "", found.kind):
            return found.what
    other = newest_of_others(storage, works=True)
    return None if other is None else f"{other[0]} in it is {other[1].what}"


def first_error(*checks: Any) -> ReknitError | None:
    """Return the error of the first check that raises one, to raise it on all ranks."""
    for check in checks:
        try:
            check()
        except ReknitError as error:
            return error
    return None
