"""The calls of users about committed checkpoints, which one process makes alone: open, verify, find, move."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Literal

from reknit.arguments import (
    NOT_FOR_OPEN,
    NOT_FOR_PROMOTE,
    NOT_FOR_VERIFY,
    check_flag,
    check_places,
    checked_metrics,
    checked_seconds,
    open_checkpoint,
    open_places,
    options_of,
)
from reknit.engine.loading.browse import Checkpoint
from reknit.engine.memory.pace import Pace
from reknit.engine.stored import notes
from reknit.engine.stored.copy_files import Promotion
from reknit.engine.stored.delete import drop
from reknit.engine.stored.moving import delete_moved, move
from reknit.engine.stored.newest import newest
from reknit.engine.stored.pending import fence_off, wait_for_saves
from reknit.engine.stored.promote import promote_alone
from reknit.engine.stored.steps import steps_below
from reknit.engine.stored.verify import verify as verify_story
from reknit.errors import UsageError, shown, typed_shortage
from reknit.frameworks import arrays
from reknit.keywords import checked_call
from reknit.monitor.phase import Recorder
from reknit.monitor.sinks.choosing import outlets_for
from reknit.options import LoadOptions, SaveOptions, check_rate
from reknit.storage.registry import open_storage, recipe, recorded
from reknit.transforms.names import parted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from reknit.engine.report import PromotionReport, VerifyReport
    from reknit.types.saved_step import SavedStep


@checked_call
@typed_shortage()
def open(path: str | PathLike[str], *, options: LoadOptions | None = None) -> Checkpoint:
    """Open a checkpoint for looking and for reading any part of any tensor; no other rank is needed.

    Raises `CheckpointNotFoundError`, `CorruptError`, `VersionError`, `StorageError`.
    """
    options = options_of(options, LoadOptions, "reknit.open", NOT_FOR_OPEN)
    if parted(options.transforms)[1]:
        raise UsageError(
            "reknit.open shows tensors as they were saved, so of transforms it takes names only",
            remedy="leave the others out, or use reknit.load",
        )
    with ExitStack() as failing:
        storage, *replicas = open_places(path, options, failing)
        recorder = Recorder("read", path=storage.url, sinks=outlets_for(options.events))
        storage, *replicas = (recorded(one, recorder) for one in (storage, *replicas))
        checkpoint = Checkpoint(storage, options, recorder, arrays, replicas)
        failing.pop_all()
    return checkpoint


@checked_call
@typed_shortage()
def verify(
    path: str | PathLike[str],
    level: Literal["metadata", "data"] = "metadata",
    *,
    options: LoadOptions | None = None,
) -> VerifyReport:
    """Check a checkpoint without loading it; `report.ok`, or `report.problems` naming file and place.

    ``"metadata"`` reads no tensors, and `report.unread` says so; ``"data"`` reads every byte of every file
    and compares it with its digest.  Raises `CheckpointNotFoundError` when there is nothing to check.
    """
    if str(level) == "structure":  # the word for it in version 0.1
        level = "metadata"
    if level not in ("metadata", "data"):
        raise UsageError(f"level is 'metadata' or 'data', not {shown(level)}")
    options = options_of(options, LoadOptions, "reknit.verify", NOT_FOR_VERIFY)
    with closing(open_checkpoint(path)) as storage:
        recorder = Recorder("verify", path=storage.url, sinks=outlets_for(options.events))
        with recorder.whole():
            return verify_story(recorded(storage, recorder), level, options)


@checked_call
@typed_shortage()
def latest(
    root: str | PathLike[str],
    *,
    pending: Literal["tell", "wait", "fence"] = "tell",
    timeout_s: float = 300.0,
) -> str | None:
    """Return the path of the newest committed checkpoint directly below `root`, or None.

    Newest is the highest step; checkpoints without a step come before all that have one, by time.  A folder
    whose manifest is damaged, that is closed to this user, or that has a name that no store takes, is passed
    over with a logged warning.

    A run that died may have left agents that still commit what it had staged.  `pending` says what becomes of
    saves that are under way below `root`: with ``"tell"`` a warning names them, where they may be newer.
    ``"wait"`` waits until they are over, up to `timeout_s`, and raises `DeadlineError`.  ``"fence"`` keeps
    them from ever committing, all that have put up their marker by now, whoever's they are.  A save that is
    staged, and has no marker yet, is not fenced; agents of this host that are at work then are named in a
    warning.  All ranks call this together, or one calls it and tells the others.
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
@typed_shortage()
def steps(root: str | PathLike[str]) -> list[SavedStep]:
    """Return the committed checkpoints directly below `root`, by step, with time, size, items and metrics.

    A checkpoint whose manifest cannot be read is listed with its `problem`.  Raises `UsageError` where `root`
    is a checkpoint itself or a folder of another program, `StorageError`.
    """
    with closing(open_storage(root)) as storage:
        return steps_below(storage)


@checked_call
@typed_shortage()
def delete(path: str | PathLike[str], *, items: Sequence[str] | None = None, dry_run: bool = False) -> int:
    """Remove the checkpoint at `path`, or only some of its `items`, and return the bytes that this freed.

    Its manifest goes first: from then on it does not exist, whatever happens to this process.  Files that are
    not of reknit's making stay.  With `items`, another manifest takes its place, which says what was dropped
    and when; the others stay loadable at every moment.  Where the files were moved by `reknit.cool`, they go
    there, too.  With `dry_run` nothing is removed.

    Raises `CheckpointNotFoundError`, `StorageError`, and `UsageError` where a save to `path` or a promotion
    is under way, or somebody holds it; `MismatchError` for an item that it never had.
    """
    if isinstance(items, str):
        raise UsageError("items is a list of names: put the text into a list")
    check_flag("dry_run", dry_run)
    with closing(open_storage(path)) as storage:
        if items is None:
            return delete_moved(storage, open_storage, dry_run=dry_run)
        return drop(storage, tuple(items), dry_run=dry_run)


@checked_call
@typed_shortage()
def pin(path: str | PathLike[str], reason: str = "") -> None:
    """Keep the checkpoint at `path` from being removed, by a run's `keep` and by `reknit.delete`.

    A save with ``overwrite=True`` still replaces it.  Raises `CheckpointNotFoundError`, `StorageError`.
    """
    if not isinstance(reason, str):
        raise UsageError(f"reason is a text, not {shown(reason)}")
    with closing(open_storage(path)) as storage:
        notes.pin(storage, reason)


@checked_call
@typed_shortage()
def unpin(path: str | PathLike[str]) -> bool:
    """Let the checkpoint at `path` be removed again, and tell whether it was pinned.

    Raises `CheckpointNotFoundError`, `StorageError`.
    """
    with closing(open_storage(path)) as storage:
        return notes.unpin(storage)


@checked_call
@typed_shortage()
def note(path: str | PathLike[str], metrics: Mapping[str, float], *, write_id: str | None = None) -> None:
    """Add metrics to the committed checkpoint at `path`, such as a score that an evaluation has found.

    `reknit.steps`, ``keep=best(...)`` and `Checkpointer.best` know them from then on; of one name the last
    counts.  With `write_id`, that of a `SavedStep`, they are added to this checkpoint only, and not to one
    that has replaced it since.  Raises `CheckpointNotFoundError`, `StorageError`, `UsageError` for what is no
    number.
    """
    numbers = checked_metrics(metrics)
    if not isinstance(write_id, str | None):
        raise UsageError(f"write_id is that of a SavedStep, not {shown(write_id)}")
    with closing(open_storage(path)) as storage:
        notes.add_metrics(storage, numbers, write_id)


@checked_call
@typed_shortage()
def promote(
    path: str | PathLike[str],
    to: str | PathLike[str],
    *,
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> PromotionReport:
    """Copy the committed checkpoint at `path` to `to`, another path or URL, and commit it there as well.

    One process does it alone, with every file that it finds at `path`; each block is compared with its
    digest on the way.  What an earlier try has brought there is checked and kept, so it can be called again
    after any failure.  `overwrite=True` replaces another checkpoint at `to`.

    Raises `CheckpointNotFoundError`, `CheckpointExistsError`, `CorruptError`, `CommitError` (files are in
    neither place), `StorageError`.
    """
    options = options_of(options, SaveOptions, "reknit.promote", NOT_FOR_PROMOTE)
    check_flag("overwrite", overwrite)
    with (
        closing(open_checkpoint(path)) as source,
        closing(open_storage(to, durability=options.durability)) as target,
    ):
        check_places(source, target)
        recorder = Recorder("promote", path=target.url, sinks=outlets_for(options.events))
        with recorder.whole():
            places = recorded(source, recorder), recorded(target, recorder)
            return promote_alone(Promotion(*places, overwrite, options, recorder))


@checked_call
@typed_shortage()
def cool(path: str | PathLike[str], to: str | PathLike[str], *, bytes_per_s: float | None = None) -> int:
    """Move the files of the committed checkpoint at `path` to `to`, and return the bytes freed at `path`.

    `path` goes on working for everything that reads or removes it: its manifest stays, and says where the
    files are.  They are copied, read again at `to` and compared with their digests, before they go here.
    Whoever reads the checkpoint meanwhile reads on.  Call it again after any failure.  A checkpoint that is
    pinned or held stays.  `to` is the absolute path or URL, without options, of this checkpoint alone.

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
