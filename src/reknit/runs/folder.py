"""The folder of a run, in all its tiers: the last run that opened it for writing owns it."""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from reknit.api.checks import check_state, raised_on_all_ranks
from reknit.engine.stored.at_path import manifest_in, size_of
from reknit.engine.stored.heartbeat import STALE_S, Heartbeat, wait_for_owners
from reknit.engine.stored.hints import formats, refuse_other
from reknit.engine.stored.moving import delete_moved
from reknit.engine.stored.notes import add_metrics, held_by, metrics_of
from reknit.engine.stored.promote import Promotion, promote_alone
from reknit.engine.stored.recognising import manifest_exists
from reknit.engine.stored.run_record import Line, Run, Start, folder_above, newest_line, open_run
from reknit.engine.stored.steps import descending, is_step_name, numbered
from reknit.errors import (
    CheckpointExistsError,
    FencedError,
    FormatError,
    ReknitError,
    StorageError,
    UsageError,
    shown,
)
from reknit.events.phase import Deadline, Recorder
from reknit.runs.agreement import ask_root
from reknit.runs.pending_saves import forbid_markers, wait_for_agents
from reknit.runs.tiers import FoundStep, below
from reknit.storage.registry import following, open_storage, recipe
from reknit.storage.wrappers.retrying import without_retries
from reknit.system import start_thread
from reknit.types.small import named

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reknit.comm.group import Group
    from reknit.engine.outcome import PendingSave
    from reknit.options import SaveOptions
    from reknit.runs.tiers import Folder, Tiers
    from reknit.storage.base import Storage


logger = logging.getLogger("reknit")

BEGIN_ANEW = "to begin with step 0 beside it: resume(state, start=0); or give this run a folder of its own"
"""The end of the remedies of a run that would begin beside work of another program."""


class Later(NamedTuple):
    """A committed step of an earlier run: its number, its folder, a folder to put it aside, and its save id.

    `problem` is the reason why it cannot give way, or None.
    """

    step: int
    here: Storage
    aside: Storage
    save_id: str
    problem: str | None


def _look(tiers: Tiers, step: int) -> list[Later]:
    """Return the committed steps from a number on, in folders with names of steps."""
    found = []
    for level in tiers.levels:
        aside = None  # named by the newest step, also after an earlier try that was interrupted
        for number, name in numbered(level.storage):
            here = level.storage.sub(name)
            if number < step or not is_step_name(name) or not manifest_exists(here):
                continue
            try:
                manifest = manifest_in(here)
            except FormatError as error:
                found.append(Later(number, here, here, "", error.message))
                continue
            if manifest is None:  # removed since it was listed
                continue
            problem = held_by(here, manifest.save_id)
            if "://" not in here.url and os.path.islink(here.url):
                problem = "it is a link"
            aside = aside or level.storage.sub(f"aside-{manifest.generation or 0}")
            found.append(Later(number, here, aside.sub(name), manifest.save_id, problem))
    return found


def refuse_later(tiers: Tiers, step: int) -> None:
    """Raise `CheckpointExistsError` if there are steps of an earlier run from a number on."""
    if found := sorted({each.step for each in _look(tiers, step)}):
        raise CheckpointExistsError(
            f"{tiers.where} has {named(found, 'step')} of an earlier run, and this one would begin "
            f"with step {step}",
            path=tiers.levels[0].url,
            remedy=f"call resume(state) first, to go on after step {found[-1]}, or load(state, step) to "
            "go on after an earlier one; or give this run a folder of its own; or pass "
            "Checkpointer(..., later_steps='move'), which puts those steps aside, or 'replace', which "
            "removes them",
        )


def refuse_others(tiers: Tiers, folders: Sequence[Sequence[Folder]]) -> None:
    """Raise `UsageError` if a tier has a checkpoint of another program, but no tier has a step.

    A run that begins with step 0 would ignore the work that is there.  Weights from which it may start are
    not work of a run.  `folders` are those of the steps of each tier, as `numbered` returns them.
    """
    found_in = zip(tiers.levels, folders, strict=True)
    if any(True for level, own in found_in for _ in descending(level.storage, folders=own)):
        return
    for level, own in zip(tiers.levels, folders, strict=True):
        if not own:
            refuse_other(level.storage, of_run=True)
        if (found := formats().newest_of_others(level.storage, works=True)) is not None:
            place, other = below(level.url, found[0]), found[1]
            goes_on = f"to go on from it: resume(state, start={place!r})"
            raise UsageError(
                f"there is no step of this run below {level.url}, but {place} is {other.what}",
                remedy=f"{goes_on if formats().opens(other.kind) else other.remedy}; {BEGIN_ANEW}",
                path=level.url,
            )
        if (run := formats().run_of_others(level.storage)) is not None and not formats().is_weights(run.kind):
            raise UsageError(
                f"there is no step of this run below {level.url}, which is {run.what}",
                remedy=f"{run.remedy}; {BEGIN_ANEW}",
                path=level.url,
            )


def refuse_living(root: str) -> None:
    """Raise `UsageError` if another run lives in a folder, in which a training would save only later."""
    with closing(open_storage(root)) as storage:
        wait_for_owners([storage], 2 * STALE_S)  # the first look may have no answer


def give_way(tiers: Tiers, step: int, options: SaveOptions, *, copy: bool) -> list[Later]:
    """Return the steps to remove once this run has saved a step; with `copy`, first copy them aside.

    Raises `UsageError` if one of them has to stay.
    """
    later = _look(tiers, step)
    if problems := [f"{each.here.url}: {each.problem}" for each in later if each.problem]:
        raise UsageError(
            f"steps of an earlier run cannot give way to this one, and nothing was changed: "
            f"{'; '.join(problems)}",
            remedy="unpin or remove them (reknit unpin, reknit rm), or give this run a folder of its own",
        )
    if copy:
        for each in later:
            recorder = Recorder("promote", step=each.step, path=each.aside.url)
            job = Promotion(
                following(each.here), each.aside, overwrite=False, options=options, recorder=recorder
            )
            promote_alone(job)
            if metrics := metrics_of(each.here, each.save_id):
                add_metrics(each.aside, metrics)
            logger.warning("step %d of an earlier run is put aside: %s", each.step, each.aside.url)
    return later


class Clearing:
    """Removes steps of an earlier run once a save of this run is committed."""

    def __init__(self, later: Sequence[Later]) -> None:
        self._later = later
        self._thread: threading.Thread | None = None

    def begin(self, step: int, pending: PendingSave) -> None:
        """Start a thread that removes the steps once a save is committed, unless one is at work."""
        if self._later and (self._thread is None or not self._thread.is_alive()):
            self._thread = start_thread("reknit-clears", partial(self._clear, step, pending))

    def close(self) -> None:
        """Wait for the removal."""
        if self._thread is not None:
            self._thread.join()

    def _clear(self, step: int, pending: PendingSave) -> None:
        pending.wait()
        if pending.error is not None:
            return
        later, self._later = [each for each in self._later if each.step != step], ()
        for each in later:
            _remove(each)


def _remove(each: Later) -> None:
    try:
        delete_moved(each.here, open_storage, each.save_id)
        logger.warning("step %d of an earlier run is removed: %s", each.step, each.here.url)
    except ReknitError as error:
        logger.warning("step %d of an earlier run stays at %s: %s", each.step, each.here.url, error)


LaterSteps = Literal["refuse", "move", "replace"]
"""The fate of steps of an earlier run when a new run begins before them."""

OtherRun = Literal["refuse", "take_over"]
"""The action of a run in a folder whose owner, another run, still lives."""

_NEXT = 1 << 63
"""Higher than all generations."""


class RunFolder:
    """The work of rank 0 in the folder of a run, for all ranks.

    `records` has the record of this run in each root, by the URL of the root.  It is filled when the run
    opens the folder for writing: at `resume`, or before the first save.
    """

    def __init__(
        self,
        group: Group,
        tiers: Tiers,
        options: SaveOptions,
        later_steps: LaterSteps,
        other_run: OtherRun = "refuse",
    ) -> None:
        if other_run not in ("refuse", "take_over"):
            raise UsageError(f"other_run is 'refuse' or 'take_over', not {shown(other_run)}")
        if later_steps not in ("refuse", "move", "replace"):
            raise UsageError(f"later_steps is 'refuse', 'move' or 'replace', not {shown(later_steps)}")
        self._group, self._tiers, self._options, self._later_steps = group, tiers, options, later_steps
        self._takes_over = other_run == "take_over"
        self._heartbeat: Heartbeat | None = None
        self.records: dict[str, str] = {}
        self.is_open = False
        """Whether this run may save: the folder is open, and later steps have given way."""
        self._loaded: tuple[int, int | None] | None = None
        self._next: int | None = None
        self._clearing: Clearing | None = None
        self._line: Line | None = None
        """The line of descent that this run has recorded last."""
        self._begun = False
        """Whether this run has resumed, loaded a step, or been refused before later steps."""

    @property
    def replaces(self) -> bool:
        """Whether steps of an earlier run give way, although this run did not resume from one."""
        return self._later_steps != "refuse"

    def loaded(self, step: int, generation: int | None) -> None:
        """Continue after a step that a save of some generation made, from the next call of `reaches` on."""
        self._loaded, self._next, self._begun = (step, generation), None, True

    def reaches(self, step: int) -> None:
        """Note the position of the run; the first one after a load shows whether the run went back.

        A run that begins anew is refused here, and not at its first save, if there are later steps, or if
        another run lives in the folder.
        """
        if not self._begun:
            self.ask("begin", partial(self._begin, step))
        self._begun = True
        self._next = step if self._next is None else self._next

    def line_after(self, step: int, generation: int | None) -> Line:
        """Return the line of descent of a step that a save of some generation made."""
        return self._tiers.line().branched(Start(step, generation), _NEXT)

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
        about = f"step {step}" if before is None else ""
        found = self.ask(name, partial(self._tiers.find, step, before), about)
        return None if found is None else FoundStep(*found)

    def open_to_resume(self, timeout_s: float, *, alone: bool) -> None:
        """Wait for agents of an earlier run on this host, open the folder, and let no other save commit.

        A folder that cannot be written is read only, and the first save tries again to open it.  With
        `alone`, a folder that has work of another program in place of steps is refused.
        """
        self.records = self.ask("settle", partial(self._settle, timeout_s, alone=alone))
        self._begun = True

    def open_at(self, step: int, state: Any, timeout_s: float, *, resumed: bool) -> None:
        """Open the folder before the first save of a run, or the first after a load, of a state at a step.

        Raises `CheckpointExistsError` if an earlier run has saved this or a later step, unless this run has
        `resumed`, or `later_steps` is not ``"refuse"``; `UsageError` for a wrong state.
        """
        if self.is_open and self._loaded is None:
            return
        if not (self.is_open or (resumed and self.records)):
            with raised_on_all_ranks(self._group, "open run", self._options.timeout_s):
                check_state(state)
            self.records = self.ask("open run", partial(self._open, step, timeout_s, resumed=resumed))
        if self._loaded is not None and self.records:
            first = max(self._loaded[0] + 1, step if self._next is None else min(self._next, step))
            self.records = self.ask("go back", partial(self._go_back, *self._loaded, first))
            self._loaded = None
        self.is_open = True

    def saved(self, step: int, pending: PendingSave) -> None:
        """Start a thread that removes later steps of an earlier run once a save of this run is committed."""
        if self._clearing is not None:
            self._clearing.begin(step, pending)

    def close(self) -> None:
        """Wait for the removal of later steps."""
        if self._clearing is not None:
            self._clearing.close()

    def end(self) -> None:
        """Mark the end of the run in its records, so that the next one need not wait for its heartbeat."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.end()

    def runs(self) -> list[Run | None]:
        """Return this run for promotions to each tier, None for a tier that it has not opened."""
        found = [(level.url, self.records.get(_key(level.url))) for level in self._tiers.levels]
        return [None if record is None else Run(partial(open_storage, url), record) for url, record in found]

    # The steps of rank 0.

    def _begin(self, step: int) -> None:
        if not self.replaces:
            refuse_later(self._tiers, step)
        self._wait_for_owners(Deadline(self._options.timeout_s / 2))

    def _settle(self, timeout_s: float, *, alone: bool) -> dict[str, str]:
        deadline, records = Deadline(timeout_s), self.records
        if not records:
            self._wait_for_owners(deadline)
        self._wait(deadline.remaining())
        folders = [numbered(level.storage) for level in self._tiers.levels] if not records else []
        if alone and not records:
            refuse_others(self._tiers, folders)
        if not records or self._is_overtaken():
            if records:
                self._wait_for_owners(deadline)
            try:
                records = self._take(refuses=True, folders=folders)
            except StorageError as error:
                where = self._tiers.where
                logger.warning("%s is read, and not opened for writing: %s", where, error.message)
                return {}
        self._forbid(None)
        return records

    def _open(self, step: int, timeout_s: float, *, resumed: bool) -> dict[str, str]:
        refuses = not resumed and not self.replaces
        deadline = Deadline(timeout_s)
        if refuses:  # before a run that may still use the folder is fenced
            refuse_later(self._tiers, step)
        if not self.records:
            self._wait_for_owners(deadline)
        self._wait(deadline.remaining())
        records = self.records or self._take()
        self._forbid(step if not resumed and self.replaces else None)
        if refuses:
            refuse_later(self._tiers, step)
        elif not resumed:
            later = give_way(self._tiers, step, self._options, copy=self._later_steps == "move")
            self._clearing = Clearing(later)
            if later:
                before = self._tiers.newest((step, ""))
                records = self._take(records, Start(step - 1, before and before.generation))
        return records

    def _go_back(self, step: int, generation: int | None, first: int) -> dict[str, str]:
        """Give up the steps from `first` on, and all that a step does not come from, before a save after it.

        Without such steps, the line of descent stays as it is.
        """
        line = self._tiers.line()
        later = any(number >= first for level in self._tiers.levels for number, _ in numbered(level.storage))
        if not later and line.holds(generation, step):
            return self.records
        logger.warning("going on from step %d: later steps of %s do not count", step, self._tiers.where)
        return self._take(self.records, Start(step, generation))

    def _wait_for_owners(self, deadline: Deadline) -> None:
        """Wait until no other run lives in a tier or a place of `promote_to`.  Raises `UsageError`."""
        if self._takes_over:
            return
        with self._opened() as roots:
            own = len(self._tiers.levels)
            # The opening repeats its requests anyway, to places that cannot be reached too.
            looked = [root if tier < own else without_retries(root) for tier, (_, root) in enumerate(roots)]
            wait_for_owners(looked, deadline.remaining())

    @contextmanager
    def _opened(self) -> Iterator[list[tuple[str, Storage]]]:
        """Yield the URLs and the stores of all tiers, and then of the places of `promote_to`."""
        with ExitStack() as opened:
            roots = [(level.url, level.storage) for level in self._tiers.levels]
            for target in self._options.promotions:
                storage = opened.enter_context(closing(open_storage(target.path)))
                roots.append((recipe(target.path).url, storage))
            yield roots

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
        line = self._line or self._tiers.line()
        for tier, level in enumerate(self._tiers.levels):
            try:
                forbid_markers(level.storage, line, since)
            except StorageError as error:
                if not tier:
                    raise
                logger.warning("saves of an earlier run to %s may go on: %s", level.url, error.message)

    def _take(
        self,
        own: Mapping[str, str] | None = None,
        start: Start | None = None,
        *,
        refuses: bool = False,
        folders: Sequence[Sequence[Folder]] = (),
    ) -> dict[str, str]:
        """Open the tiers, or the root and the places of `promote_to`, with the highest generation so far.

        A run that has opened them passes its records as `own`, and the `start` of a new branch.  A place that
        cannot be reached gets no record; for the first, to which the run saves, that is an error.  With
        `refuses`, a folder of another program is one, too.  `folders` are those of the steps of the tiers, if
        they were listed a moment ago.
        """
        records: dict[str, str] = {}
        with self._opened() as roots:
            # A tier may be empty, since its host was lost, and its generations begin anew without the others.
            latest, line = newest_line(root for _, root in roots)
            at_least = max(self._group.generation, latest + 1)
            for tier, (url, root) in enumerate(roots):
                mine = None if own is None else own.get(_key(url))
                if own is not None and mine is None:
                    continue
                try:
                    found = folders[tier] if tier < len(folders) else numbered(root)
                    if refuses and not found:
                        refuse_other(root, of_run=True)
                    at_least = max(at_least, _newest_generation(root, found) + 1)
                    records[_key(url)] = record = open_run(
                        root, at_least, partial(line.branched, start), mine
                    )
                except StorageError as error:
                    if not tier:
                        raise
                    logger.warning("%s is not opened for this run: %s", url, error.message)
                    continue
                if not tier:  # its generation is that of the saves
                    at_least = Run(partial(open_storage, url), record).generation
                    line, start = line.branched(start, at_least), None
                elif size_of(roots[0][1], record) is not None:
                    raise UsageError(f"two roots of this run are one folder: {roots[0][0]} and {url}")
        self._line = line
        self._beat(records)
        return records

    def _beat(self, records: Mapping[str, str]) -> None:
        """Renew records from now on, until this run ends, its process dies, or nothing refers to it."""
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(open_for_beats)
            weakref.finalize(self, self._heartbeat.stop).atexit = False
        self._heartbeat.records = records
        self._heartbeat.begin()


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


def open_for_beats(url: str) -> Storage:
    """Open a root for the beats: a lost one is followed by the next, and need not outlive the power."""
    return without_retries(open_storage(url, durability="process"))


def _key(url: str) -> str:
    """Return the place of a root as a folder above one of its steps."""
    return folder_above(below(url, "step"))
