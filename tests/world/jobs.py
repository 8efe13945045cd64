"""One rank's save or load by the engine itself, without the arguments that are always the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.engine.loading.load import load
from reknit.engine.loading.task import LoadJob
from reknit.events.phase import Recorder
from reknit.options import LoadOptions, SaveOptions
from tests.engine.held import save_held, task_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.engine.reports import LoadReport, SaveReport
    from reknit.storage.base import Storage
    from reknit.types.manifest import Catalog
    from reknit.types.shard import Holdings
    from reknit.types.wanted import Wanted

SAVE = SaveOptions(threads=2, timeout_s=30)
LOAD = LoadOptions(threads=2, timeout_s=30)


def save_rank(
    group: Group,
    storage: Storage,
    collect: Callable[[], Holdings],
    options: SaveOptions = SAVE,
    **more: Any,
) -> SaveReport:
    """Save as a rank of a group."""
    return save_held(collect, task_at(storage, group, options, **more)).report()


def load_rank(
    group: Group,
    storage: Storage,
    want: Callable[[Catalog], Wanted],
    options: LoadOptions = LOAD,
    items: Sequence[str] = ("model",),
    **more: Any,
) -> LoadReport:
    """Load as a rank of a group."""
    recorder = Recorder("load", group.rank)
    job = LoadJob(
        want=want,
        group=group,
        storage=storage,
        items=tuple(items),
        options=options,
        recorder=recorder,
        **more,
    )
    return load(job)
