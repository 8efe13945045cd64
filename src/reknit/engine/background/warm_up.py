"""The agent's warm-up before the first save: everything but writing and committing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.background.agent_save import AgentSave

if TYPE_CHECKING:
    from reknit.engine.memory.tuning import Tuner
    from reknit.engine.saving.coordinator import Coordinator
    from reknit.engine.small_files import Written

ROUND = "prepare"
"""The round in which all ranks learn that each of them is ready, or why one is not."""


class WarmUp(AgentSave):
    """A save that ends where others write.

    It is numbered like a save and fails like one, so whatever is lost meanwhile all ranks hear of it.  The
    root keeps what it learns of the ranks' layouts, for the saves to come.
    """

    _ready = False

    def make_ready(self) -> None:
        """Note that the trainer has done its part."""
        with self._changed:
            self._ready = True
            self._changed.notify_all()

    @property
    def staged(self) -> bool:
        """Whether the trainer is needed no more."""
        with self._changed:
            return self._ready

    @property
    def places(self) -> list[str]:
        """No checkpoint appears anywhere."""
        return []

    def write(self, tuner: Tuner, before: AgentSave | None) -> None:
        """Write nothing."""
        with self._changed:
            self._written = []
            self._changed.notify_all()

    def _hold_rounds(self, coordinator: Coordinator) -> tuple[list[Written], messages.CommitOutcome]:
        """Assign the work as a save would, and return when all ranks are ready."""
        self._assign(coordinator)
        group, timeout_s = self.job.group, self.job.options.timeout_s
        with comm.turn(group, ROUND, timeout_s, merge=b"".join, subject=f"save {self.number}") as turn:
            self.wait_ready()
            turn.arrive()
        return [], messages.CommitOutcome(0, [])

    def wait_ready(self) -> None:
        """Wait until the trainer has done its part; raises what kept it from that."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self.error is not None)
            if self.error is not None:
                raise self.error
