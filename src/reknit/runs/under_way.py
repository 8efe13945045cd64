"""The saves of a run that are under way, and the removal of what they make surplus when committed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.errors import DeadlineError, ReknitError
from reknit.monitor.phase import Deadline, monotonic
from reknit.system import start_thread

if TYPE_CHECKING:
    import threading

    from reknit.engine.outcome import PendingSave
    from reknit.runs.retention import Retention
    from reknit.types.saved_step import SavedStep

logger = logging.getLogger("reknit")


@dataclass
class _Save:
    """A save of this run; `write_s` is how long it took, None as long as that is not known."""

    step: int
    pending: PendingSave
    began: float
    write_s: float | None = None

    def over(self) -> bool:
        """Tell whether nobody needs the step for this save, nor for its promotion."""
        return self.write_s is not None and self.pending.promotion_done()


class UnderWay:
    """Watches the saves of a run; `retention` is that of rank 0, None elsewhere and where all steps stay."""

    def __init__(self, retention: Retention | None) -> None:
        self._retention = retention
        self._saves: list[_Save] = []
        self._last: _Save | None = None
        self._reached: int | None = None
        self._surplus = False
        self._pruning: threading.Thread | None = None
        self.write_s: float | None = None
        """How long the last save took until it was committed."""

    def add(self, step: int, pending: PendingSave, began: float) -> None:
        """Watch a save."""
        self._last = _Save(step, pending, began)
        self._saves = [*(save for save in self._saves if not save.over()), self._last]
        self.tend()

    def loaded(self, step: int) -> None:
        """Go on after a step that was loaded: what was saved last is no longer where the run is."""
        self._last, self._reached = None, step

    def last(self, step: int, *, sure: bool) -> PendingSave | None:
        """Return the last save if it was that of `step`; to be `sure`, wait, and return none that failed."""
        if self._last is None or self._last.step != step:
            return None
        if sure:
            try:
                self._last.pending.result()
            except ReknitError as error:
                logger.info("step %d is saved again, as that failed: %s", step, error)
                return None
        return self._last.pending

    def needed(self) -> set[int]:
        """Return the steps whose saves and promotions are not known to have ended."""
        return {save.step for save in self._saves if not save.over()}

    def busy(self) -> bool:
        """Tell whether a save is under way."""
        return any(not save.pending.done() for save in self._saves)

    def tend(self, *, surplus: bool = False) -> None:
        """Take note of saves that have ended, and begin to remove what they, or another, made surplus."""
        self._note_ended()
        self._surplus |= surplus
        if self._surplus and (self._pruning is None or not self._pruning.is_alive()):
            self._surplus = False
            if self._retention is not None:
                try:
                    self._pruning = start_thread("reknit-prune", self._prune)
                except ReknitError as error:  # one rank alone must not stop
                    logger.warning("old steps could not be removed and stay for now: %s", error)

    def _note_ended(self) -> None:
        for save in self._saves:
            if save.write_s is None and save.pending.done():
                self.write_s = save.write_s = monotonic() - save.began
                if save.pending.error is None:
                    self._surplus, self._reached = True, save.step
                    if self._retention is not None:
                        self._retention.note_saved(save.step)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for all saves and removals.  Raises what made a save fail, and `DeadlineError`."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        for save in self._saves:
            save.pending.wait(None if deadline is None else deadline.remaining())
            if not save.pending.skipped:
                save.pending.result()
        self.end_pruning(deadline)
        self.tend()
        self.end_pruning(deadline)

    def settle(self) -> None:
        """Wait until all saves and removals have ended, well or not."""
        for save in self._saves:
            save.pending.wait()
        self._note_ended()
        self.end_pruning()

    def end_pruning(self, deadline: Deadline | None = None) -> None:
        """Wait for the removal that goes on.  Raises `DeadlineError`."""
        if self._pruning is not None:
            self._pruning.join(None if deadline is None else deadline.remaining())
            if self._pruning.is_alive():
                raise DeadlineError("all steps are saved, but old steps are not removed yet")

    def prune(self, *, dry_run: bool) -> list[SavedStep]:
        """Remove what is surplus now, and return it; with `dry_run` only return it."""
        if self._retention is None:
            return []
        self._note_ended()
        self.end_pruning()
        act = self._retention.surplus if dry_run else self._retention.prune
        return act(self.needed(), self._reached)

    def _prune(self) -> None:
        """Prune; training goes on where that fails, and the next save tries again."""
        assert self._retention is not None
        try:
            self._retention.prune(self.needed(), self._reached)
        except Exception as error:  # a policy may be a user's own
            logger.warning("old steps could not be removed and stay for now: %s", error, exc_info=error)
