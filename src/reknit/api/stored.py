"""The calls of users about committed checkpoints, by one process alone: open, verify, find, move."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Literal

from reknit.api.checks import (
    check_flag,
    check_places,
    checked_metrics,
    checked_seconds,
    open_checkpoint,
    open_places,
    options_of,
)
from reknit.engine.loading.browse import Checkpoint
from reknit.engine.memory.workers import Pace
from reknit.engine.stored import notes
from reknit.engine.stored.delete import drop
from reknit.engine.stored.hints import warn_of_others
from reknit.engine.stored.leftovers import fence_off, wait_for_saves
from reknit.engine.stored.moving import delete_moved, move
from reknit.engine.stored.places import Replicas
from reknit.engine.stored.promote import Promotion, promote_alone
from reknit.engine.stored.renaming import split_transforms
from reknit.engine.stored.steps import newest, steps_below
from reknit.engine.stored.verify import verify as verify_story
from reknit.errors import UsageError, shown, typed_known
from reknit.events.phase import Recorder
from reknit.events.to_file import outlets_for
from reknit.frameworks import fresh_arrays
from reknit.keywords import checked_call
from reknit.options import LoadOptions, SaveOptions, check_rate
from reknit.storage.registry import open_storage, recipe, recorded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from reknit.engine.reports import PromotionReport, VerifyReport
    from reknit.types.manifest import SavedStep


@checked_call
@typed_known()
def open(path: str | PathLike[str], *, options: LoadOptions | None = None) -> Checkpoint:
    """Open a checkpoint to inspect it and to read any part of any tensor, without other ranks.

    Raises `CheckpointNotFoundError`, `CorruptError`, `VersionError`, `StorageError`.
    """
    options = options_of(options, LoadOptions, "open")
    if split_transforms(options)[1]:
        raise UsageError(
            "reknit.open shows tensors as they were saved, so of transforms it takes names only",
            remedy="leave the others out, or use reknit.load",
        )
    with ExitStack() as failing:
        storage, *others = open_places(path, options, failing)
        recorder = Recorder("read", path=storage.url, sinks=outlets_for(options.events))
        storage, *others = (recorded(one, recorder) for one in (storage, *others))
        checkpoint = Checkpoint(storage, options, recorder, fresh_arrays, Replicas(others))
        failing.pop_all()
    return checkpoint


@checked_call
@typed_known()
def verify(
    path: str | PathLike[str],
    level: Literal["metadata", "data"] = "metadata",
    *,
    options: LoadOptions | None = None,
) -> VerifyReport:
    """Check a checkpoint without loading it, and return a report with `ok`, and `problems` with their files.

    ``"metadata"`` reads no tensors, which `report.unread` counts; ``"data"`` reads every byte of every file
    and compares it with its digest.  Raises `CheckpointNotFoundError` without a checkpoint.
    """
    if str(level) == "structure":  # the word for it in version 0.1
        level = "metadata"
    if level not in ("metadata", "data"):
        raise UsageError(f"level is 'metadata' or 'data', not {shown(level)}")
    options = options_of(options, LoadOptions, "verify")
    with closing(open_checkpoint(path)) as storage:
        recorder = Recorder("verify", path=storage.url, sinks=outlets_for(options.events))
        with recorder.whole():
            return verify_story(recorded(storage, recorder), level, options)


@checked_call
@typed_known()
def latest(
    root: str | PathLike[str], *, pending: Literal["tell", "wait", "fence"] = "tell", timeout_s: float = 300.0
) -> str | None:
    """Return the path of the newest committed checkpoint directly below `root`, or None.

    The newest checkpoint has the highest step; checkpoints without a step are older than all others, and are
    ordered by time.  A folder is skipped with a logged warning if its manifest is damaged, if this user
    cannot read it, or if no store accepts its name.

    Agents of a run that died may still commit its staged saves.  `pending` decides about pending saves below
    `root`.  With ``"tell"``, a warning names the saves that may be newer.  ``"wait"`` waits for their end, up
    to `timeout_s`, and raises `DeadlineError`.  ``"fence"`` prevents every save whose marker is there from
    committing, also a save of another user.  A staged save without a marker is not fenced; a warning names
    the agents of this host that still work then.  All ranks call this together, or one calls it and sends the
    result to the others.
    """
    if pending not in ("tell", "wait", "fence"):
        raise UsageError(f"pending is 'tell', 'wait' or 'fence', not {pending!r}")
    timeout_s = checked_seconds("timeout_s", timeout_s)
    with closing(open_storage(root)) as storage:
        if pending == "wait":
            wait_for_saves(storage, timeout_s)
        elif pending == "fence":
            fence_off(storage)
        return newest(storage)


@checked_call
@typed_known()
def steps(root: str | PathLike[str]) -> list[SavedStep]:
    """Return the committed checkpoints directly below `root`, by step, with time, size, items and metrics.

    A checkpoint whose manifest cannot be read is listed with its `problem`.  Raises `UsageError` if `root` is
    a checkpoint itself or a folder of another program, and `StorageError`.
    """
    with closing(open_storage(root)) as storage:
        if not (found := steps_below(storage)):
            warn_of_others(storage)
        return found


@checked_call
@typed_known()
def delete(path: str | PathLike[str], *, items: Sequence[str] | None = None, dry_run: bool = False) -> int:
    """Remove the checkpoint at `path`, or only some of its `items`, and return the bytes that this freed.

    Its manifest is deleted first: from then on it does not exist, even if this process dies.  Files of other
    programs stay.  With `items`, another manifest replaces the manifest, and records the dropped items and
    the time; the other items can be loaded at every moment.  Files that `reknit.cool` has moved are removed,
    too.  With `dry_run` nothing is removed.

    Raises `CheckpointNotFoundError`, `StorageError`, `UsageError` if a save to `path` or a promotion is
    pending, or if the checkpoint is held, and `MismatchError` for an item that it never had.
    """
    if isinstance(items, str):
        raise UsageError("items is a list of names: put the text into a list")
    check_flag("dry_run", dry_run)
    with closing(open_storage(path)) as storage:
        if items is None:
            return delete_moved(storage, open_storage, dry_run=dry_run)
        return drop(storage, tuple(items), dry_run=dry_run)


@checked_call
@typed_known()
def pin(path: str | PathLike[str], reason: str = "") -> None:
    """Keep the checkpoint at `path` from being removed, by a run's `keep` and by `reknit.delete`.

    A save with ``overwrite=True`` still replaces it.  Raises `CheckpointNotFoundError`, `StorageError`.
    """
    if not isinstance(reason, str):
        raise UsageError(f"reason is a text, not {shown(reason)}")
    with closing(open_storage(path)) as storage:
        notes.pin(storage, reason)


@checked_call
@typed_known()
def unpin(path: str | PathLike[str]) -> bool:
    """Allow the removal of the checkpoint at `path` again, and return whether it was pinned.

    Raises `CheckpointNotFoundError`, `StorageError`.
    """
    with closing(open_storage(path)) as storage:
        return notes.unpin(storage)


@checked_call
@typed_known()
def note(path: str | PathLike[str], metrics: Mapping[str, float], *, write_id: str | None = None) -> None:
    """Add metrics to the committed checkpoint at `path`, such as the score of an evaluation.

    `reknit.steps`, ``keep=best(...)`` and `Checkpointer.best` use them from then on.  A metric replaces an
    earlier one of the same name.  With the `write_id` of a `SavedStep`, the metrics are added to this
    checkpoint only, and not to a checkpoint that has replaced it since.  Raises `CheckpointNotFoundError`,
    `StorageError`, and `UsageError` for a value that is not a number.
    """
    numbers = checked_metrics(metrics)
    if not isinstance(write_id, str | None):
        raise UsageError(f"write_id is that of a SavedStep, not {shown(write_id)}")
    with closing(open_storage(path)) as storage:
        notes.add_metrics(storage, numbers, write_id)


@checked_call
@typed_known()
def promote(
    path: str | PathLike[str],
    to: str | PathLike[str],
    *,
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> PromotionReport:
    """Copy the committed checkpoint at `path` to `to`, another path or URL, and commit it there as well.

    One process copies all files alone, and compares each block with its digest on the way.  Files of an
    earlier try are checked and kept, so the call can be repeated after any failure.  `overwrite=True`
    replaces another checkpoint at `to`.

    Raises `CheckpointNotFoundError`, `CheckpointExistsError`, `CorruptError`, `CommitError` (files are in
    neither place), `StorageError`.
    """
    options = options_of(options, SaveOptions, "promote")
    check_flag("overwrite", overwrite)
    with (
        closing(open_checkpoint(path)) as source,
        closing(open_storage(to, durability=options.durability)) as target,
    ):
        check_places(source, target)
        recorder = Recorder("promote", path=target.url, sinks=outlets_for(options.events))
        with recorder.whole():
            places = recorded(source, recorder), recorded(target, recorder)
            return promote_alone(Promotion(*places, overwrite=overwrite, options=options, recorder=recorder))


@checked_call
@typed_known()
def cool(path: str | PathLike[str], to: str | PathLike[str], *, bytes_per_s: float | None = None) -> int:
    """Move the files of the committed checkpoint at `path` to `to`, and return the bytes freed at `path`.

    `path` stays valid for every call that reads or removes the checkpoint: its manifest stays, and has the
    new place of the files.  These are copied, read again at `to` and compared with their digests, before they
    are deleted at `path`.  Processes that read the checkpoint at that time are not disturbed.  Repeat the
    call after any failure.  A checkpoint that is pinned or held is not moved.  `to` is the absolute path or
    URL, without options, of this checkpoint alone.

    Raises `CheckpointNotFoundError`, `CheckpointExistsError`, `CorruptError`, `UsageError`, `StorageError`.
    """
    check_rate(bytes_per_s)
    with closing(open_storage(path)) as source, closing(open_storage(to)) as target:
        check_places(source, target)
        recorder = Recorder("promote", path=target.url)
        job = Promotion(
            source, target, overwrite=False, options=SaveOptions(), recorder=recorder, pace=Pace(bytes_per_s)
        )
        return move(job, recipe(to).url, open_storage)
