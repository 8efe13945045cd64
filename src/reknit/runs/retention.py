"""Decide which steps of a run are removed, and remove them one after another."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from reknit.engine.stored.at_path import manifest_in, read_manifest, size_of
from reknit.engine.stored.delete import drop
from reknit.engine.stored.file_checks import whole_manifest
from reknit.engine.stored.leftovers import leftovers, remove
from reknit.engine.stored.moving import delete_moved
from reknit.engine.stored.notes import held_by, metrics_of
from reknit.engine.stored.places import files_at
from reknit.engine.stored.run_record import read_line
from reknit.engine.stored.steps import described, is_step_name, number_in, numbered
from reknit.engine.stored.verify import verify
from reknit.errors import FormatError, ReknitError, StoragePermissionError, UsageError
from reknit.events.phase import Recorder, now
from reknit.format.manifest_file import decode_record
from reknit.options import LoadOptions
from reknit.policies.keep_policies import named_items, named_metrics, require_items, require_metrics
from reknit.runs.arguments import items_of
from reknit.storage.local.memory import sweepable
from reknit.storage.registry import following, open_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container

    from reknit.engine.stored.run_record import Line
    from reknit.events.outlet import Outlet
    from reknit.policies.policy import Policy
    from reknit.storage.base import Storage
    from reknit.types.manifest import SavedStep

    Aged = tuple[SavedStep, tuple[str, ...]]
    """A step, and the items of it that are no longer kept."""

logger = logging.getLogger("reknit")

_LEFT_S = 3600.0
_LOOKED_AT_AGAIN = 64
"""Number of kept steps, the newest ones, that each removal first checks to be there still."""


class Retention:
    """Removes the steps below a folder that a policy does not keep, but never the newest whole step.

    A manifest is read once, unless the policy depends on metrics.  A step that was found whole is not
    verified again, unless the run has saved it anew.
    """

    def __init__(
        self,
        root: Storage,
        keep: Policy,
        *,
        apart: bool = False,
        sinks: tuple[Outlet, ...] = (),
        line: Callable[[], Line] | None = None,
    ) -> None:
        """Keep steps below `root`; files that are missing may be on other hosts, where these are `apart`.

        `line` returns the line of descent of the steps, by default that on record below `root`.
        """
        self._line = line or (lambda: read_line(root)[1])
        self._without: set[str] = set()
        self._root, self._keep, self._apart, self._sinks = root, keep, apart, sinks
        self._reads_metrics = any(leaf.reads_metrics for leaf in keep.leaves())
        self._steps: dict[str, SavedStep] = {}
        self._sound: set[str] = set()
        self._damaged: dict[str, int] = {}
        self._renewed: set[int] = set()
        self._to_sweep: set[str] = set()

    def check(self) -> None:
        """Raise `UsageError` for an item or a metric that the policy names, and no step has."""
        steps = self.steps()
        require_items(named_items([self._keep]), items_of(steps))
        require_metrics(named_metrics([self._keep]), steps)

    def note_saved(self, number: int) -> None:
        """Forget a step: it was saved, and may replace another.  Any thread may call this."""
        self._renewed.add(number)

    def note_damaged(self, number: int, name: str) -> None:
        """Treat the step in a folder, which could not be loaded, like an unreadable step."""
        self._damaged[self._root.sub(name).url] = number

    def steps(self) -> list[SavedStep]:
        """Return the steps that can be read, ascending."""
        return self._look()

    def surplus(self, needed: Container[int] = (), reached: int | None = None) -> list[SavedStep]:
        """Return the steps that the policy does not keep, oldest first; `needed` are numbers that stay.

        A checkpoint that cannot be read, or without a step, does not count and is never removed.  The same
        holds for a step later than `reached`, the position of the run: this run may replace it.  A step that
        the run gave up when it went back does not count, and is surplus once the run has passed it.
        """
        return [step for step, items in self._plan(needed, reached) if items is None]

    def aged(self, needed: Container[int] = (), reached: int | None = None) -> list[Aged]:
        """Return the other steps some of whose items the policy does not keep, and these items."""
        return [(step, items) for step, items in self._plan(needed, reached) if items is not None]

    def _plan(
        self, needed: Container[int], reached: int | None
    ) -> list[tuple[SavedStep, tuple[str, ...] | None]]:
        """Return the steps to remove, the oldest first, each with the items to drop, or None for all."""
        there = self._look()
        steps = [step for step in there if reached is None or (step.step or 0) <= reached]
        line = self._line().begun([(step.generation, step.step) for step in there])
        live = {step.path: step for step in steps if line.holds(step.generation, step.step)}
        kept = self._keep.items([*live.values()], now())
        if self._lacks_metrics(live.values()) and not kept:
            return []
        doomed: list[tuple[SavedStep, tuple[str, ...] | None]] = []
        for step in steps:
            items = kept.get(step.step or 0) if step.path in live else None
            gone = None if items is None else tuple(item for item in step.items if item not in items)
            if gone and step.moved_to is not None:
                continue  # items are dropped before a step moves, or not at all
            if gone != () and step.step not in needed and self._may_go(step):
                doomed.append((step, gone))
        if not doomed:
            return []
        stay = [step for step in live.values() if step.step in kept][-_LOOKED_AT_AGAIN:]
        if not all([self._is_there(step) for step in stay]):  # somebody has removed or replaced one since
            return self._plan(needed, reached)
        # Steps later than the newest whole step are damaged.  They stay, so that the damage can be examined.
        before = next((at for at in reversed(range(len(steps))) if self._resumable(steps[at], live)), 0)
        older = {step.path for step in steps[:before]}
        return [(step, items) for step, items in doomed if step.path in older]

    def _resumable(self, step: SavedStep, live: Container[str]) -> bool:
        """Return whether the run can resume from a step: it is whole, and was not given up."""
        return step.path in live and self._is_whole(step)

    def _lacks_metrics(self, steps: Collection[SavedStep]) -> bool:
        """Return whether the policy names a metric that none of the steps has; log that once."""
        lacking = [
            name
            for name in named_metrics([self._keep])
            if len(steps) > 1 and not any((step.metrics or {}).get(name) is not None for step in steps)
        ]
        for name in set(lacking) - self._without:
            logger.warning(
                "keep names the metric %r, which no step below %s has: no step counts as one of the best",
                *(name, self._root.url),
            )
        self._without = set(lacking)
        return bool(lacking)

    def prune(self, needed: Container[int] = (), reached: int | None = None) -> list[SavedStep]:
        """Remove the surplus steps, and return the removed steps; log failures, and dropped items."""
        return [step for step, items in self.removed(needed, reached) if items is None]

    def removed(
        self, needed: Container[int] = (), reached: int | None = None
    ) -> list[tuple[SavedStep, tuple[str, ...] | None]]:
        """Remove the surplus steps and items, and return them; None in place of items means all of a step."""
        done = [(step, items) for step, items in self._plan(needed, reached) if self._remove(step, items)]
        self._sweep(needed)
        return done

    def _remove(self, step: SavedStep, items: tuple[str, ...] | None) -> bool:
        """Remove a step, or items of it, and return whether that succeeded."""
        folder, what = self._folder(step), "all" if items is None else ", ".join(map(repr, items))
        action, unchanged = "remove" if items is None else "drop", partial(self._check_metrics, step)
        recorder = Recorder(action, step=step.step, path=step.path, sinks=self._sinks)
        try:
            with recorder.whole() as removal:
                removal.detail = "" if items is None else what
                if items is None:
                    delete_moved(folder, open_storage, step.write_id, still=unchanged)
                else:
                    unchanged()
                    drop(folder, items, step.write_id)
        except ReknitError as error:
            logger.warning("step %s stays with %s at %s: %s", step.step, what, step.path, error)
            self._to_sweep.add(step.path)  # a marker of a dead process may prevent it
            return False
        self._steps.pop(step.path, None)
        logger.info("removed %s of step %s: %s", what, step.step, step.path)
        return True

    def _check_metrics(self, step: SavedStep) -> None:
        """Raise `UsageError` if a metric of a step came or changed since the decision to remove the step.

        Its author may have held the step until then, and the step may be the best now.  So this is called
        when nobody can begin to hold the step any more, and nobody holds it.
        """
        if not self._reads_metrics or step.write_id is None:
            return
        known, added = step.metrics or {}, metrics_of(self._folder(step), step.write_id)
        if repr({**known, **added}) != repr(known):  # a NaN is not equal to itself
            raise UsageError(f"metrics were added to {step.path} a moment ago", path=step.path)

    def _sweep(self, needed: Container[int]) -> None:
        """Finish the removals of a process that died, of steps older than the newest that are not `needed`.

        Those are being saved, which the times of their files need not show to this clock.  Other files that
        were changed within the last hour stay, as with `reknit gc`: they may belong to a save.
        """
        newest = max((step.step or 0 for step in self._steps.values()), default=0)
        for number, name in self._folders():
            folder = self._root.sub(name)
            if (
                number >= newest
                or number in needed
                or (folder.url in self._steps and folder.url not in self._to_sweep)
            ):
                continue
            self._to_sweep.discard(folder.url)
            try:
                self._sweep_folder(name, folder)
            except ReknitError as error:
                logger.warning("files of step %s stay at %s: %s", number, folder.url, error)

    def _sweep_folder(self, name: str, folder: Storage) -> None:
        here, all_over = sweepable(folder), sweepable(self._root)
        if here is not None and all_over is not None:
            moment = all_over.moment()  # before the look, so that no file seems older than it is
            held = [each._replace(path=f"{name}/{each.path}") for each in here.dated()]
            for left in leftovers(self._root, held, moment - _LEFT_S):
                if left.kept is None:
                    remove(self._root, all_over, left, open_storage)

    def _look(self) -> list[SavedStep]:
        """Return the steps that have numbers, ascending."""
        self._forget_renewed()
        if self._reads_metrics:
            self._steps.clear()
        urls = {self._root.sub(name).url: name for _, name in self._folders()}
        urls = {url: name for url, name in urls.items() if url not in self._damaged}
        self._steps = {url: step for url, step in self._steps.items() if url in urls}
        unread = [url for url in urls if url not in self._steps]
        found = described(self._root, [urls[url] for url in unread], notes=self._reads_metrics)
        for url, step in zip(unread, found, strict=True):
            if step is not None and step.step is not None and step.problem is None:
                self._steps[url] = step
                if step.dropped:
                    self._to_sweep.add(url)
        return sorted(self._own(), key=lambda step: (step.step or 0, step.created))

    def _own(self) -> list[SavedStep]:
        """Return the steps without copied and renamed ones, which belong to somebody else.

        A run names the folder of each step.  A folder with the name of another step is a copy.  So is one
        with another name that holds the save of a run, or that of a folder beside it.
        """
        named = {url: url.rpartition("/")[2] for url in self._steps}
        rightly = {url for url, step in self._steps.items() if number_in(named[url]) == step.step}
        originals = {self._steps[url].write_id for url in rightly}
        return [
            step
            for url, step in self._steps.items()
            if url in rightly or not (is_step_name(named[url]) or step.of_run or step.write_id in originals)
        ]

    def _forget_renewed(self) -> None:
        while self._renewed:
            number = self._renewed.pop()
            self._sound -= {url for url, step in self._steps.items() if step.step == number}
            self._steps = {url: step for url, step in self._steps.items() if step.step != number}
            self._damaged = {url: damaged for url, damaged in self._damaged.items() if damaged != number}

    def _folders(self) -> list[tuple[int, str]]:
        """Return numbers and names of the folders of steps, without links, whose targets others may use."""
        return [(number, name) for number, name in numbered(self._root) if not _is_link(self._root.sub(name))]

    def _folder(self, step: SavedStep) -> Storage:
        return self._root.sub(step.path.rpartition("/")[2])

    def _may_go(self, step: SavedStep) -> bool:
        """Return whether a step may be removed: it is not held, and all of its metrics can be read."""
        folder = self._folder(step)
        if step.write_id is None or held_by(folder, step.write_id) is not None:
            return False
        try:
            if self._reads_metrics:
                metrics_of(folder, step.write_id)
        except (FormatError, StoragePermissionError):  # it may be the best
            return False
        return True

    def _is_there(self, step: SavedStep) -> bool:
        """Return whether the checkpoint is unchanged; another process may have removed or replaced it."""
        try:
            manifest = manifest_in(self._folder(step))
        except FormatError:
            manifest = None
        if manifest is not None and (manifest.save_id, manifest.items) == (step.write_id, step.items):
            return True
        self._sound.discard(step.path)
        self._steps.pop(step.path, None)
        return False

    def _is_whole(self, step: SavedStep) -> bool:
        """Return whether a run can resume from a step: no item was dropped, and all files are there."""
        return not step.dropped and self._is_sound(step)

    def _problems(self, folder: Storage) -> tuple[str, ...]:
        return _problems_here(folder) if self._apart else verify(folder, "metadata", LoadOptions()).problems

    def _is_sound(self, step: SavedStep) -> bool:
        """Return whether all files of a checkpoint are there; a sound one is not verified again."""
        if not self._is_there(step):
            return False
        if step.path not in self._sound:
            try:
                problems = self._problems(following(self._folder(step)))
            except ReknitError as error:
                problems = (error.message,)
            if problems:
                logger.warning("step %s is damaged: %s: %s", step.step, step.path, problems[0])
                return False
            self._sound.add(step.path)
        return True


def _problems_here(folder: Storage) -> tuple[str, ...]:
    """Return the problems of the files of a checkpoint that are on this host."""
    record = decode_record(read_manifest(folder))
    folder = files_at(folder, record.moved_to)
    manifest = whole_manifest(folder, record)
    return tuple(
        f"{file.path} has another size"
        for file in manifest.files
        if size_of(folder, file.path) not in (None, file.nbytes)
    )


def _is_link(folder: Storage) -> bool:
    return "://" not in folder.url and os.path.islink(folder.url)
