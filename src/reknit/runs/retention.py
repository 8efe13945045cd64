"""Which steps of a run go, and removing them one after another."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from reknit.engine.stored.delete import delete
from reknit.engine.stored.leftovers import leftovers, remove
from reknit.engine.stored.notes import held_by
from reknit.engine.stored.steps import described, numbered
from reknit.engine.stored.verify import verify
from reknit.errors import ReknitError
from reknit.monitor.phase import now
from reknit.options import LoadOptions
from reknit.storage.local.sweep import sweepable

if TYPE_CHECKING:
    from collections.abc import Container

    from reknit.policies.base import Policy
    from reknit.storage.base import Storage
    from reknit.types.saved_step import SavedStep

logger = logging.getLogger("reknit")

_LEFT_S = 3600.0


class Retention:
    """Keeps of the steps below a folder what a policy says, and always the newest that is whole.

    A manifest is read once, unless the policy depends on metrics, and a step that was found whole is not
    verified again, but for those that a run says it has saved anew.
    """

    def __init__(self, root: Storage, keep: Policy) -> None:
        self._root, self._keep = root, keep
        self._steps: dict[str, SavedStep] = {}
        self._sound: set[str] = set()
        self._damaged: dict[str, int] = {}
        self._renewed: set[int] = set()

    def note_saved(self, number: int) -> None:
        """Forget what was known of a step: it was saved, maybe over another.  Any thread may call this."""
        self._renewed.add(number)

    def note_damaged(self, number: int, name: str) -> None:
        """Treat the step in a folder, which could not be loaded, like one that cannot be read."""
        self._damaged[self._root.sub(name).url] = number

    def surplus(self, needed: Container[int] = (), reached: int | None = None) -> list[SavedStep]:
        """Return the steps that the policy does not keep, oldest first; `needed` are numbers that stay.

        A checkpoint that cannot be read, or has no step, is not counted and never goes.  Neither does a step
        later than `reached`, where the run is now: an earlier run left it, and this one may replace it.
        """
        steps = [step for step in self._look() if reached is None or (step.step or 0) <= reached]
        kept = self._keep.kept(steps, now())
        doomed = [
            step
            for step in steps
            if step.step not in kept
            and step.step not in needed
            and held_by(self._folder(step), step.write_id) is None
        ]
        if not doomed:
            return []
        # What is later than the newest whole step is damaged, and stays as well for who looks into that.
        before = next((at for at in reversed(range(len(steps))) if self._is_sound(steps[at])), 0)
        older = {step.path for step in steps[:before]}
        return [step for step in doomed if step.path in older]

    def prune(self, needed: Container[int] = (), reached: int | None = None) -> list[SavedStep]:
        """Remove what is surplus, and return it; what cannot be removed is logged."""
        removed = []
        for step in self.surplus(needed, reached):
            try:
                delete(self._folder(step))
            except ReknitError as error:
                logger.warning("step %s stays at %s: %s", step.step, step.path, error)
            else:
                removed.append(step)
                self._steps.pop(step.path, None)
                logger.info("removed step %s: %s", step.step, step.path)
        self._sweep()
        return removed

    def _sweep(self) -> None:
        """Finish the removals that a process began which then died, of steps older than the newest.

        What was changed within the last hour is left alone, as `reknit gc` does: it may be a save.
        """
        newest = max((step.step or 0 for step in self._steps.values()), default=0)
        for number, name in self._folders():
            folder = self._root.sub(name)
            if number >= newest or folder.url in self._steps:
                continue
            here, all_over = sweepable(folder), sweepable(self._root)
            if here is not None and all_over is not None:
                held = [each._replace(path=f"{name}/{each.path}") for each in here.dated()]
                for left in leftovers(self._root, held, now() - _LEFT_S):
                    if left.kept is None:
                        remove(self._root, all_over, left)

    def _look(self) -> list[SavedStep]:
        """Return the steps that have numbers, ascending."""
        self._forget_renewed()
        if any(leaf.reads_metrics for leaf in self._keep.leaves()):
            self._steps.clear()
        urls = {self._root.sub(name).url: name for _, name in self._folders()}
        urls = {url: name for url, name in urls.items() if url not in self._damaged}
        self._steps = {url: step for url, step in self._steps.items() if url in urls}
        unread = [url for url in urls if url not in self._steps]
        for url, step in zip(unread, described(self._root, [urls[url] for url in unread]), strict=True):
            if step is not None and step.step is not None and step.problem is None:
                self._steps[url] = step
        return sorted(self._steps.values(), key=lambda step: (step.step or 0, step.created))

    def _forget_renewed(self) -> None:
        while self._renewed:
            number = self._renewed.pop()
            self._sound -= {url for url, step in self._steps.items() if step.step == number}
            self._steps = {url: step for url, step in self._steps.items() if step.step != number}
            self._damaged = {url: damaged for url, damaged in self._damaged.items() if damaged != number}

    def _folders(self) -> list[tuple[int, str]]:
        """Return numbers and names of what may go.  A link is none: what it leads to is somebody else's."""
        return [(number, name) for number, name in numbered(self._root) if not _is_link(self._root.sub(name))]

    def _folder(self, step: SavedStep) -> Storage:
        return self._root.sub(step.path.rpartition("/")[2])

    def _is_sound(self, step: SavedStep) -> bool:
        """Tell whether all files of a checkpoint are there; one that was found so is not looked at again."""
        if step.path not in self._sound:
            try:
                problems = verify(self._folder(step), "structure", LoadOptions()).problems
            except ReknitError as error:
                problems = (error.message,)
            if problems:
                logger.warning("step %s is damaged: %s: %s", step.step, step.path, problems[0])
                return False
            self._sound.add(step.path)
        return True


def _is_link(folder: Storage) -> bool:
    return "://" not in folder.url and os.path.islink(folder.url)
