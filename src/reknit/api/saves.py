"""The calls of users that save: they check the arguments, and choose the writer for the driver."""

from __future__ import annotations

import logging
import os
import platform
import sys
import weakref
from contextlib import closing
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reknit.api.checks import (
    background_of,
    backgrounds_of,
    check_flag,
    check_metadata,
    check_promotion,
    check_state,
    checked_seconds,
    checked_step,
    entering,
    place_of,
    removed_backgrounds,
    tried_options,
    warn_of_loose_tensors,
)
from reknit.api.ranks import acting
from reknit.engine.outcome import PendingSave, SaveOutcome
from reknit.engine.saving import save as driver
from reknit.engine.saving.task import SaveTask
from reknit.engine.stored.run_record import Run, folder_above
from reknit.errors import ReknitError, UsageError
from reknit.events.phase import Recorder
from reknit.events.progress import progress
from reknit.events.to_file import outlets_for
from reknit.keywords import checked_call
from reknit.locations import location_text
from reknit.options import SaveOptions
from reknit.storage.registry import open_storage, recipe, recorded
from reknit.system import start_thread
from reknit.types.entry import entered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from reknit.api.ranks import AnyGroup
    from reknit.comm.group import Group
    from reknit.engine.background.background import Background
    from reknit.engine.saving.here import EarlierSaves, Here


logger = logging.getLogger("reknit")


def read_call(
    path: str | PathLike[str],
    state: Mapping[str, Any],
    options: SaveOptions,
    group: AnyGroup | None,
    wrong: UsageError | None,
    *,
    action: str = "save",
    step: Any = None,
    wait: Any = False,
    overwrite: Any = False,
    metadata: Any = None,
    records: Mapping[str, str] = MappingProxyType({}),
) -> SaveTask:
    """Return the task of a call, checked, or with the error that all ranks will raise."""
    acts, place = acting(group, options.comm), place_of(path)
    recorder = Recorder(action, acts.group.rank, path=place.url)
    task = SaveTask(
        place=place,
        group=acts.group,
        ranks=acts.ranks,
        options=options,
        recorder=recorder,
        state=state,
        overwrite=overwrite,
        metadata={} if metadata is None else metadata,
        wrong=wrong,
    )
    if wrong is not None:
        return task
    try:
        check_state(state)
        recipe(path)  # raises the error that `place_of` passes over
        warn_of_loose_tensors(state)
        check_metadata(task.metadata)
        check_flag("wait", wait)
        check_flag("overwrite", overwrite)
        task.step = recorder.step = checked_step(step)
        if options.promotions:
            check_promotion(place.url, options, task.group.rank, overwrite=overwrite)
        if (record := records.get(folder := folder_above(place.url))) is not None:
            task.run = Run(partial(open_storage, folder), record)
        for target in options.promotions:
            to, record = place_of(target.path), records.get(folder_above(place_of(target.path).url))
            task.promote_to.append((to.url, to.factory, target.bytes_per_s, record))
        if task.group.rank == 0:
            task.origin = _origin_of(task.group)
        recorder.sinks = outlets_for(options.events)
    except BaseException as error:  # Ctrl-C too: the other ranks wait for this one
        task.wrong = error
    return task


def _origin_of(group: Group) -> dict[str, Any]:
    """Return the entry of the manifest about the job that wrote it; information only."""
    names = ("reknit", "numpy", "torch", "jax")
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    versions = {name: str(version) for name, version in found.items() if version is not None}
    return {"world_size": group.size, "python": platform.python_version(), "versions": versions}


_earlier: weakref.WeakKeyDictionary[Group, EarlierSaves] = weakref.WeakKeyDictionary()
"""The last saves of this process with each group, without those in the background."""


@checked_call
def save(
    path: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    wait: bool = True,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
    group: AnyGroup | None = None,
) -> PendingSave:
    """Save `state` as one checkpoint, together with all ranks of the job.

    `state` maps item names to live objects (modules, optimizers, schedulers, anything with `state_dict`),
    tensors, arrays, or nested containers of these and of plain values.  Every rank calls with its own part,
    and the same `path` (a folder, or a URL).  Nothing live is changed.  The checkpoint exists when `result()`
    returns, and not before; a save that fails or is killed leaves an earlier checkpoint unchanged.

    With `wait=False` the call returns once the state is copied to host memory and may be changed.  The agent,
    a separate process for each rank, writes and commits, even if the trainer dies.  A failure is logged, and
    raised by `result()`, or by the next `save` if `result()` was not called.  If neither is called, the
    failure is printed when the process ends, and its exit status is 120 instead of 0.  With
    ``SaveOptions(stage="lazy")``, tensors that only the steps of an optimizer change are copied after the
    call, and these steps wait for the copies.

    `step` and `metadata` (JSON-like) are stored in the manifest.  `overwrite=True` replaces a checkpoint at
    `path` by a safe switch.  `group`: a torch process group or a `reknit` group, default all ranks of the
    job.  A process without one is alone; if a launcher started it with others, it passes `reknit.alone()`.

    Raises `StateError` (something cannot be saved; nothing was written), `CheckpointExistsError`,
    `CommitError` (the ranks' parts leave a hole), `StorageError`, `CommError`: on every rank the same error,
    naming rank and phase.  An exception of your own code (a `state_dict` that fails) becomes a `StateError`
    that names the object, on every rank; on the rank of the exception, `__cause__` has it.  Only Ctrl-C and
    `SystemExit` are raised as they are.
    """
    return save_in_run(
        path,
        state,
        {},
        step=step,
        wait=wait,
        overwrite=overwrite,
        metadata=metadata,
        options=options,
        group=group,
    )


@entering("reknit.save")
def save_in_run(
    path: str | PathLike[str],
    state: Mapping[str, Any],
    records: Mapping[str, str],
    *,
    step: int | None,
    wait: bool,
    overwrite: bool,
    metadata: Mapping[str, Any] | None,
    options: SaveOptions | None,
    group: AnyGroup | None,
    wrong: UsageError | None = None,
    begun: Callable[[PendingSave], None] = lambda pending: None,
) -> PendingSave:
    """Save as `save` does, as a step of a run; `records` are its records by the URLs of their folders.

    All ranks raise the error `wrong` of an argument.  `begun` is called with the save, also if then the
    failure of an earlier one is raised.
    """
    options, wrong_options = tried_options(options, SaveOptions, "save" if wait is True else None)
    wrong = wrong or wrong_options
    # 1 Read the call.  2 Choose the writer.  The other steps are in `engine.saving.save`.
    task = read_call(
        path,
        state,
        options,
        group,
        wrong,
        step=step,
        wait=wait,
        overwrite=overwrite,
        metadata=metadata,
        records=records,
    )
    try:
        if wait:
            from reknit.engine.saving.here import EarlierSaves, Here  # no background save needs it

            url = task.place.url
            task.after = [save for each in backgrounds_of(task.group) for save in each.under_way(url)]
            here = Here(task, _earlier.setdefault(task.group, EarlierSaves()))
            with closing(task):
                with task.recorder.whole(), progress(task.recorder, start_thread, wanted=options.progress):
                    driver.save(task, here)
                outcome = _reported(here)
        else:
            outcome = _save_at_agent(task)
            if wrong is not None:
                outcome.result()  # raises the error here, and not only when the user asks for the result
        pending = PendingSave(outcome)
        begun(pending)
        if options.on_error == "raise":
            for background in backgrounds_of(task.group):
                background.raise_unread_errors(exclude=outcome)
    except ReknitError as error:
        if options.on_error == "raise" or isinstance(error, UsageError):
            raise
        logger.warning("save to %s failed: %s", path, error)
        outcome = SaveOutcome(str(location_text(path)), step)
        outcome.end(error)
        pending = PendingSave(outcome)
        begun(pending)
    return pending


def _reported(here: Here) -> SaveOutcome:
    """Report a save that is committed, and promote it; return its outcome."""
    report, task = here.report(), here.task
    outcome = SaveOutcome(report.path, report.step, promote_to=task.options.promotions)
    if task.group.rank == 0:
        for warning in report.warnings:
            logger.warning("save to %s: %s", report.path, warning)
    outcome.end(report)
    outcome.ranks = task.group.size
    if task.group.rank == 0:
        logger.info("%s", outcome.summary(report.blocked_s))
    if outcome.promotion is not None:
        _promote_now(outcome, task, here)
    return outcome


def _save_at_agent(task: SaveTask) -> SaveOutcome:
    """Save through the agent of this rank, and return when the state may change."""
    from reknit.engine.background.at_agent import AtAgent  # saves that wait need none of it

    outcome = SaveOutcome(task.place.url, promote_to=task.options.promotions)
    driver.save(task, AtAgent(task, _background_of(task), outcome))
    return outcome


def _background_of(task: SaveTask) -> Background:
    """Return the background saves for a task: in the trainer if no other process can open its stores."""
    places = [task.place.url, *(target.path for target in task.options.promotions)]
    return background_of(task.group, in_process=not all(place_of(place).agents_can_open for place in places))


def _promote_now(outcome: SaveOutcome, task: SaveTask, here: Here) -> None:
    """Promote a save of all ranks to each place; a place that fails does not prevent the others."""
    from reknit.engine.stored.promote import Target, promote_saved  # most saves are not promoted

    for number, place in enumerate(task.options.promotions):
        opened = partial(open_storage, place.path, durability=task.options.durability)
        url, _, _, record = task.promote_to[number]
        run = None if record is None else Run(partial(open_storage, folder_above(url)), record)
        target = Target(opened, place.bytes_per_s, recorded, run)
        try:
            report = promote_saved(task, here.write_id, here.written, group=task.group, to=target)
            outcome.end_promotion(number, report)
        except ReknitError as error:
            outcome.end_promotion(number, error)
    promotion = outcome.promotion
    assert promotion is not None
    if promotion.error is not None:
        if task.options.on_error == "raise":
            raise promotion.error
        logger.warning("%s is saved, but not promoted: %s", outcome.path, promotion.error)


@checked_call
@entering("reknit.prepare")
def prepare(
    path: str | PathLike[str],
    state: Mapping[str, Any] | None = None,
    *,
    options: SaveOptions | None = None,
    group: AnyGroup | None = None,
) -> None:
    """Prepare for the first `save(path, state, wait=False)`, so that it blocks only as long as later saves.

    Every rank calls it, like `save`, with the `options` of the later saves.  `path` is any place in the store
    of these saves, such as the folder of the run; nothing is written there.  Agents are started and
    connected.  With `state`, the ranks also agree on a plan, and the host memory for staging is allocated.
    The state is neither changed nor kept.

    A plan is for one layout: the names, shapes and dtypes of all tensors, and the ranks that hold them.  If
    the state has another layout at the save (optimizers make their states in the first step), the plan is
    made then, and missing memory is allocated then.

    Raises `StateError`, `UnknownSchemeError`, `StorageError`, `AgentError`, `CommError`, on every rank the
    same error, as for `save`, and `ShortageError` if memory is short.  With ``on_error="warn"`` all errors
    but those of wrong calls are logged, and the first save prepares the rest.
    """
    from reknit.engine.background.at_agent import AtAgent  # saves that wait need none of it

    options, wrong = tried_options(options, SaveOptions)
    state = {} if state is None else state
    task = read_call(path, state, options, group, wrong, action="prepare")
    try:
        outcome = SaveOutcome(task.place.url, logged=False)
        outcome.is_read = True  # it is raised here, so no later save needs to raise it
        AtAgent(task, _background_of(task), outcome).prepare()
        outcome.result(2 * options.timeout_s)  # each of the two rounds ends within its own time
    except ReknitError as error:
        if options.on_error == "raise" or isinstance(error, UsageError):
            raise
        logger.warning("could not prepare for saves to %s: %s", path, error)


@checked_call
@entered("reknit.close")
def close(timeout_s: float | None = None) -> bool:
    """Wait for the pending saves, end the agents, free their memory; return whether all saves have ended.

    Waits up to `timeout_s`, by default as long as the `exit_wait_s` of the saves; agents finish staged saves
    in any case.  Later saves start new agents.  The end of the interpreter calls this, too.  Every rank calls
    it, or none.
    """
    if timeout_s is not None:
        timeout_s = checked_seconds("timeout_s", timeout_s)
    ended = True
    for background in removed_backgrounds():
        ended = background.close(timeout_s) and ended
    return ended


os.register_at_fork(after_in_child=_earlier.clear)
