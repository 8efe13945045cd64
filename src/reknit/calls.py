"""What the calls of a user share: who hears of an error, what is recorded, and which saves are under way."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import weakref
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import metadata as distributions
from typing import TYPE_CHECKING, Any

from reknit.comm import group as comm
from reknit.engine.background.background import Background
from reknit.engine.outcome import SaveOutcome
from reknit.engine.run_record import Run, folder_above
from reknit.engine.saving import save as save_story
from reknit.engine.saving.reuse import Committed
from reknit.engine.saving.rounds import ASSIGN
from reknit.engine.stored.promote import Target, promote_saved
from reknit.errors import ReknitError, UsageError, typed, typed_shortage
from reknit.storage.registry import open_storage, recorded
from reknit.system import without_collections
from reknit.types.devices import is_captured
from reknit.types.entry import entered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reknit.comm.group import Group
    from reknit.engine.report import SaveReport
    from reknit.engine.saving.job import SaveJob
    from reknit.engine.small_files import Written
    from reknit.options import SaveOptions

logger = logging.getLogger("reknit")

backgrounds: weakref.WeakKeyDictionary[Group, dict[bool, Background]] = weakref.WeakKeyDictionary()
"""The background saves of each group: those to stores that other processes can open, and those to others."""

making = threading.Lock()
"""Held while background saves are looked up: two threads that save at once must not make two, and who goes
through them all must not meet new ones."""

_committed: weakref.WeakKeyDictionary[Group, Committed] = weakref.WeakKeyDictionary()
"""What this process saved with each group, not in the background."""


def save_now(
    joined: Group,
    make: Callable[[], SaveJob],
    options: SaveOptions,
) -> SaveOutcome:
    """Save, and return when the checkpoint is committed."""
    with ExitStack() as last:
        with all_told(joined, ASSIGN, options.timeout_s):
            job = make()
            last.callback(job.storage.close)
            for background in backgrounds_of(joined):
                background.wait_for(job.url, options.timeout_s)
        with job.recorder.whole():
            report, written = save_story.save(job, _committed.setdefault(joined, Committed()))
        if joined.rank == 0:
            for warning in report.warnings:
                logger.warning("save to %s: %s", report.path, warning)
        pending = SaveOutcome(report.path, report.step, promote_to=options.promotions)
        pending.end(report)
        pending.ranks = joined.size
        if joined.rank == 0:
            logger.info("%s", pending.summary(report.blocked_s))
        if pending.promotion is not None:
            _promote_now(pending, job, report, written)
    return pending


def _promote_now(outcome: SaveOutcome, job: SaveJob, report: SaveReport, written: Sequence[Written]) -> None:
    """Promote what all ranks have just saved; a place that fails does not keep it from the others."""
    for number, place in enumerate(job.options.promotions):
        opened = partial(open_storage, place.path, durability=job.options.durability)
        url, _, _, record = job.promote_to[number]
        run = None if record is None else Run(partial(open_storage, folder_above(url)), record)
        target = Target(opened, place.bytes_per_s, recorded, run)
        try:
            outcome.end_promotion(number, promote_saved(job, report.write_id, written, job.group, target))
        except ReknitError as error:
            outcome.end_promotion(number, error)
    promotion = outcome.promotion
    assert promotion is not None
    if promotion.error is not None:
        if job.options.on_error == "raise":
            raise promotion.error
        logger.warning("%s is saved, but not promoted: %s", report.path, promotion.error)


@contextmanager
def entering(call: str) -> Iterator[None]:
    """Be in a call of a user: the only one of its thread, without collections, and with typed shortages."""
    with entered(call), typed_shortage(), without_collections():
        if is_captured():
            raise UsageError(
                f"{call} was called while a graph is captured, of which its copies would become a part",
                remedy="call it before or after the capture",
            )
        yield


@contextmanager
def all_told(group: Group, first_round: str, timeout_s: float) -> Iterator[None]:
    """Let the other ranks raise an error that keeps this one from its first round, instead of waiting."""
    try:
        yield
    except BaseException as error:  # Ctrl-C too: whatever it is, this rank will not come
        if group.size == 1:
            if isinstance(error, ReknitError) or not isinstance(error, Exception):
                raise
            raise typed(error) from error
        comm.fail(group, first_round, error, timeout_s)


def background_of(group: Group, *, elsewhere: bool) -> Background:
    """Return the background saves of a group, to stores that other processes can open or cannot."""
    with making:
        kinds = backgrounds.setdefault(group, {})
        if elsewhere not in kinds:
            background = kinds[elsewhere] = Background(in_process=not elsewhere)
            gone = weakref.finalize(group, background.retire)
            gone.atexit = False
            background.when_closed = gone.detach
        return kinds[elsewhere]


def backgrounds_of(group: Group) -> list[Background]:
    """Return the background saves that a group has at this moment."""
    with making:
        return list(backgrounds.get(group, {}).values())


def all_backgrounds() -> list[Background]:
    """Return the background saves that all groups have at this moment."""
    with making:
        return [background for kinds in backgrounds.values() for background in kinds.values()]


def taken_backgrounds() -> Iterator[Background]:
    """Yield the background saves that all groups have at this moment, each taken out for who closes it."""
    with making:
        found = list(backgrounds.values())
    for kinds in found:
        for elsewhere in (True, False):
            with making:
                background = kinds.pop(elsewhere, None)
            if background is not None:
                yield background


def origin_of(group: Group) -> dict[str, Any]:
    """Return what the manifest says about the job that wrote it; information only."""
    names = [name for name in ("reknit", "numpy", "torch", "jax") if name == "reknit" or name in sys.modules]
    versions = {name: version for name in names if (version := _version_of(name)) is not None}
    return {"world_size": group.size, "python": platform.python_version(), "versions": versions}


@cache
def _version_of(name: str) -> str | None:
    """Return the version of a package, None for what runs from a source tree; it is parsed from a file."""
    try:
        return distributions.version(name)
    except distributions.PackageNotFoundError:
        return None


def _after_fork() -> None:
    global making
    making = threading.Lock()  # a thread that the child does not have may have held it
    _committed.clear()


os.register_at_fork(after_in_child=_after_fork)
