"""Saves of holdings that a test has made itself, in place of a state that adapters walk through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.engine.saving import save as driver
from reknit.engine.saving.here import Here
from reknit.engine.saving.task import SaveTask
from reknit.events.phase import Recorder
from tests.engine.runs import nothing_held

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group
    from reknit.engine.saving.here import EarlierSaves
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage
    from reknit.types.shard import Holdings


class At(NamedTuple):
    """The place of a store that a test has opened."""

    storage: Storage
    factory: str | None = None

    @property
    def url(self) -> str:
        return self.storage.url

    def open(self, durability: str, recorder: Recorder) -> Storage:
        return self.storage

    def copies_files(self, durability: str) -> bool:
        return hasattr(self.storage, "copy_from")


class HeldTask(SaveTask, kw_only=True, eq=False):
    """The task of a save whose holdings a test has made itself, in place of a walk through a state."""

    collect: Callable[[], Holdings]

    def holdings(self) -> Holdings:
        return self.collect()


def task_at(storage: Storage, group: Group, options: SaveOptions, **more: Any) -> HeldTask:
    """Return the task of a rank that saves to an open store, such as its writer has it."""
    more.setdefault("recorder", Recorder("save", group.rank, more.get("step")))
    task = HeldTask(place=At(storage), group=group, options=options, collect=nothing_held, **more)
    task.storage = storage
    return task


def save_held(collect: Callable[[], Holdings], task: HeldTask, earlier: EarlierSaves | None = None) -> Here:
    """Save the holdings of a rank, and return the writer."""
    here, task.collect = Here(task, earlier), collect
    driver.save(task, here)
    return here
