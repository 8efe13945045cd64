"""The state that the saves of an agent share, and the warm-ups among them.

An agent imports this module, and with it the code that writes and commits, when its first save begins.
Earlier imports would delay the join of the agents, for which trainers wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.engine.background.agent_job import agent_job
from reknit.engine.background.agent_save import AgentSave
from reknit.engine.call_reports import SaveTotals
from reknit.engine.memory.tuning import Tuner
from reknit.engine.saving.reuse import Committed
from reknit.engine.saving.save_coordinator import Coordinator
from reknit.engine.saving.save_rounds import ASSIGN
from reknit.errors import DeadlineError
from reknit.monitor.phase import Deadline
from reknit.processes import circumstances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.engine.background import agent_messages as say
    from reknit.engine.small_files import Written
    from reknit.errors import ReknitError
    from reknit.options import SaveOptions
    from reknit.processes.channel import Channel
    from reknit.processes.circumstances import Circumstances

ROUND = "prepare"
"""The round that ends when all ranks are ready, or with the error of a rank."""


class WarmUp(AgentSave):
    """A save that ends after the assignment, and writes nothing.

    It is numbered like a save and fails like one, so that the loss of an agent is an error on all ranks.  The
    root keeps the layouts of the ranks for later saves.
    """

    def make_ready(self) -> None:
        """Record that the trainer has done its part."""
        with self._changed:
            self._staged = True
            self._changed.notify_all()

    @property
    def places(self) -> list[str]:
        """No places, as a warm-up makes no checkpoint."""
        return []

    def write(self, tuner: Tuner, before: AgentSave | None) -> None:
        """Write nothing."""
        with self._changed:
            self._written = []
            self._changed.notify_all()

    def _hold_rounds(self, coordinator: Coordinator) -> tuple[list[Written], SaveTotals]:
        """Assign the work as in a save, and wait until all ranks are ready."""
        self._assign(coordinator)
        group, timeout_s = self.job.group, self.job.options.timeout_s
        with comm.turn(group, ROUND, timeout_s, merge=b"".join, subject=f"save {self.number}") as turn:
            self.wait_ready()
            turn.arrive()
        return [], SaveTotals(0, 0, 0, 0, ())

    def wait_ready(self) -> None:
        """Wait until the trainer has done its part.  Raises the error of the save."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged or self.error is not None)
            if self.error is not None:
                raise self.error


class Adapting:
    """The circumstances of an agent's process, which are set to those of each save that begins."""

    def __init__(self) -> None:
        self._current: Circumstances | None = None
        self._due: Circumstances | None = None

    def adapt(self, due: Circumstances | None, earlier: Sequence[AgentSave], timeout_s: float) -> None:
        """Set the circumstances of a save that begins; None keeps those of the save before.

        `earlier` are the saves under way.  They are committed first, and another umask also waits for
        their promotions.  If the umask stays, promotions go on, since their stores are open.  Raises
        `DeadlineError`; then the next save tries again.
        """
        self._due = due or self._due
        if self._due is None:
            return
        promoted = self._current is not None and self._current.umask != self._due.umask
        deadline = Deadline(timeout_s)
        for save in earlier:
            if not save.wait(deadline.remaining(), promoted=promoted):
                changed = "umask" if promoted else "environment"
                raise DeadlineError(
                    f"the {changed} has changed, and save {save.number} to {save.url}, which needs the old "
                    f"one, was not over within {timeout_s:g} s",
                    remedy="change it when no save or promotion is under way, or raise timeout_s",
                )
        for save in earlier:
            # While this process has the circumstances that these stores need.
            for store in save.promotions.stores if save.promotes else ():
                store.open_ahead()
        circumstances.take(self._due, self._current)
        self._current, self._due = self._due, None


class AgentState:
    """Makes the saves of one agent, with the state that they share."""

    def __init__(self, channel: Channel) -> None:
        self.coordinator = Coordinator()
        self._channel = channel
        self._committed = Committed()
        self._adapting = Adapting()
        self._tuners: dict[tuple[str, int | None, int | None], Tuner] = {}

    def save(
        self, begin: say.Begin, options: SaveOptions, group: comm.Group, earlier: Sequence[AgentSave]
    ) -> AgentSave:
        """Return a save that the trainer has begun after the `earlier` saves.  Raises `ReknitError`."""
        self._adapting.adapt(begin.circumstances, earlier, options.timeout_s)
        job = agent_job(begin, options, group, self._channel.try_send)
        return (WarmUp if begin.warm_up else AgentSave)(begin, job, self._channel, self._committed)

    def tuner(self, url: str, options: SaveOptions) -> Tuner:
        """Return the tuner for stores of this kind, with its earlier measurements."""
        scheme, colon, _ = url.partition("://")
        key = (scheme if colon else "", options.threads, options.piece_nbytes)
        if key not in self._tuners:
            self._tuners[key] = Tuner(threads=options.threads, piece_nbytes=options.piece_nbytes)
        return self._tuners[key]


def refuse(number: int, error: ReknitError, group: comm.Group, timeout_s: float) -> None:
    """Raise, on all ranks, the error that kept a save from beginning here."""
    comm.fail(group, ASSIGN, error, timeout_s, subject=f"save {number}")
