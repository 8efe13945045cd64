"""The promotions of one save, as an agent carries them out once the checkpoint is committed."""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reknit.engine.background import messages
from reknit.engine.saving.task import SaveTask
from reknit.engine.stored.promote import Target, promote_saved
from reknit.engine.stored.run_record import Run, folder_above
from reknit.errors import AgentError, ReknitError, shortage, typed
from reknit.events.outlet import Outlet
from reknit.events.phase import Recorder
from reknit.events.to_file import outlets_for
from reknit.options import LEAST_INFLIGHT_NBYTES
from reknit.storage.registry import StoreRecipe, adopt, open_storage, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm import group as comm
    from reknit.comm.group import Group
    from reknit.engine.memory.write import Written
    from reknit.events.records import Record
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage


def agent_task(
    begin: messages.Begin, options: SaveOptions, group: Group, send: Callable[[messages.AgentMessage], object]
) -> SaveTask:
    """Return the task of a save in the agent: in its own `group`, with a store that the agent opens.

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
    extra["run"] = run_of(begin.url, begin.factory, begin.record, options)
    task = SaveTask(
        place=StoreRecipe(begin.url, agents_can_open=True, factory=begin.factory),
        group=group,
        options=options,
        recorder=recorder,
        step=step,
        overwrite=begin.overwrite,
        **extra,
    )
    task.storage = recorded(storage, recorder)
    return task


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

    def __init__(self, number: int, send: Callable[[messages.AgentMessage], object]) -> None:
        self._number, self._send = number, send

    def take(self, records: Sequence[Record]) -> None:
        """Send the records; a trainer that is gone does not need them."""
        self._send(messages.Events(self._number, [record.as_dict() for record in records]))


def open_store(url: str, factory: str | None, options: SaveOptions) -> Storage:
    """Open a store; `factory` (`registry.recipe`) defines its scheme unless reknit has that scheme."""
    if factory is not None:
        adopt(url, factory)
    return open_storage(url, durability=options.durability)


logger = logging.getLogger("reknit")


class AgentPromotions:
    """The stores to which a save is promoted, and which of these promotions are left."""

    def __init__(
        self, begin: messages.Begin, task: SaveTask, ended: Callable[[messages.Promoted], bool]
    ) -> None:
        """Call `ended` with the end of each promotion; it returns whether the trainer receives it."""
        self._number, self._task, self._ended = begin.number, task, ended
        self._url, self._write_id = begin.url, begin.claims.write_id
        self.targets = [url for url, *_ in begin.promote_to]
        """The stores to which the checkpoint is promoted."""
        self.stores = [TargetStore(place, task.options) for place in begin.promote_to]
        self.left = set(range(len(self.targets)))
        """Numbers of the targets whose promotions have not ended."""
        self.written: Sequence[Written] | None = None
        """The files that this rank wrote, once the checkpoint is committed."""

    def promote(self, target: int, group: comm.Group, num_lanes: int) -> None:
        """Copy the files of this rank to a target, together with all ranks, and report to the trainer.

        The copy may take the memory of a save divided by `num_lanes`.
        """
        assert self.written is not None
        share = max(self._task.options.inflight_nbytes // num_lanes, LEAST_INFLIGHT_NBYTES)
        options = replace(self._task.options, inflight_nbytes=share)
        to = self.stores[target].target()
        try:
            report = promote_saved(
                self._task, self._write_id, self.written, group=group, to=to, options=options
            )
        except BaseException as error:  # also a bug: the trainer must receive it
            self.fail(target, error)
            return
        self._task.recorder.flush()
        self._ended(
            messages.Promoted(
                number=self._number,
                target=target,
                error=None,
                path=report.path,
                nbytes=report.nbytes,
                num_files=report.num_files,
                records=[record.as_dict() for record in report.phases],
            )
        )

    def fail(self, target: int, error: BaseException) -> None:
        """Report the error of a promotion to the trainer, or log it if the trainer is gone."""
        failure = typed(error)
        failure.sign(rank=self._task.group.rank)
        if not self._ended(messages.Promoted(self._number, target, failure.to_wire())):
            logger.error("promotion of %s to %s failed: %s", self._url, self.targets[target], failure)
