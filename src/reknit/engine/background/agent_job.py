"""The job of an agent for a save of its trainer, with stores that the agent opens itself."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from reknit.engine.background import agent_messages as say
from reknit.engine.record.run_record import Run, folder_above
from reknit.engine.saving.save_job import SaveJob
from reknit.engine.stored.promote import Target
from reknit.errors import AgentError, ReknitError, shortage
from reknit.monitor.outlet import Outlet
from reknit.monitor.phase import Recorder
from reknit.monitor.sinks.choosing import outlets_for
from reknit.storage.registry import adopt, open_storage, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.monitor.records import Record
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage


def agent_job(
    begin: say.Begin, options: SaveOptions, group: Group, send: Callable[[say.AgentMessage], object]
) -> SaveJob:
    """Return the job of a save in the agent: in its own `group`, with a store that the agent opens.

    `send` sends a message to the trainer, for the sinks that only the trainer has.  Raises `ReknitError`.
    """
    try:
        storage = open_store(begin.url, begin.factory, options)
    except ReknitError:
        raise
    except Exception as error:  # a foreign store may raise any error
        raise shortage(error) or AgentError(
            f"the agent cannot open {begin.url}: {type(error).__name__}: {error}",
            rank=group.rank,
            remedy="let the module of this store be importable by itself, or save with wait=True",
        ) from error
    step, extra = begin.claims.step, json.loads(begin.extra)
    sinks = outlets_for(options.events)
    if begin.sends_events:
        to_trainer = _ToTrainer(begin.number, send)
        sinks += (Outlet(to_trainer, "the trainer does not receive them", idle_s=1.0),)
    recorder = Recorder(
        action="save",
        rank=group.rank,
        step=step,
        path=storage.url,
        sinks=sinks,
        process="agent",
        coordinate=begin.coordinate,
    )
    storage = recorded(storage, recorder)
    extra["run"] = run_of(begin.url, begin.factory, begin.record, options)
    return SaveJob(
        collect=_collect_nothing,
        group=group,
        storage=storage,
        options=options,
        recorder=recorder,
        step=step,
        overwrite=begin.overwrite,
        **extra,
    )


def run_of(url: str, factory: str | None, record: str | None, options: SaveOptions) -> Run | None:
    """Return the run with a record in the folder above a URL, or None without a record."""
    return None if record is None else Run(partial(open_store, folder_above(url), factory, options), record)


class TargetStore:
    """A store to promote to, opened when the promotion begins, or ahead of it."""

    def __init__(self, place: tuple[str, str | None, float | None, str | None], options: SaveOptions) -> None:
        url, factory, self._bytes_per_s, record = place
        self._open = partial(open_store, url, factory, options)
        self._run = run_of(url, factory, record, options)
        self._lock = threading.Lock()
        self._begun = False
        self._storage: Storage | None = None

    def open_ahead(self) -> None:
        """Open the store unless it was opened before."""
        with self._lock, suppress(Exception):  # raised when the promotion opens it again
            if not self._begun and self._storage is None:
                self._storage = self._open()

    def target(self) -> Target:
        """Return the store for a promotion that begins."""
        return Target(self._opened, self._bytes_per_s, recorded, self._run)

    def _opened(self) -> Storage:
        with self._lock:
            self._begun = True
            storage, self._storage = self._storage, None
            return storage or self._open()


class _ToTrainer:
    """A sink that sends the agent's records of one save to the trainer."""

    def __init__(self, number: int, send: Callable[[say.AgentMessage], object]) -> None:
        self._number, self._send = number, send

    def take(self, records: Sequence[Record]) -> None:
        """Send the records; a trainer that is gone does not need them."""
        self._send(say.Events(self._number, [record.as_dict() for record in records]))


def open_store(url: str, factory: str | None, options: SaveOptions) -> Storage:
    """Open a store; `factory` (`registry.recipe`) defines its scheme unless reknit has that scheme."""
    if factory is not None:
        adopt(url, factory)
    return open_storage(url, durability=options.durability)


def _collect_nothing() -> NoReturn:
    """Replace `collect` in an agent, which receives copies of the state instead."""
    raise AssertionError("an agent collects nothing")
