"""Saves of holdings that a test has made itself, in place of a state that adapters walk through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from reknit.engine.saving import save as driver
from reknit.engine.saving.here import Here
from reknit.engine.saving.task import SaveTask
from reknit.events.phase import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reknit.comm.group import Group
    from reknit.engine.saving.here import EarlierSaves
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage
    from reknit.types.shard import Holdings

_gather = vars(driver)["gather"]


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


class Held(NamedTuple):
    """A state that stands for these holdings."""

    collect: Callable[[], Holdings]


def _gathered(state: Any, *args: Any, **more: Any) -> Holdings:
    return cast("Holdings", state.collect() if isinstance(state, Held) else _gather(state, *args, **more))


setattr(driver, "gather", _gathered)  # noqa: B010 (no assignment to a function, for mypy)


def task_at(storage: Storage, group: Group, options: SaveOptions, **more: Any) -> SaveTask:
    """Return the task of a rank that saves to an open store, such as its writer has it."""
    more.setdefault("recorder", Recorder("save", group.rank, more.get("step")))
    task = SaveTask(place=At(storage), group=group, options=options, **more)
    task.storage = storage
    return task


def save_held(collect: Callable[[], Holdings], task: SaveTask, earlier: EarlierSaves | None = None) -> Here:
    """Save the holdings of a rank, and return the writer."""
    here = Here(task, earlier)
    driver.save(cast("Mapping[str, Any]", Held(collect)), task, here)
    return here
