"""The calls of users: check the arguments, and hand over to the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reknit import arguments
from reknit.arguments import (
    check_flag,
    check_metadata,
    check_promotion,
    check_state,
    checked_step,
    lenient_patterns,
    open_places,
    part_of,
    place_of,
    tried_options,
    warn_of_loose_tensors,
)
from reknit.calls import (
    all_backgrounds,
    all_told,
    background_of,
    backgrounds_of,
    entering,
    origin_of,
    save_now,
    taken_backgrounds,
)
from reknit.engine.display import logged
from reknit.engine.loading import load as load_story
from reknit.engine.loading.job import LoadJob
from reknit.engine.outcome import PendingSave, SaveOutcome
from reknit.engine.run_record import Run, folder_above
from reknit.engine.saving.job import SaveJob
from reknit.errors import ReknitError, UsageError
from reknit.frameworks import registry
from reknit.keywords import checked_call
from reknit.locations import location_text
from reknit.monitor.phase import Recorder, Stopwatch
from reknit.monitor.sinks.choosing import outlets_for
from reknit.options import LoadOptions, SaveOptions
from reknit.ranks import acting
from reknit.storage.registry import open_storage, recorded
from reknit.transforms.names import parted
from reknit.types.entry import entered

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from reknit.engine.report import LoadReport
    from reknit.ranks import AnyGroup

logger = logging.getLogger("reknit")


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
    returns, and not before; a save that fails or is killed leaves what was there before.

    With `wait=False` the call returns once the state is copied to host memory and may be changed.  The agent,
    a separate process for each rank, writes and commits, even if the trainer dies meanwhile.  A failure is
    logged, and raised by `result()`, or by the next `save` if nobody called that.  With
    ``SaveOptions(stage="lazy")`` what only the steps of an optimizer change is copied after the call, and
    these steps wait for it.

    `step` and `metadata` (JSON-like) are stored in the manifest.  `overwrite=True` replaces a checkpoint at
    `path` by a safe switch.  `group`: a torch process group or a `reknit` group, default all ranks of the
    job.  A process without one is alone; if a launcher started it with others, it passes `reknit.alone()`.

    Raises `StateError` (something cannot be saved; nothing was written), `CheckpointExistsError`,
    `CommitError` (the ranks' parts leave a hole), `StorageError`, `CommError`: on every rank the same error,
    naming rank and phase.  An exception of your own code (a `state_dict` that fails) becomes a `StateError`
    that names the object, on every rank; where it began, `__cause__` is the exception.  Only Ctrl-C and
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
) -> PendingSave:
    """Save as `save` does, as a step of the run that has `records` in some folders, by their URLs."""
    unused = arguments.BACKGROUND_ONLY if wait is True else ()
    options, wrong = tried_options(options, SaveOptions, "a save with wait=True", unused)
    joined, ranks, _ = acting(group, options.comm)

    def job() -> SaveJob:
        if wrong is not None:
            raise wrong
        check_state(state)
        warn_of_loose_tensors(state)
        check_metadata(metadata or {})
        check_flag("wait", wait)
        check_flag("overwrite", overwrite)
        number = checked_step(step)
        storage = open_storage(path, durability=options.durability)
        if options.promotions:
            check_promotion(storage, options, joined.rank, overwrite=overwrite)
        recorder = Recorder("save", joined.rank, number, storage.url, outlets_for(options.events))
        return SaveJob(
            lambda: registry.collect(state, joined.rank, joined.size, ranks=ranks),
            joined,
            recorded(storage, recorder),
            options,
            recorder,
            number,
            overwrite,
            origin_of(joined),
            metadata or {},
            place.url,
            place.factory,
            [
                (each.url, each.factory, target.bytes_per_s, records.get(folder_above(each.url)))
                for each, target in then
            ],
            None if record is None else Run(partial(open_storage, folder_above(place.url)), record),
        )

    place = place_of(path)
    record = records.get(folder_above(place.url))
    then = [(place_of(target.path), target) for target in options.promotions]

    try:
        if wait:
            pending = save_now(joined, job, options)
        else:
            elsewhere = place.elsewhere and all(each.elsewhere for each, _ in then)
            pending = background_of(joined, elsewhere=elsewhere).save(joined, job, place.url, options)
            if wrong is not None:
                pending.result()  # raises it here, and not only when somebody asks
        if options.on_error == "raise":
            for background in backgrounds_of(joined):
                background.surface(but=pending)
    except ReknitError as error:
        if options.on_error == "raise" or isinstance(error, UsageError):
            raise
        logger.warning("save to %s failed: %s", path, error)
        pending = SaveOutcome(str(location_text(path)), step)
        pending.end(error)
    return PendingSave(pending)


@checked_call
@entering("reknit.prepare")
def prepare(
    path: str | PathLike[str],
    state: Mapping[str, Any] | None = None,
    *,
    options: SaveOptions | None = None,
    group: AnyGroup | None = None,
) -> None:
    """Do ahead what the first `save(path, state, wait=False)` would do, so that it blocks like later ones.

    Every rank calls it, like `save`, with the `options` of the saves to come.  `path` is any place in the
    store that will be saved to, such as the folder of the run; nothing is written there.  Agents are started
    and connected.  With `state`, they also agree on a plan, and the host memory that staging needs is taken
    and filled with pages.  Nothing of the state is changed or kept.

    A plan is for one layout: names, shapes, dtypes, and who holds what.  For a state that has another one at
    the save (optimizers make theirs in the first step) the plan is made then, and what memory is missing is
    taken then.

    Raises `StateError`, `UnknownSchemeError`, `StorageError`, `AgentError`, `CommError`, on every rank the
    same error, as for `save`, and `ShortageError` where there is too little memory.  With ``on_error="warn"``
    what is no wrong call is logged, and the first save does what was not done.
    """
    options, wrong = tried_options(options, SaveOptions, "reknit.prepare")
    joined, ranks, _ = acting(group, options.comm)
    place = place_of(path)
    elsewhere = all(each.elsewhere for each in (place, *(place_of(to.path) for to in options.promotions)))

    def job() -> SaveJob:
        if wrong is not None:
            raise wrong
        held = {} if state is None else state
        check_state(held)
        storage = open_storage(path, durability=options.durability)
        return SaveJob(
            lambda: registry.collect(held, joined.rank, joined.size, ranks=ranks),
            joined,
            storage,
            options,
            Recorder("prepare", joined.rank, None, storage.url, outlets_for(options.events)),
            url=place.url,
            factory=place.factory,
        )

    try:
        background_of(joined, elsewhere=elsewhere).prepare(joined, job, place.url, options)
    except ReknitError as error:
        if options.on_error == "raise" or isinstance(error, UsageError):
            raise
        logger.warning("could not prepare for saves to %s: %s", path, error)


def _wait_for_copies(timeout_s: float) -> None:
    """Wait until the copies of all saves under way are made, and their states may be changed."""
    for background in all_backgrounds():
        background.wait_staged(timeout_s)


@checked_call
@entered("reknit.close")
def close(timeout_s: float | None = None) -> bool:
    """Wait for the saves under way, let the agents end, and give their memory back; tell whether all ended.

    Waits up to `timeout_s`, by default as long as the saves' `exit_wait_s`; what is staged is finished by the
    agents all the same.  Later saves start new agents.  At the end of the interpreter this happens by itself.
    Every rank calls it, or none.
    """
    if timeout_s is not None:
        timeout_s = arguments.checked_seconds("timeout_s", timeout_s)
    ended = True
    for background in taken_backgrounds():
        ended = background.close(timeout_s) and ended
    return ended


@checked_call
@entering("reknit.load")
def load(
    path: str | PathLike[str],
    state: Mapping[str, Any],
    *,
    items: Sequence[str] | None = None,
    strict: bool | Sequence[str] = True,
    options: LoadOptions | None = None,
    group: AnyGroup | None = None,
) -> LoadReport:
    """Fill `state` in place from the checkpoint at `path`, whatever layout it was saved in.

    `state` is as for `save`; each rank brings its own part of the target layout.  `items` names those to
    load, default all of `state`; items of the checkpoint that `state` does not name are left alone.  Each
    rank reads just the bytes that it needs, and checks them.

    With `strict` (the default) anything that would not be restored exactly raises `MismatchError` on every
    rank before anything changes; with `strict=False` the `LoadReport` tells it.  A list of patterns
    of names ``item/fqn`` says what is strict: ``["model/*"]`` the model alone, ``["!model/head.*"]`` all but
    its head; the last pattern that matches a name decides.  Whatever `strict` says, it is a `MismatchError`
    if `state` has tensors and none of them on any rank would be restored (unless the checkpoint has only
    values, and some are), or if a pattern matches no name on any rank.  A value that each rank saved for
    itself (random state, `PerRank`) is restored when the ranks are the same, and otherwise left alone and
    mentioned in `LoadReport.notes`.

    Objects with `load_state_dict` are loaded before any tensor of `state` changes, unless their class has
    `load_after_tensors = True`.  If one raises an exception, that is a `StateError`: reknit has changed no
    tensor on any rank, and the error names the objects that were loaded before.  What the objects' own code
    changed until then, the one that raised included, stays.

    Raises `CheckpointNotFoundError`, `MismatchError`, `CorruptError`, `VersionError`, `StateError`,
    `StorageError`, `CommError`: on every rank the same error, naming rank and phase, and never an exception
    of your own code, as for `save`.
    """
    options, wrong = tried_options(options, LoadOptions, "reknit.load")
    joined, ranks, carrier = acting(group, options.comm)
    with ExitStack() as last:
        with all_told(joined, load_story.FIRST_ROUND, options.timeout_s):
            if wrong is not None:
                raise wrong
            check_state(state)
            lenient = lenient_patterns(strict)
            parted(options.transforms)
            part = part_of(state, items)
            storage, *replicas = open_places(path, options, last)
            recorder = Recorder("load", joined.rank, None, storage.url, outlets_for(options.events))
            storage, *replicas = (recorded(one, recorder) for one in (storage, *replicas))
        job = LoadJob(
            lambda catalog: registry.wanted(
                part if isinstance(state, MutableMapping) else MappingProxyType(part),
                catalog,
                joined.rank,
                joined.size,
                ranks=ranks,
            ),
            joined,
            storage,
            tuple(part),
            options,
            recorder,
            carrier,
            replicas,
            lenient,
        )
        _wait_for_copies(options.timeout_s)
        clock = Stopwatch()
        with clock.lap(), recorder.whole():
            report = load_story.load(job)
        if joined.rank == 0:
            to = "" if joined.size == 1 else f"to rank 0 of {joined.size}"
            logger.info(
                "%s", logged("loaded", report.path, report.step, report.nbytes_wanted, to, clock.seconds)
            )
    if isinstance(state, MutableMapping):
        state.update({name: value for name, value in part.items() if value is not state[name]})
    return report
