"""The folder of a run, in all its tiers: opened for writing by one run at a time, the last that did."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from reknit.arguments import following
from reknit.engine.run_record import Run, newest_run, open_run
from reknit.engine.stored.copy_files import Promotion
from reknit.engine.stored.moving import delete_moved
from reknit.engine.stored.opening import manifest_in
from reknit.engine.stored.promote import promote_alone
from reknit.engine.stored.steps import numbered
from reknit.errors import CheckpointExistsError, FormatError, StoragePermissionError, UsageError, shown
from reknit.monitor.phase import Deadline, Recorder
from reknit.runs.agreement import asked
from reknit.runs.settle import forbid_markers, wait_for_agents
from reknit.runs.tiers import FoundStep
from reknit.storage.registry import open_storage
from reknit.types.rank_text import named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.comm.base import Group
    from reknit.options import SaveOptions
    from reknit.runs.tiers import Folder, Level, Tiers

logger = logging.getLogger("reknit")

LaterSteps = Literal["refuse", "move", "replace"]
"""What becomes of steps that an earlier run has saved, where a new one begins before them."""


def check_later_steps(value: object) -> None:
    """Raise `UsageError` for what is no `LaterSteps`."""
    if value not in ("refuse", "move", "replace"):
        raise UsageError(f"later_steps is 'refuse', 'move' or 'replace', not {shown(value)}")


class RunFolder:
    """What rank 0 finds and does in the folder of a run, for all ranks.

    `generation` is that of this run, once it has opened the folder for writing: at `resume`, or before the
    first save.
    """

    def __init__(self, group: Group, tiers: Tiers, options: SaveOptions, later_steps: LaterSteps) -> None:
        self._group, self._tiers, self._options, self._later_steps = group, tiers, options, later_steps
        self.generation: int | None = None

    def ask(self, name: str, question: Callable[[], Any], subject: str = "") -> Any:
        """Return what rank 0 finds; its errors are raised on all ranks."""
        return asked(self._group, name, self._options.timeout_s, question, subject)

    def find(self, name: str, step: int | str = "latest", before: Folder | None = None) -> FoundStep | None:
        """Return a step as rank 0 finds it."""
        found = self.ask(
            name, partial(self._tiers.find, step, before), f"step {step}" if before is None else ""
        )
        return None if found is None else FoundStep(*found)

    def open_to_resume(self, timeout_s: float) -> None:
        """Wait for agents of an earlier run on this host, open the folder, and let no other save commit.

        A folder that may only be read is not opened.
        """
        self.generation = self.ask("settle", partial(self._settle, timeout_s))

    def open_at(self, step: int, *, resumed: bool) -> None:
        """Open the folder before the first save of a run, at a step, unless it is open.

        Raises `CheckpointExistsError` where this or a later step is there, of an earlier run, unless this one
        has `resumed` from that, or `later_steps` says otherwise.
        """
        if self.generation is None:
            self.generation = self.ask("open run", partial(self._open, step, resumed))

    def runs(self) -> list[Run | None]:
        """Return this run, as promotions to each tier carry it; None before the folder is open."""
        return [
            None if self.generation is None else Run(partial(open_storage, level.url), self.generation)
            for level in self._tiers.levels
        ]

    def _settle(self, timeout_s: float) -> int | None:
        deadline = Deadline(timeout_s)
        for run in self.runs():
            if run is not None:
                run.check()
        for level in self._tiers.levels:
            wait_for_agents(level.storage, deadline.remaining())
        generation = self.generation
        if generation is None:
            try:
                generation = self._take()
            except StoragePermissionError as error:
                logger.info("%s is read, and not opened for writing: %s", self._tiers.where, error.message)
        for level in self._tiers.levels:
            forbid_markers(level.storage)
        return generation

    def _open(self, step: int, resumed: bool) -> int:
        refuses = not resumed and self._later_steps == "refuse"
        if refuses:  # before the run that may be at work here is shut out
            self._refuse_later(step)
        generation = self._take()
        for level in self._tiers.levels:
            forbid_markers(level.storage)
        if refuses:
            self._refuse_later(step)
        elif not resumed:
            for level, folder in self._later(step):
                self._clear(level, folder, f"aside-{generation}")
        return generation

    def _take(self) -> int:
        """Open the folder in all tiers, as one generation, higher than all that is known there."""
        levels = self._tiers.levels
        at_least = max(self._group.generation, *(_newest_generation(level) + 1 for level in levels))
        while True:
            at_least = max(at_least, *(newest_run(level.storage) + 1 for level in levels))
            taken = {open_run(level.storage, at_least) for level in levels}
            if len(taken) == 1:  # else another run opens them at this moment
                return taken.pop()

    def _later(self, step: int) -> Iterator[tuple[Level, Folder]]:
        """Yield the committed steps from one on."""
        for level in self._tiers.levels:
            for folder in numbered(level.storage):
                if folder[0] >= step and level.committed(folder):
                    yield level, folder

    def _refuse_later(self, step: int) -> None:
        found = sorted({number for _, (number, _) in self._later(step)})
        if found:
            raise CheckpointExistsError(
                f"{self._tiers.where} has {named(found, 'step')} of an earlier run, and this one would begin "
                f"with step {step}",
                path=self._tiers.levels[0].url,
                remedy=f"call resume(state) first, to go on after step {found[-1]}; or give this run a "
                "folder of its own; or pass Checkpointer(..., later_steps='move'), which puts those steps "
                "aside, or 'replace', which removes them",
            )

    def _clear(self, level: Level, folder: Folder, aside: str) -> None:
        """Put a step of an earlier run aside, or remove it."""
        step, name = folder
        here = level.storage.sub(name)
        manifest = manifest_in(here)
        if manifest is None:  # gone meanwhile
            return
        if self._later_steps == "move":
            there = level.storage.sub(f"{aside}/{name}")
            job = Promotion(following(here), there, False, self._options, Recorder("promote", step=step))
            promote_alone(job)
            logger.warning("step %d of an earlier run is put aside: %s", step, there.url)
        else:
            logger.warning("step %d of an earlier run is removed: %s", step, here.url)
        delete_moved(here, open_storage, manifest.save_id)


def _newest_generation(level: Level) -> int:
    """Return the generation of the newest step of a tier, -1 without one."""
    for _, name in numbered(level.storage):
        try:
            manifest = manifest_in(level.storage.sub(name))
        except FormatError:
            continue
        if manifest is not None:
            return -1 if manifest.generation is None else manifest.generation
    return -1
