"""The calls of users that save: they check the arguments on each rank, and start the job of the engine."""

from __future__ import annotations

import logging
import os
import platform
import sys
import weakref
from contextlib import ExitStack
from functools import cache, partial
from importlib import metadata as distributions
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

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
    raised_on_all_ranks,
    removed_backgrounds,
    tried_options,
    warn_of_loose_tensors,
)
from reknit.api.ranks import acting
from reknit.engine.outcome import PendingSave, SaveOutcome
from reknit.engine.saving import save as save_story
from reknit.engine.saving.here import ASSIGN
from reknit.engine.saving.task import SaveJob
from reknit.engine.stored.run_record import Run, folder_above
from reknit.errors import ReknitError, UsageError
from reknit.events.phase import Recorder
from reknit.events.to_file import outlets_for
from reknit.frameworks import registry
from reknit.keywords import checked_call
from reknit.locations import location_text
from reknit.options import SaveOptions
from reknit.storage.registry import StoreRecipe, open_storage, recorded
from reknit.types.entry import entered
from reknit.types.small import lazy_property

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from reknit.api.ranks import AnyGroup, Ranks
    from reknit.comm.group import Group
    from reknit.engine.memory.write import Written
    from reknit.engine.reports import SaveReport
    from reknit.types.shard import Holdings


class SaveRequest(Struct, frozen=True, kw_only=True, dict=True):
    """The arguments of a call, as the user passed them; `wrong` is the error of its options.

    `records` are the records of the run that the save is a step of, by the URLs of their folders.

    The arguments are checked when the job is made, which happens inside the first round: an error on one rank
    is then raised on all.
    """

    path: str | PathLike[str]
    state: Mapping[str, Any]
    options: SaveOptions
    wrong: UsageError | None
    ranks: Ranks
    step: Any = None
    wait: Any = False
    overwrite: Any = False
    metadata: Any = None
    records: Mapping[str, str] = field(default_factory=dict)

    @property
    def group(self) -> Group:
        """The ranks that make this call."""
        return self.ranks.group

    @lazy_property
    def place(self) -> StoreRecipe:
        """Return the place to save to, for an agent."""
        return place_of(self.path)

    @lazy_property
    def copies(self) -> list[StoreRecipe]:
        """Return the places to promote to, for an agent."""
        return [place_of(target.path) for target in self.options.promotions]

    @property
    def elsewhere(self) -> bool:
        """Whether another process can open all these places."""
        return all(place.elsewhere for place in (self.place, *self.copies))

    def raises(self, error: ReknitError) -> bool:
        """Return whether the call raises this error, or only logs it."""
        return self.options.on_error == "raise" or isinstance(error, UsageError)

    def save_job(self) -> SaveJob:
        """Check the arguments of a save, open its store, and return its job."""
        self._check()
        warn_of_loose_tensors(self.state)
        check_metadata(self.metadata or {})
        check_flag("wait", self.wait)
        check_flag("overwrite", self.overwrite)
        step = checked_step(self.step)
        storage = open_storage(self.path, durability=self.options.durability)
        if self.copies:
            check_promotion(storage, self.options, self.group.rank, overwrite=self.overwrite)
        recorder = Recorder("save", self.group.rank, step, storage.url, outlets_for(self.options.events))
        folder = folder_above(self.place.url)
        record = self.records.get(folder)
        return SaveJob(
            collect=self._collect,
            group=self.group,
            storage=recorded(storage, recorder),
            options=self.options,
            recorder=recorder,
            step=step,
            overwrite=self.overwrite,
            origin=_origin_of(self.group),
            metadata=self.metadata or {},
            url=self.place.url,
            factory=self.place.factory,
            promote_to=[
                (copy.url, copy.factory, target.bytes_per_s, self.records.get(folder_above(copy.url)))
                for copy, target in zip(self.copies, self.options.promotions, strict=True)
            ],
            run=None if record is None else Run(partial(open_storage, folder), record),
        )

    def warm_up_job(self) -> SaveJob:
        """Check the arguments of `prepare`, open its store, and return its job."""
        self._check()
        storage = open_storage(self.path, durability=self.options.durability)
        sinks = outlets_for(self.options.events)
        return SaveJob(
            collect=self._collect,
            group=self.group,
            storage=storage,
            options=self.options,
            recorder=Recorder("prepare", self.group.rank, None, storage.url, sinks),
            url=self.place.url,
            factory=self.place.factory,
        )

    def _check(self) -> None:
        if self.wrong is not None:
            raise self.wrong
        check_state(self.state)

    def _collect(self) -> Holdings:
        group, ranks, _ = self.ranks
        return registry.collect(self.state, group.rank, group.size, ranks=ranks)


def _origin_of(group: Group) -> dict[str, Any]:
    """Return the entry of the manifest about the job that wrote it; information only."""
    names = [name for name in ("reknit", "numpy", "torch", "jax") if name == "reknit" or name in sys.modules]
    versions = {name: version for name in names if (version := _version_of(name)) is not None}
    return {"world_size": group.size, "python": platform.python_version(), "versions": versions}


@cache
def _version_of(name: str) -> str | None:
    """Return the version of a package, or None if it runs from a source tree; it is parsed from a file."""
    try:
        return distributions.version(name)
    except distributions.PackageNotFoundError:
        return None


logger = logging.getLogger("reknit")

_earlier: weakref.WeakKeyDictionary[Group, save_story.EarlierSaves] = weakref.WeakKeyDictionary()
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
    request = SaveRequest(
        path=path,
        state=state,
        options=options,
        wrong=wrong,
        ranks=acting(group, options.comm),
        step=step,
        wait=wait,
        overwrite=overwrite,
        metadata=metadata,
        records=records,
    )
    try:
        if wait:
            outcome = _save_now(request.group, request.save_job, options)
        else:
            background = background_of(request.group, elsewhere=request.elsewhere)
            outcome = background.save(request.group, request.save_job, request.place.url, options)
            if wrong is not None:
                outcome.result()  # raises the error here, and not only when the user asks for the result
        pending = PendingSave(outcome)
        begun(pending)
        if options.on_error == "raise":
            for background in backgrounds_of(request.group):
                background.surface(but=outcome)
    except ReknitError as error:
        if request.raises(error):
            raise
        logger.warning("save to %s failed: %s", path, error)
        outcome = SaveOutcome(str(location_text(path)), step)
        outcome.end(error)
        pending = PendingSave(outcome)
        begun(pending)
    return pending


def _save_now(joined: Group, make: Callable[[], SaveJob], options: SaveOptions) -> SaveOutcome:
    """Save, and return when the checkpoint is committed."""
    with ExitStack() as last:
        with raised_on_all_ranks(joined, ASSIGN, options.timeout_s):
            job = make()
            last.callback(job.storage.close)
            for background in backgrounds_of(joined):
                background.wait_for(job.url, options.timeout_s)
        with job.recorder.whole():
            report, written = save_story.save(job, _earlier.setdefault(joined, save_story.EarlierSaves()))
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
    """Promote a save of all ranks to each place; a place that fails does not prevent the others."""
    from reknit.engine.stored.promote import Target, promote_saved  # most saves are not promoted

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
    options, wrong = tried_options(options, SaveOptions)
    request = SaveRequest(
        path=path,
        state={} if state is None else state,
        options=options,
        wrong=wrong,
        ranks=acting(group, options.comm),
    )
    try:
        background = background_of(request.group, elsewhere=request.elsewhere)
        background.prepare(request.group, request.warm_up_job, request.place.url, options)
    except ReknitError as error:
        if request.raises(error):
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
