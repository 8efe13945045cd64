"""Steps of an earlier run at which a new one would begin: they are refused, put aside or removed."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.record.at_path import manifest_in
from reknit.engine.record.checkpoint_notes import add_metrics, held_by, metrics_of
from reknit.engine.record.heartbeat import STALE_S, wait_for_owners
from reknit.engine.record.other_formats import formats, refuse_other
from reknit.engine.record.recognising import manifest_exists
from reknit.engine.stored.copy_files import Promotion
from reknit.engine.stored.moving import delete_moved
from reknit.engine.stored.promote import promote_alone
from reknit.engine.stored.steps import descending, is_step_name, numbered
from reknit.errors import CheckpointExistsError, FormatError, ReknitError, UsageError
from reknit.monitor.phase import Recorder
from reknit.runs.tiers import below
from reknit.storage.registry import following, open_storage
from reknit.system import start_thread
from reknit.types.rank_text import named

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from reknit.engine.outcome import PendingSave
    from reknit.options import SaveOptions
    from reknit.runs.tiers import Folder, Tiers
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

BEGIN_ANEW = "to begin with step 0 beside it: resume(state, start=0); or give this run a folder of its own"
"""The end of the remedies of a run that would begin beside work of another program."""


class Later(NamedTuple):
    """A committed step of an earlier run: its number, its folder, a folder to put it aside, and its save id.

    `problem` is the reason why it cannot give way, or None.
    """

    step: int
    here: Storage
    aside: Storage
    save_id: str
    problem: str | None


def _look(tiers: Tiers, step: int) -> list[Later]:
    """Return the committed steps from a number on, in folders with names of steps."""
    found = []
    for level in tiers.levels:
        aside = None  # named by the newest step, also after an earlier try that was interrupted
        for number, name in numbered(level.storage):
            here = level.storage.sub(name)
            if number < step or not is_step_name(name) or not manifest_exists(here):
                continue
            try:
                manifest = manifest_in(here)
            except FormatError as error:
                found.append(Later(number, here, here, "", error.message))
                continue
            if manifest is None:  # removed since it was listed
                continue
            problem = held_by(here, manifest.save_id)
            if "://" not in here.url and os.path.islink(here.url):
                problem = "it is a link"
            aside = aside or level.storage.sub(f"aside-{manifest.generation or 0}")
            found.append(Later(number, here, aside.sub(name), manifest.save_id, problem))
    return found


def refuse_later(tiers: Tiers, step: int) -> None:
    """Raise `CheckpointExistsError` if there are steps of an earlier run from a number on."""
    if found := sorted({each.step for each in _look(tiers, step)}):
        raise CheckpointExistsError(
            f"{tiers.where} has {named(found, 'step')} of an earlier run, and this one would begin "
            f"with step {step}",
            path=tiers.levels[0].url,
            remedy=f"call resume(state) first, to go on after step {found[-1]}, or load(state, step) to "
            "go on after an earlier one; or give this run a folder of its own; or pass "
            "Checkpointer(..., later_steps='move'), which puts those steps aside, or 'replace', which "
            "removes them",
        )


def refuse_others(tiers: Tiers, folders: Sequence[Sequence[Folder]]) -> None:
    """Raise `UsageError` if a tier has a checkpoint of another program, but no tier has a step.

    A run that begins with step 0 would ignore the work that is there.  Weights from which it may start are
    not work of a run.  `folders` are those of the steps of each tier, as `numbered` returns them.
    """
    found_in = zip(tiers.levels, folders, strict=True)
    if any(True for level, own in found_in for _ in descending(level.storage, folders=own)):
        return
    for level, own in zip(tiers.levels, folders, strict=True):
        if not own:
            refuse_other(level.storage, of_run=True)
        if (found := formats().newest_of_others(level.storage, works=True)) is not None:
            place, other = below(level.url, found[0]), found[1]
            goes_on = f"to go on from it: resume(state, start={place!r})"
            raise UsageError(
                f"there is no step of this run below {level.url}, but {place} is {other.what}",
                remedy=f"{goes_on if formats().opens(other.kind) else other.remedy}; {BEGIN_ANEW}",
                path=level.url,
            )
        if (run := formats().run_of_others(level.storage)) is not None and not formats().is_weights(run.kind):
            raise UsageError(
                f"there is no step of this run below {level.url}, which is {run.what}",
                remedy=f"{run.remedy}; {BEGIN_ANEW}",
                path=level.url,
            )


def refuse_living(root: str) -> None:
    """Raise `UsageError` if another run lives in a folder, in which a training would save only later."""
    with closing(open_storage(root)) as storage:
        wait_for_owners([storage], 2 * STALE_S)  # the first look may have no answer


def give_way(tiers: Tiers, step: int, options: SaveOptions, *, copy: bool) -> list[Later]:
    """Return the steps to remove once this run has saved a step; with `copy`, first copy them aside.

    Raises `UsageError` if one of them has to stay.
    """
    later = _look(tiers, step)
    if problems := [f"{each.here.url}: {each.problem}" for each in later if each.problem]:
        raise UsageError(
            f"steps of an earlier run cannot give way to this one, and nothing was changed: "
            f"{'; '.join(problems)}",
            remedy="unpin or remove them (reknit unpin, reknit rm), or give this run a folder of its own",
        )
    if copy:
        for each in later:
            recorder = Recorder("promote", step=each.step, path=each.aside.url)
            job = Promotion(
                following(each.here),
                each.aside,
                overwrite=False,
                options=options,
                recorder=recorder,
            )
            promote_alone(job)
            if metrics := metrics_of(each.here, each.save_id):
                add_metrics(each.aside, metrics)
            logger.warning("step %d of an earlier run is put aside: %s", each.step, each.aside.url)
    return later


class Clearing:
    """Removes steps of an earlier run once a save of this run is committed."""

    def __init__(self, later: Sequence[Later]) -> None:
        self._later = later
        self._thread: threading.Thread | None = None

    def begin(self, step: int, pending: PendingSave) -> None:
        """Start a thread that removes the steps once a save is committed, unless one is at work."""
        if self._later and (self._thread is None or not self._thread.is_alive()):
            self._thread = start_thread("reknit-clears", partial(self._clear, step, pending))

    def close(self) -> None:
        """Wait for the removal."""
        if self._thread is not None:
            self._thread.join()

    def _clear(self, step: int, pending: PendingSave) -> None:
        pending.wait()
        if pending.error is not None:
            return
        later, self._later = [each for each in self._later if each.step != step], ()
        for each in later:
            _remove(each)


def _remove(each: Later) -> None:
    try:
        delete_moved(each.here, open_storage, each.save_id)
        logger.warning("step %d of an earlier run is removed: %s", each.step, each.here.url)
    except ReknitError as error:
        logger.warning("step %d of an earlier run stays at %s: %s", each.step, each.here.url, error)
