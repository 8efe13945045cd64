"""Which steps does a manager have?  Committed steps, and steps whose saves go on."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from reknit.engine.record.foreign_folders import checkpoint_of_others
from reknit.engine.record.line import Line
from reknit.engine.stored.steps import numbered, step_name
from reknit.errors import CheckpointExistsError, UsageError
from reknit.integrations.orbax.manager_options import StepFacts
from reknit.runs.tiers import below
from reknit.runs.unfinished_saves import forbid_markers, wait_for_agents
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.outcome import PendingSave
    from reknit.storage.base import Storage
    from reknit.types.saved_step import SavedStep


_STEP = re.compile(r"(?:.+_)?([0-9]{1,18})")
_MOST_LOOKED_AT = 100
"""Folders that are looked into for steps of Orbax, the highest numbers first."""


class ManagedSteps:
    """The steps of a manager, as this process sees them; `listed` returns the committed steps."""

    def __init__(self, root: str, listed: Callable[[], list[SavedStep]]) -> None:
        self._root, self._listed = root, listed
        self._committed: dict[int, StepFacts] = {}
        self._saves: dict[int, tuple[PendingSave, StepFacts]] = {}
        # Only these decide whether a step exists: they do not depend on when old steps are removed, so that
        # all processes decide alike.
        self._taken: set[int] = set()
        self.reload()

    def facts(self) -> list[StepFacts]:
        """Return the facts about all steps that there are, ascending."""
        self._forget_failed()
        if any(pending.done() for pending, _ in self._saves.values()):
            self.reload()
        going_on = {step: facts for step, (_, facts) in self._saves.items()}
        return sorted((self._committed | going_on).values(), key=lambda facts: facts.step)

    def reload(self) -> None:
        """Read the list of steps anew."""
        self._saves = {step: save for step, save in self._saves.items() if not save[0].done()}
        self._committed = {facts.step: facts for facts in map(StepFacts.of, self._listed()) if facts}
        self._taken |= self._committed.keys()

    def require_new(self, step: int) -> None:
        """Raise `CheckpointExistsError` for a step that exists."""
        self._forget_failed()
        if step in self._taken:
            raise CheckpointExistsError(
                f"step {step} exists already",
                path=below(self._root, step_name(step)),
                remedy="delete it first, or save another step",
            )

    def add(self, step: int, pending: PendingSave, metrics: dict[str, float] | None) -> None:
        """Note a save that has begun."""
        self._taken.add(step)
        self._saves[step] = pending, StepFacts(step, metrics, datetime.now(timezone.utc))

    def removed(self, step: int) -> None:
        """Note that a step was removed by hand."""
        self._taken.discard(step)
        self.reload()

    def going_on(self) -> bool:
        """Return whether a save goes on."""
        return any(not pending.done() for pending, _ in self._saves.values())

    def check(self) -> None:
        """Raise the error of a save that has failed by now."""
        for pending, _ in self._saves.values():
            if pending.error is not None:
                pending.result()

    def _forget_failed(self) -> None:
        for step in [step for step, (pending, _) in self._saves.items() if pending.error is not None]:
            del self._saves[step]
            self._taken.discard(step)


def settle(root: str, timeout_s: float) -> None:
    """Wait for the agents of an earlier run on this host, then let no save of that run commit any more.

    A run that reads the newest step must not be overtaken by a later step of the run before it.
    """
    with closing(open_storage(root)) as storage:
        wait_for_agents(storage, timeout_s)
        forbid_markers(storage, Line())


def refuse_orbax(root: str) -> None:
    """Raise `UsageError` for a folder in which Orbax itself has the newest step."""
    with closing(open_storage(root)) as storage:
        newest = max((number for number, _ in numbered(storage)), default=None)
        found = _newest_of_orbax(storage)
    if found is not None and (newest is None or found[0] > newest):
        name = found[1]
        mine = "there is no step of reknit" if newest is None else f"the newest step of reknit is {newest}"
        raise UsageError(
            f"{mine} below {root}, but {name} is a checkpoint of Orbax",
            remedy="give the manager another directory; to go on from this checkpoint, call "
            f"reknit.load({below(root, name)!r}, state) while that directory has no step",
            path=root,
        )


def _newest_of_orbax(storage: Storage) -> tuple[int, str] | None:
    """Return number and name of the newest of Orbax's steps, which may have a prefix and zeros before."""
    matches = filter(None, map(_STEP.fullmatch, storage.folders()))
    steps = sorted(((int(match[1]), match[0]) for match in matches), reverse=True)
    for number, name in steps[:_MOST_LOOKED_AT]:
        other = checkpoint_of_others(storage.sub(name))
        if other is not None and other.kind == "Orbax":
            return number, name
    return None
