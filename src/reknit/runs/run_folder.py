"""The folder of a run, in all its tiers: the last run that opened it for writing owns it."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reknit.arguments import check_state
from reknit.calls import raised_on_all_ranks
from reknit.engine.record.at_path import manifest_in, size_of
from reknit.engine.record.checkpoint_notes import add_metrics, held_by, metrics_of
from reknit.engine.record.other_formats import refuse_other
from reknit.engine.record.run_record import Run, folder_above, open_run
from reknit.engine.stored.copy_files import Promotion
from reknit.engine.stored.moving import delete_moved
from reknit.engine.stored.promote import promote_alone
from reknit.engine.stored.steps import is_step_name, numbered
from reknit.errors import (
    CheckpointExistsError,
    FencedError,
    FormatError,
    ReknitError,
    StorageError,
    UsageError,
    shown,
)
from reknit.monitor.phase import Deadline, Recorder
from reknit.runs.agreement import ask_root
from reknit.runs.tiers import FoundStep, below
from reknit.runs.unfinished_saves import forbid_markers, wait_for_agents
from reknit.storage.registry import following, open_storage, recipe
from reknit.system import start_thread
from reknit.types.rank_text import named

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Group
    from reknit.engine.outcome import PendingSave
    from reknit.options import SaveOptions
    from reknit.runs.tiers import Folder, Tiers
    from reknit.storage.base import Storage

logger = logging.getLogger("reknit")

LaterSteps = Literal["refuse", "move", "replace"]
"""The fate of steps of an earlier run when a new run begins before them."""


class _Later(NamedTuple):
    """A committed step of an earlier run: its number, its folder, a folder to put it aside, and its save id.

    `problem` is the reason why it cannot give way, or None.
    """

    step: int
    here: Storage
    aside: Storage
    save_id: str
    problem: str | None


class RunFolder:
    """The work of rank 0 in the folder of a run, for all ranks.

    `records` has the record of this run in each root, by the URL of the root.  It is filled when the run
    opens the folder for writing: at `resume`, or before the first save.
    """

    def __init__(self, group: Group, tiers: Tiers, options: SaveOptions, later_steps: LaterSteps) -> None:
        if later_steps not in ("refuse", "move", "replace"):
            raise UsageError(f"later_steps is 'refuse', 'move' or 'replace', not {shown(later_steps)}")
        self._group, self._tiers, self._options, self._later_steps = group, tiers, options, later_steps
        self.records: dict[str, str] = {}
        self.is_open = False
        """Whether this run may save: the folder is open, and later steps have given way."""
        self._later: Sequence[_Later] = ()
        self._clearing: threading.Thread | None = None

    @property
    def replaces(self) -> bool:
        """Whether steps of an earlier run give way, although this run did not resume from one."""
        return self._later_steps != "refuse"

    @property
    def roots(self) -> list[str | os.PathLike[str]]:
        """The roots of all tiers, and those of `promote_to`."""
        promoted = [target.path for target in self._options.promotions]
        return [*(level.url for level in self._tiers.levels), *promoted]

    def ask(self, name: str, question: Callable[[], Any], subject: str = "") -> Any:
        """Return the answer of rank 0; its errors are raised on all ranks."""
        return ask_root(self._group, name, self._options.timeout_s, question, subject)

    def find(self, name: str, step: int | str = "latest", before: Folder | None = None) -> FoundStep | None:
        """Return a step that rank 0 finds, or None."""
        found = self.ask(
            name, partial(self._tiers.find, step, before), f"step {step}" if before is None else ""
        )
        return None if found is None else FoundStep(*found)

    def open_to_resume(self, timeout_s: float) -> None:
        """Wait for agents of an earlier run on this host, open the folder, and let no other save commit.

        A folder that cannot be written is read only, and the first save tries again to open it.
        """
        self.records = self.ask("settle", partial(self._settle, timeout_s))

    def open_at(self, step: int, state: Any, timeout_s: float, *, resumed: bool) -> None:
        """Open the folder before the first save of a run, of a state at a step.

        Raises `CheckpointExistsError` if an earlier run has saved this or a later step, unless this run has
        `resumed`, or `later_steps` is not ``"refuse"``; `UsageError` for a wrong state.
        """
        if not (resumed and self.records):
            with raised_on_all_ranks(self._group, "open run", self._options.timeout_s):
                check_state(state)
            self.records = self.ask("open run", partial(self._open, step, timeout_s, resumed=resumed))
        self.is_open = True

    def saved(self, step: int, pending: PendingSave) -> None:
        """Start a thread that removes later steps of an earlier run once a save of this run is committed."""
        if self._later and (self._clearing is None or not self._clearing.is_alive()):
            self._clearing = start_thread("reknit-clears", partial(self._clear, step, pending))

    def close(self) -> None:
        """Wait for the removal of later steps."""
        if self._clearing is not None:
            self._clearing.join()

    def runs(self) -> list[Run | None]:
        """Return this run for promotions to each tier, None for a tier that it has not opened."""
        found = [(level.url, self.records.get(_key(level.url))) for level in self._tiers.levels]
        return [None if record is None else Run(partial(open_storage, url), record) for url, record in found]

    # The steps of rank 0.

    def _settle(self, timeout_s: float) -> dict[str, str]:
        self._wait(timeout_s)
        records = self.records
        if not records or self._is_overtaken():
            try:
                records = self._take(resumes=True)
            except StorageError as error:
                where = self._tiers.where
                logger.warning("%s is read, and not opened for writing: %s", where, error.message)
                return {}
        self._forbid(None)
        return records

    def _open(self, step: int, timeout_s: float, *, resumed: bool) -> dict[str, str]:
        refuses = not resumed and not self.replaces
        if refuses:  # before a run that may still use the folder is fenced
            self._refuse_later(step)
        self._wait(timeout_s)
        records = self.records or self._take()
        self._forbid(step if not resumed and self.replaces else None)
        if refuses:
            self._refuse_later(step)
        elif not resumed:
            self._later = self._give_way(step)
        return records

    def _wait(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        for level in self._tiers.levels:
            wait_for_agents(level.storage, deadline.remaining())

    def _is_overtaken(self) -> bool:
        try:
            for run in filter(None, self.runs()):
                run.check()
        except FencedError:
            return True
        return False

    def _forbid(self, since: int | None) -> None:
        for tier, level in enumerate(self._tiers.levels):
            try:
                forbid_markers(level.storage, since)
            except StorageError as error:
                if not tier:
                    raise
                logger.warning("saves of an earlier run to %s may go on: %s", level.url, error.message)

    def _take(self, *, resumes: bool = False) -> dict[str, str]:
        """Open the tiers, or the root and the places of `promote_to`, with the highest generation so far.

        A place that cannot be reached gets no record; for the first, to which the run saves, that is an
        error. A run that `resumes` refuses folders of other programs.
        """
        records: dict[str, str] = {}
        with ExitStack() as opened:
            roots = [(level.url, level.storage) for level in self._tiers.levels]
            for target in self._options.promotions:
                storage = opened.enter_context(closing(open_storage(target.path)))
                roots.append((recipe(target.path).url, storage))
            at_least = self._group.generation
            for tier, (url, root) in enumerate(roots):
                try:
                    if not (folders := numbered(root)) and resumes:
                        refuse_other(root)
                    at_least = max(at_least, _newest_generation(root, folders) + 1)
                    records[_key(url)] = record = open_run(root, at_least)
                except StorageError as error:
                    if not tier:
                        raise
                    logger.warning("%s is not opened for this run: %s", url, error.message)
                    continue
                if tier and size_of(roots[0][1], record) is not None:
                    raise UsageError(f"two roots of this run are one folder: {roots[0][0]} and {url}")
        return records

    def _look(self, step: int) -> list[_Later]:
        """Return the committed steps from a number on, in folders with names of steps."""
        found = []
        for level in self._tiers.levels:
            aside = None  # named by the newest step, also after an earlier try that was interrupted
            for number, name in numbered(level.storage):
                here = level.storage.sub(name)
                if number < step or not is_step_name(name) or not level.committed((number, name)):
                    continue
                try:
                    manifest = manifest_in(here)
                except FormatError as error:
                    found.append(_Later(number, here, here, "", error.message))
                    continue
                if manifest is None:  # removed since it was listed
                    continue
                problem = held_by(here, manifest.save_id)
                if "://" not in here.url and os.path.islink(here.url):
                    problem = "it is a link"
                aside = aside or level.storage.sub(f"aside-{manifest.generation or 0}")
                found.append(_Later(number, here, aside.sub(name), manifest.save_id, problem))
        return found

    def _refuse_later(self, step: int) -> None:
        if found := sorted({each.step for each in self._look(step)}):
            raise CheckpointExistsError(
                f"{self._tiers.where} has {named(found, 'step')} of an earlier run, and this one would begin "
                f"with step {step}",
                path=self._tiers.levels[0].url,
                remedy=f"call resume(state) first, to go on after step {found[-1]}, or load(state, step) to "
                "go on after an earlier one; or give this run a folder of its own; or pass "
                "Checkpointer(..., later_steps='move'), which puts those steps aside, or 'replace', which "
                "removes them",
            )

    def _give_way(self, step: int) -> list[_Later]:
        """Return the steps to remove once this run has saved a step; first copy steps that are put aside."""
        later = self._look(step)
        if problems := [f"{each.here.url}: {each.problem}" for each in later if each.problem]:
            raise UsageError(
                f"steps of an earlier run cannot give way to this one, and nothing was changed: "
                f"{'; '.join(problems)}",
                remedy="unpin or remove them (reknit unpin, reknit rm), or give this run a folder of its own",
            )
        if self._later_steps == "move":
            for each in later:
                recorder = Recorder("promote", step=each.step, path=each.aside.url)
                job = Promotion(
                    following(each.here),
                    each.aside,
                    overwrite=False,
                    options=self._options,
                    recorder=recorder,
                )
                promote_alone(job)
                if metrics := metrics_of(each.here, each.save_id):
                    add_metrics(each.aside, metrics)
                logger.warning("step %d of an earlier run is put aside: %s", each.step, each.aside.url)
        return later

    def _clear(self, step: int, pending: PendingSave) -> None:
        """Remove steps of an earlier run once a save is committed; if it fails, the next save tries again."""
        pending.wait()
        if pending.error is not None:
            return
        later, self._later = [each for each in self._later if each.step != step], ()
        for each in later:
            self._remove(each)

    def _remove(self, each: _Later) -> None:
        try:
            delete_moved(each.here, open_storage, each.save_id)
            logger.warning("step %d of an earlier run is removed: %s", each.step, each.here.url)
        except ReknitError as error:
            logger.warning("step %d of an earlier run stays at %s: %s", each.step, each.here.url, error)


def _newest_generation(root: Storage, folders: Sequence[Folder]) -> int:
    """Return the generation of the newest step in a root with these folders, -1 without a step."""
    for _, name in folders:
        try:
            manifest = manifest_in(root.sub(name))
        except FormatError:
            continue
        if manifest is not None:
            return -1 if manifest.generation is None else manifest.generation
    return -1


def _key(url: str) -> str:
    """Return the place of a root as a folder above one of its steps."""
    return folder_above(below(url, "step"))
