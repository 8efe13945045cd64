"""Which steps of a run go, and removing them one after another."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from reknit.engine.stored.delete import delete
from reknit.engine.stored.leftovers import leftovers, remove
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

    A manifest does not change, so each is read once, and a step that was found whole is not verified again.
    """

    def __init__(self, root: Storage, keep: Policy) -> None:
        self._root, self._keep = root, keep
        self._steps: dict[str, SavedStep] = {}
        self._sound: set[str] = set()

    def surplus(self, needed: Container[int] = ()) -> list[SavedStep]:
        """Return the steps that the policy does not keep, oldest first; `needed` are numbers that stay.

        A checkpoint that cannot be read, or has no step, is not counted and never goes.
        """
        steps = self._look()
        kept = self._keep.kept(steps, now())
        doomed = [step for step in steps if step.step not in kept and step.step not in needed]
        while doomed and not any(self._is_sound(step) for step in reversed(steps) if step not in doomed):
            # What is kept is damaged: the newest that is whole must not go.
            doomed.pop()
        return doomed

    def prune(self, needed: Container[int] = ()) -> list[SavedStep]:
        """Remove what is surplus, and return it; what cannot be removed is logged."""
        removed = []
        for step in self.surplus(needed):
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
        for number, name in numbered(self._root):
            folder = self._root.sub(name)
            if number >= newest or folder.url in self._steps or os.path.islink(folder.url):
                continue
            here, all_over = sweepable(folder), sweepable(self._root)
            if here is not None and all_over is not None:
                held = [each._replace(path=f"{name}/{each.path}") for each in here.dated()]
                for left in leftovers(self._root, held, now() - _LEFT_S):
                    if left.kept is None:
                        remove(self._root, all_over, left)

    def _look(self) -> list[SavedStep]:
        """Return the steps that have numbers, ascending."""
        names = [name for _, name in numbered(self._root)]
        urls = {self._root.sub(name).url: name for name in names}
        self._steps = {url: step for url, step in self._steps.items() if url in urls}
        unread = [url for url in urls if url not in self._steps]
        for url, step in zip(unread, described(self._root, [urls[url] for url in unread]), strict=True):
            if step is not None and step.step is not None and step.problem is None:
                self._steps[url] = step
        return sorted(self._steps.values(), key=lambda step: (step.step or 0, step.created))

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
