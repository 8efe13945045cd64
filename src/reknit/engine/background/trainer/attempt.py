"""A save on its way from the call of the user to the agents of all ranks."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reknit.errors import typed
from reknit.monitor.phase import monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.engine.background.trainer.agent_session import AgentSession, AgentStart
    from reknit.engine.background.trainer.agent_supervisor import AgentSupervisor
    from reknit.engine.background.trainer.stage_for_agent import PreparedSave
    from reknit.engine.background.trainer.trainer_save import TrainerSave
    from reknit.engine.outcome import SaveOutcome
    from reknit.options import SaveOptions

    Story = Callable[[PreparedSave, AgentSession, TrainerSave], None]
    """The trainer's part of a save or a warm-up, once there are agents."""

logger = logging.getLogger("reknit")


class Attempt:
    """A save with its number; an error at any place becomes its outcome, on all ranks."""

    def __init__(
        self, pending: SaveOutcome, prepared: PreparedSave, supervisor: AgentSupervisor, options: SaveOptions
    ) -> None:
        """Take the next number of this rank."""
        self.pending, self.prepared = pending, prepared
        self.over = threading.Event()
        """Set when the agent has the save, or the save has failed."""
        self.wrong: BaseException | None = None
        """The error of the preparation, which the other ranks receive through the agents."""
        self._supervisor, self._timeout_s = supervisor, options.timeout_s
        self._number = supervisor.next_number(options)
        self._save: TrainerSave | None = None

    def return_early(self) -> None:
        """Note that the call returns before there are agents: the state is copied."""
        self.prepared.returned = monotonic()
        self.pending.note_staged()

    def hand_over(
        self, story: Story, starting: AgentStart | None, wait_for: Callable[[AgentSession], None]
    ) -> None:
        """Hand the save over to the agents, as soon as they are there and `wait_for` has returned.

        This needs no round of the trainers' group, so another thread may do it beside later calls.
        """
        with self.over_on_error():
            prepared = self.prepared
            session = self._supervisor.session_for(self._number, starting)
            save = self._save = session.new_save(self._number, self.pending)
            save.begun, save.unrecorded = prepared.begun, prepared.recorder
            prepared.arena.hand_over(save)
            self._supervisor.begun(self._number)
            wait_for(session)
            self.pending.place = self.pending.path, session
            if self.wrong is not None:
                raise self.wrong
            story(prepared, session, save)
            self.over.set()

    @contextmanager
    def over_on_error(self) -> Iterator[None]:
        """Let an error in the block end the save; only Ctrl-C and exits of the process are raised."""
        try:
            yield
        except BaseException as caught:  # also a bug: the other ranks must receive it
            if self.over.is_set():  # that of an inner block
                raise
            # The first error counts, except that Ctrl-C always does, since it concerns the whole process.
            first = caught if self.wrong is None or not isinstance(caught, Exception) else self.wrong
            error = typed(first) if isinstance(first, Exception) else first
            try:
                self._end(error)
            finally:
                self.over.set()
            if not isinstance(error, Exception):
                self.pending.asked = True  # it is raised here, so the next save need not raise it
                raise error from (None if error is caught else caught)

    def _end(self, error: BaseException) -> None:
        """Give the save up on all ranks, and log that it failed; the traceback comes with the outcome."""
        pending = self.pending
        if self._save is not None:
            self._save.abandon(error, self._timeout_s)
        else:
            self.prepared.arena.release()
            self._supervisor.give_up(self._number)
        if pending.end(error) and pending.logged:
            logger.error("save to %s failed: %s", pending.path, str(error) or type(error).__name__)
