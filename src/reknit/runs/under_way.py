"""The saves of a run that are under way, and the removal of what they make surplus when committed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.errors import ReknitError
from reknit.monitor.phase import Deadline, monotonic
from reknit.system import start_thread

if TYPE_CHECKING:
    import threading

    from reknit.engine.outcome import PendingSave
    from reknit.runs.retention import Retention

logger = logging.getLogger("reknit")


@dataclass
class _Save:
    """A save of this run; `write_s` is how long it took, None as long as that is not known."""

    step: int
    pending: PendingSave
    began: float
    write_s: float | None = None


class UnderWay:
    """Watches the saves of a run; `retention` is that of rank 0, None elsewhere and where all steps stay."""

    def __init__(self, retention: Retention | None) -> None:
        self._retention = retention
        self._saves: list[_Save] = []
        self._surplus = False
        self._pruning: threading.Thread | None = None
        self.write_s: float | None = None
        """How long the last save took until it was committed."""

    def add(self, step: int, pending: PendingSave, began: float) -> None:
        """Watch a save."""
        self._saves = [*(save for save in self._saves if save.write_s is None), _Save(step, pending, began)]
        self.tend()

    def last(self, step: int) -> PendingSave | None:
        """Return the last save if it was that of `step`, and did not fail."""
        last = self._saves[-1] if self._saves else None
        return last.pending if last is not None and last.step == step and last.pending.error is None else None

    def steps(self) -> set[int]:
        """Return the steps whose saves are not known to have ended."""
        return {save.step for save in self._saves if save.write_s is None}

    def busy(self) -> bool:
        """Tell whether a save is under way."""
        return any(not save.pending.done() for save in self._saves)

    def tend(self) -> None:
        """Take note of saves that have ended, and begin to remove what they made surplus."""
        for save in self._saves:
            if save.write_s is None and save.pending.done():
                self.write_s = save.write_s = monotonic() - save.began
                self._surplus |= save.pending.error is None
        if self._surplus and (self._pruning is None or not self._pruning.is_alive()):
            self._surplus = False
            if self._retention is not None:
                self._pruning = start_thread("reknit-prune", self._prune)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for all saves and removals.  Raises what made a save fail, and `DeadlineError`."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        for save in self._saves:
            save.pending.result(None if deadline is None else deadline.remaining())
        self.end_pruning()
        self.tend()
        self.end_pruning()

    def end_pruning(self) -> None:
        """Wait for the removal that goes on."""
        if self._pruning is not None:
            self._pruning.join()

    def _prune(self) -> None:
        """Prune; training goes on where that fails, and the next save tries again."""
        assert self._retention is not None
        try:
            self._retention.prune(self.steps())
        except ReknitError as error:
            logger.warning("steps that are no longer wanted stay for now: %s", error)
