"""The calls of users: check the arguments, and hand over to the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reknit.arguments import (
    check_state,
    checked_seconds,
    lenient_patterns,
    open_places,
    part_of,
    tried_options,
)
from reknit.calls import (
    all_backgrounds,
    background_of,
    backgrounds_of,
    entering,
    raised_on_all_ranks,
    removed_backgrounds,
    save_now,
)
from reknit.engine.display import logged
from reknit.engine.loading import load as load_story
from reknit.engine.loading.load_job import LoadJob
from reknit.engine.outcome import PendingSave, SaveOutcome
from reknit.engine.stored.places import Replicas
from reknit.errors import ReknitError
from reknit.frameworks import registry
from reknit.keywords import checked_call
from reknit.locations import location_text
from reknit.monitor.phase import Recorder, Stopwatch
from reknit.monitor.sinks.choosing import outlets_for
from reknit.options import LoadOptions, SaveOptions
from reknit.ranks import acting
from reknit.save_request import SaveRequest
from reknit.storage.registry import recorded
from reknit.transforms.names import split_rules
from reknit.types.entry import entered

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from reknit.engine.call_reports import LoadReport
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
    returns, and not before; a save that fails or is killed leaves an earlier checkpoint unchanged.

    With `wait=False` the call returns once the state is copied to host memory and may be changed.  The agent,
    a separate process for each rank, writes and commits, even if the trainer dies.  A failure is logged, and
    raised by `result()`, or by the next `save` if `result()` was not called.  With
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
) -> PendingSave:
    """Save as `save` does, as a step of a run; `records` are its records by the URLs of their folders."""
    options, wrong = tried_options(options, SaveOptions, "save" if wait is True else None)
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
            outcome = save_now(request.group, request.save_job, options)
        else:
            background = background_of(request.group, elsewhere=request.elsewhere)
            outcome = background.save(request.group, request.save_job, request.place.url, options)
            if wrong is not None:
                outcome.result()  # raises the error here, and not only when the user asks for the result
        if options.on_error == "raise":
            for background in backgrounds_of(request.group):
                background.surface(but=outcome)
    except ReknitError as error:
        if request.raises(error):
            raise
        logger.warning("save to %s failed: %s", path, error)
        outcome = SaveOutcome(str(location_text(path)), step)
        outcome.end(error)
    return PendingSave(outcome)


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


def _wait_for_copies(timeout_s: float) -> None:
    """Wait until all pending saves are copied, so that their states may be changed."""
    for background in all_backgrounds():
        background.wait_staged(timeout_s)


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
    """Fill `state` in place from the checkpoint at `path`, in any layout, not only that of the save.

    `state` is as for `save`; each rank passes its own part of the target layout.  `items` names the items to
    load, by default all of `state`; other items of the checkpoint are not loaded.  Each rank reads only the
    bytes that it needs, and checks them.

    With `strict` (the default), an entry that cannot be restored exactly raises `MismatchError` on every rank
    before anything changes; with `strict=False`, the `LoadReport` lists it.  `strict` may be a list of
    patterns of names ``item/fqn``:  ``["model/*"]`` is strict for the model alone, ``["!model/head.*"]`` for
    all but its head; the last pattern that matches a name decides.  A load that would restore no tensor of
    `state` on any rank is always a `MismatchError`, unless the checkpoint has only values, and some of them
    are restored.  So is a pattern that matches no name on any rank.  A value that each rank saved for itself
    (random state, `PerRank`) is restored if the ranks are the same; otherwise it stays, and
    `LoadReport.notes` mentions it.

    Objects with `load_state_dict` are loaded before any tensor of `state` changes, unless their class has
    `load_after_tensors = True`.  If one raises an exception, that is a `StateError`: reknit has changed no
    tensor on any rank, and the error names the objects that were loaded before.  Changes by the code of the
    objects until then stay.

    Raises `CheckpointNotFoundError`, `MismatchError`, `CorruptError`, `VersionError`, `StateError`,
    `StorageError`, `CommError`: on every rank the same error, naming rank and phase, and never an exception
    of your own code, as for `save`.
    """
    options, wrong = tried_options(options, LoadOptions)
    joined, ranks, carrier = acting(group, options.comm)
    with ExitStack() as last:
        with raised_on_all_ranks(joined, load_story.FIRST_ROUND, options.timeout_s):
            if wrong is not None:
                raise wrong
            check_state(state)
            lenient = lenient_patterns(strict)
            split_rules(options.transforms)
            part = part_of(state, items)
            storage, *others = open_places(path, options, last)
            recorder = Recorder("load", joined.rank, None, storage.url, outlets_for(options.events))
            storage, *others = (recorded(one, recorder) for one in (storage, *others))
        job = LoadJob(
            want=lambda catalog: registry.wanted(
                part if isinstance(state, MutableMapping) else MappingProxyType(part),
                catalog,
                joined.rank,
                joined.size,
                ranks=ranks,
            ),
            group=joined,
            storage=storage,
            items=tuple(part),
            options=options,
            recorder=recorder,
            carrier=carrier,
            replicas=Replicas(others),
            lenient=lenient,
        )
        _wait_for_copies(options.timeout_s)
        clock = Stopwatch()
        with clock.lap(), recorder.whole():
            report = load_story.load(job)
        if joined.rank == 0:
            to = "" if joined.size == 1 else f"to rank 0 of {joined.size}"
            logger.info(
                "%s",
                logged("loaded", report.path, report.step, report.nbytes_wanted, to, seconds=clock.seconds),
            )
    if isinstance(state, MutableMapping):
        state.update({name: value for name, value in part.items() if value is not state[name]})
    return report
