"""Move steps of a run to a cold store, while their paths stay valid."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.engine.memory.workers import Pace
from reknit.engine.stored.moving import move
from reknit.engine.stored.promote import Promotion
from reknit.errors import ReknitError, UsageError, shown
from reknit.events.phase import Recorder, monotonic, now
from reknit.format.paths import wrong_place
from reknit.keywords import checked_call
from reknit.locations import is_location
from reknit.options import SaveOptions, check_rate
from reknit.runs.arguments import policy_for
from reknit.runs.retention import Retention
from reknit.storage.registry import open_storage, recipe, recorded

if TYPE_CHECKING:
    import os
    from collections.abc import Container

    from reknit.events.outlet import Outlet
    from reknit.policies.policy import KeepRule
    from reknit.storage.base import Storage
    from reknit.types.manifest import SavedStep

logger = logging.getLogger("reknit")

_MOST_LOOKED_INTO = 16
"""Number of moved steps, the newest ones, that a run checks for a move that was interrupted."""


@checked_call
@dataclass(frozen=True, slots=True)
class Cool:
    """A cold store to which old steps of a run move, for `Checkpointer` and `Tier`.

    `after` is a policy for the steps that do not move, such as ``latest(5)``; all other steps that `keep`
    keeps move.  Each step moves to the folder of its name below `root`, at `bytes_per_s` or slower.
    """

    root: str | os.PathLike[str]
    after: KeepRule
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not is_location(self.root) or self.root == "":
            raise UsageError(f"the root of Cool is a path or a URL, not {shown(self.root)}")
        policy_for("keep", self.after)
        check_rate(self.bytes_per_s)
        if (why := wrong_place(self.url)) is not None:
            raise UsageError(
                f"the root of Cool, {self.url!r}, {why}", remedy="set options by the environment"
            )

    @property
    def url(self) -> str:
        """The root, independent of the working folder."""
        return recipe(self.root).url.rstrip("/")


class Cooling:
    """Moves the steps below a folder that a policy does not select, but never the newest whole step."""

    def __init__(self, root: Storage, cool: Cool, sinks: tuple[Outlet, ...] = ()) -> None:
        self._root, self._cool, self._sinks = root, cool, sinks
        self._warm = Retention(root, policy_for("keep", cool.after))
        self._moved: set[str] = set()
        self._due: set[str] = set()

    def note_saved(self, number: int) -> None:
        """Forget a step: it was saved, and may replace another.  Any thread may call this."""
        self._warm.note_saved(number)

    def run(self, needed: Container[int], reached: int | None) -> None:
        """Move the surplus steps, and finish interrupted moves; log failures."""
        steps = [step for step in self._warm.surplus(needed, reached) if step.write_id not in self._moved]
        begun = [step for step in steps if step.moved_to is not None][-_MOST_LOOKED_INTO:]
        waiting = [step for step in steps if step.moved_to is None]
        for step in waiting:
            if step.write_id not in self._due:
                self._due.add(step.write_id or "")
                self._recorder("cool_due", step).end(now(), 0.0, 0)
        for step in [*begun, *waiting]:
            name = step.path.rpartition("/")[2]
            place = f"{self._cool.url}/{name}"
            recorder = self._recorder("cool", step)
            started, begin = now(), monotonic()
            try:
                with closing(open_storage(place)) as cold:
                    freed = self._move(self._root.sub(name), cold, step.moved_to or place, recorder)
            except ReknitError as error:
                recorder.end(started, monotonic() - begin, 0, error)
                logger.warning("step %s stays at %s for now: %s", step.step, step.path, error)
            else:
                self._moved.add(step.write_id or "")
                if freed:
                    recorder.end(started, monotonic() - begin, freed, detail=place)
                    logger.info("step %s has moved from %s to %s", step.step, step.path, place)

    def _recorder(self, action: str, step: SavedStep) -> Recorder:
        return Recorder(action, step=step.step, path=step.path, sinks=self._sinks)

    def _move(self, hot: Storage, cold: Storage, place: str, recorder: Recorder) -> int:
        hot, cold = recorded(hot, recorder), recorded(cold, recorder)
        job = Promotion(
            hot,
            cold,
            overwrite=False,
            options=SaveOptions(),
            recorder=recorder,
            pace=Pace(self._cool.bytes_per_s),
        )
        return move(job, place, open_storage)
