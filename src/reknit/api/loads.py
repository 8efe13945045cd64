"""The call of users that loads: find the ranks, check the arguments, open the place, and load."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reknit.api.checks import (
    all_backgrounds,
    check_state,
    entering,
    lenient_patterns,
    open_places,
    part_of,
    raised_on_all_ranks,
    tried_options,
)
from reknit.api.ranks import acting
from reknit.engine.loading import load as load_story
from reknit.engine.loading.task import LoadTask
from reknit.engine.reports import logged
from reknit.engine.stored.places import Replicas
from reknit.engine.stored.renaming import split_transforms
from reknit.events.phase import Recorder, Stopwatch
from reknit.events.to_file import outlets_for
from reknit.keywords import checked_call
from reknit.options import LoadOptions
from reknit.storage.registry import recorded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from reknit.api.ranks import AnyGroup
    from reknit.engine.reports import LoadReport

logger = logging.getLogger("reknit")


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
    are restored.  So is a pattern that matches no name on any rank, unless it begins with ``!``.  A value
    that each rank saved for itself (random state, `PerRank`) is restored if the ranks are the same; otherwise
    it stays, and `LoadReport.notes` mentions it.

    Objects with `load_state_dict` are loaded before any tensor of `state` changes, unless their class has
    `load_after_tensors = True`.  If one raises an exception, that is a `StateError`: reknit has changed no
    tensor on any rank, and the error names the objects that were loaded before.  Changes by the code of the
    objects until then stay.

    Raises `CheckpointNotFoundError`, `MismatchError`, `CorruptError`, `VersionError`, `StateError`,
    `StorageError`, `CommError`: on every rank the same error, naming rank and phase, and never an exception
    of your own code, as for `save`.
    """
    options, wrong = tried_options(options, LoadOptions)
    # 1 Find the ranks that act together.
    ranks = acting(group, options.comm)
    with ExitStack() as last:
        # 2 Read the call, and 3 open the place, once.  An error is one on all ranks, in the first round.
        with raised_on_all_ranks(ranks.group, load_story.FIRST_ROUND, options.timeout_s):
            if wrong is not None:
                raise wrong
            check_state(state)
            lenient = lenient_patterns(strict)
            split_transforms(options)
            part = part_of(state, items)
            storage, *others = open_places(path, options, last)
            recorder = Recorder("load", ranks.group.rank, None, storage.url, outlets_for(options.events))
            storage, *others = (recorded(one, recorder) for one in (storage, *others))
            task = LoadTask(
                group=ranks.group,
                storage=storage,
                targets=part if isinstance(state, MutableMapping) else MappingProxyType(part),
                options=options,
                recorder=recorder,
                beside={name: value for name, value in state.items() if name not in part},
                ranks=ranks.ranks,
                carrier=ranks.carrier,
                replicas=Replicas(others),
                lenient=lenient,
            )
        for background in all_backgrounds():  # their states may be changed once they are copied
            background.wait_staged(options.timeout_s)
        # 4 to 10 From the contents of the checkpoint to live objects.
        clock = Stopwatch()
        with clock.timed(), recorder.whole():
            report = load_story.load(task)
        if ranks.group.rank == 0:
            to = "" if ranks.group.size == 1 else f"to rank 0 of {ranks.group.size}"
            logger.info(
                "%s",
                logged("loaded", report.path, report.step, report.nbytes_wanted, to, seconds=clock.seconds),
            )
    if isinstance(state, MutableMapping):
        state.update({name: value for name, value in part.items() if value is not state[name]})
    return report
