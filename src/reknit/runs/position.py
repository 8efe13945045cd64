"""Where is a run: the step that it saved or loaded last, and the time that its last save took?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.monitor.phase import monotonic
from reknit.policies.policy import Facts

if TYPE_CHECKING:
    from reknit.engine.outcome import PendingSave
    from reknit.runs.pending_saves import PendingSaves


class Position:
    """The position of a run, the same on all ranks but for the measured times.

    `step` is the step that was saved or loaded last, or None.  `resumed` is whether the run continues an
    earlier one, whose later steps it may replace.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.resumed = False
        self.decided: tuple[int, bool] | None = None
        """The last step that was asked for, and whether the policy saves it."""
        self._loaded = -1
        self._is_new = True
        self._at = monotonic()
        self._stall_s: float | None = None

    def check(self, step: int) -> None:
        """Raise `UsageError` for a step before the position: it would take the place of an earlier one."""
        if self.step is None or step >= self.step:
            return
        if self._is_new:
            raise UsageError(
                f"this run continues after step {self.step}, which it has loaded, and not with step {step}",
                remedy="begin with the number that resume returned: for step in range(run.resume(state), n); "
                f"to continue from an earlier step, call load(state, {step}) first",
            )
        raise UsageError(
            f"step {step} comes after step {self.step}, which this run has saved",
            remedy="count steps from the begin of the training, through all epochs; to go back to an earlier "
            "step, call load(state, step)",
        )

    def replaces(self, step: int) -> bool:
        """Return whether a save of a step may replace a checkpoint: only the run's own place, and later."""
        return self.resumed and step >= self._loaded

    def loaded(self, step: int) -> None:
        """Continue after a step."""
        self.step = self._loaded = step
        self._at, self.decided, self.resumed, self._is_new = monotonic(), None, True, True

    def saved(self, step: int, begun: float, pending: PendingSave) -> None:
        """Continue after a step whose save began at a time by `monotonic`, and may have been skipped."""
        self.step = step if self.step is None else max(self.step, step)
        self._at, self._is_new = monotonic(), False
        if not pending.skipped:
            self._stall_s = self._at - begun

    def facts(self, saves: PendingSaves) -> Facts:
        """Return the measured facts for policies, with those of the pending saves."""
        return Facts(
            seconds=monotonic() - self._at,
            busy=saves.busy(),
            stall_s=self._stall_s,
            write_s=saves.write_s,
            failed=saves.has_failed(),
        )
