"""Prints the failures of background saves whose results nobody asked for, when the process ends."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.processes.exit_status import at_very_end, end_with_failure

if TYPE_CHECKING:
    from reknit.engine.outcome import SaveOutcome


class UnaskedSaves:
    """The saves of this process whose failures are printed at its end, unless somebody asks for them before.

    The exit status of a process with such a failure is not 0, so that launchers and shells see it, too.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all saves, which belong to the parent in a forked process."""
        self._lock = threading.RLock()  # a handler of a signal may save, too
        self._saves: list[SaveOutcome] = []
        self._watching = False

    def watch(self, save: SaveOutcome) -> None:
        """Watch a save that begins."""
        with self._lock:
            self._saves = [*(each for each in self._saves if each.unasked or not each.over()), save]
            if not self._watching:
                self._watching = True
                at_very_end(self.report)

    def report(self) -> None:
        """Print the failures that nobody asked for, and end this process with a status other than 0."""
        failed = [save for save in self._saves if save.unasked]
        if failed:
            self._saves = []
            lines = ["reknit: this process ends with an error, since nobody has asked for the results of"]
            for save in failed:
                what, error = save.failure()
                lines.append(f"  {what}, which failed: {type(error).__name__}: {error}")
            with suppress(Exception):  # standard error may be closed, or missing
                sys.stderr.write("\n".join([*lines, ""]))
            end_with_failure()


unasked_saves = UnaskedSaves()
os.register_at_fork(after_in_child=unasked_saves.begin_anew)
