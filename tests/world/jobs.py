"""One rank's save or load by the engine itself, without the arguments that are always the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.engine.loading.load import load
from reknit.engine.loading.task import LoadTask
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
    group: Group, storage: Storage, collect: Callable[[], Holdings], options: SaveOptions = SAVE, **more: Any
) -> SaveReport:
    """Save as a rank of a group."""
    return save_held(collect, task_at(storage, group, options, **more)).report()


class PlannedTask(LoadTask, frozen=True, kw_only=True):
    """The task of a load whose wanted entries a test names, in place of a walk through a state."""

    want: Callable[[Catalog], Wanted]

    def wanted(self, catalog: Catalog) -> Wanted:
        return self.want(catalog)


def planned(
    group: Group, storage: Storage, want: Callable[[Catalog], Wanted], items: Sequence[str], **more: Any
) -> PlannedTask:
    """Return a task that loads the entries named by `want`."""
    recorder = Recorder("load", group.rank)
    return PlannedTask(group, storage, dict.fromkeys(items), recorder=recorder, want=want, **more)


def load_rank(
    group: Group,
    storage: Storage,
    want: Callable[[Catalog], Wanted],
    options: LoadOptions = LOAD,
    items: Sequence[str] = ("model",),
    **more: Any,
) -> LoadReport:
    """Load as a rank of a group."""
    return load(planned(group, storage, want, items, options=options, **more))
