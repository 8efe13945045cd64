"""The agents of a group over time: started with or before the first save, and replaced when some are lost."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from reknit.engine.background.side_group import side_group
from reknit.engine.background.trainer.agent_session import AgentSession, AgentStart
from reknit.engine.outcome import SaveOutcome
from reknit.errors import AgentError, ShortageError
from reknit.options import SaveOptions
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group
    from reknit.monitor.phase import Deadline

logger = logging.getLogger("reknit")

_NEW_AGENTS_S = 30.0
"""Seconds for which a save waits for new agents in place of lost ones."""


class AgentSupervisor:
    """Numbers the saves of this rank in one group, and finds the agents for each.

    All ranks count the same saves, so a number names one save of the group.
    """

    def __init__(self, *, in_process: bool) -> None:
        """Start nothing yet; with `in_process` the agents are threads of the trainers."""
        self.session: AgentSession | None = None
        self.failure: Exception | None = None
        """The error that kept lost agents from being replaced."""
        self.count = 0
        self._in_process = in_process
        self._options = SaveOptions()
        self._side: Group | None = None
        self._early: AgentStart | None = None
        self._replacing: AgentSession | None = None
        self._settled = threading.Event()
        self._settled.set()
        self._waiting: set[int] = set()
        self._given_up: list[int] = []
        self._lock = threading.Condition()

    def next_number(self, options: SaveOptions) -> int:
        """Return the number of the next save, which has these options."""
        with self._lock:
            number, self.count = self.count, self.count + 1
            self._waiting.add(number)
            self._options = options
            return number

    def start_early(self, group: Group, options: SaveOptions) -> None:
        """Start an agent for this rank, unless it has one, for `join_early` or the next save.

        An error is dropped, since these start an agent again.  Only Ctrl-C is raised.
        """
        if self.session is not None or self._early is not None:
            return
        self._options = options
        early = AgentStart(group, options, in_process=self._in_process)
        if early.error is None:
            self._early = early
            return
        early.give_up()
        if not isinstance(early.error, Exception):
            raise early.error

    def join_early(self, group: Group, options: SaveOptions) -> None:
        """Join the agents of all ranks before there is a save; all ranks call this after `start_early`."""
        if self.session is None:
            self._options = options
        starting = self.start(group)
        if starting is not None:
            self._join(group, starting, self._first_waiting)

    def start(self, group: Group) -> AgentStart | None:
        """Return the agent that starts for this rank, or None if it has joined the others already."""
        early, self._early = self._early, None
        if early is not None and early.is_there:
            return early
        if early is not None:
            early.give_up()
        return None if self.session else AgentStart(group, self._options, in_process=self._in_process)

    def session_for(self, number: int, group: Group, starting: AgentStart | None) -> AgentSession:
        """Return the agents that work on a save; agents that are `starting` join each other first."""
        if starting is not None:
            self._join(group, starting, lambda: number)
        session = self.session
        assert session is not None
        if session.link.broken and not session.link.ended_on_purpose:
            self.replace(session)
            with self._lock:
                self._lock.wait_for(
                    lambda: self.session is not session or self.failure is not None, _NEW_AGENTS_S
                )
                session = self.session or session
        if session.link.broken:
            raise self.failure or AgentError(
                "the agents of other ranks have ended"
                if session.link.ended_on_purpose
                else f"an agent was lost, and no new ones were there within {_NEW_AGENTS_S:g} s",
                rank=session.link.rank,
                remedy="let every rank call reknit.close() and save again",
            )
        if number < session.first:
            raise AgentError(
                "this save began while agents were lost, and other ranks have given it up",
                rank=session.link.rank,
                remedy="the next save is well",
            )
        return session

    def _join(self, group: Group, starting: AgentStart, number: Callable[[], int]) -> None:
        """Join the agents of all ranks; `number` is the number of the next save of this rank."""
        try:
            if self._side is None:
                self._side = side_group(group, "trainers", self._options.comm, self._options.timeout_s)
        except BaseException:
            starting.give_up()
            raise
        self._install(AgentSession.form(group, self._options, number, starting))

    def begun(self, number: int) -> None:
        """Record that the agents have a save, so that new agents need not wait for it."""
        with self._lock:
            self._waiting.discard(number)

    def give_up(self, number: int) -> None:
        """Record that a save did not begin, and report it to the agents, now or once there are any."""
        with self._lock:
            self._waiting.discard(number)
            self._given_up.append(number)
            if self.session is not None and not self.session.link.broken:
                self._report_given_up(self.session)

    def replace(self, lost: AgentSession) -> None:
        """Start new agents in place of lost ones, in a thread, together with all other ranks.

        Every rank does so as soon as it notices the loss, and not at its next save.  Otherwise two ranks
        could wait for each other, if one notices the loss just before a save and the other just after.
        """

        def form() -> None:
            assert self._side is not None
            lost.link.quit()
            try:
                starting = AgentStart(self._side, self._options, in_process=self._in_process)
                session = AgentSession.form(self._side, self._options, self._first_waiting, starting)
            except Exception as error:  # also a bug: saves wait for the outcome
                if self.session is lost:
                    self._fail(error)
            else:
                self._install_instead(session, lost)
            finally:
                if self._replacing is lost:  # else those are lost, too, and the next thread has begun
                    self._settled.set()

        with self._lock:
            if self._replacing is lost or self.session is not lost:
                return
            self._replacing = lost
            self._settled.clear()
        try:
            start_thread("reknit-forms-agents", form)
        except ShortageError as error:  # the thread that receives from the agent must go on
            self._settled.set()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Raise an error in the saves that wait for new agents."""
        logger.error("agents were lost, and new ones could not be started: %s", error)
        with self._lock:
            self.failure = error
            self._lock.notify_all()

    def close(self, deadline: Deadline, all_ended: Callable[[], bool]) -> None:
        """Ask the agents to end, and wait for their end if all saves have ended."""
        if self._side is not None:
            self._side.close()
        self._settled.wait(deadline.remaining())  # no agents may replace lost ones after this
        early, self._early = self._early, None
        if early is not None:
            early.give_up()
        with self._lock:
            session, self.session = self.session, None
        if session is not None:
            session.link.quit()
            if all_ended():
                session.link.ended(deadline.remaining())

    def _report_given_up(self, session: AgentSession) -> None:
        """Report the saves that this rank gave up to all ranks; called with the lock held."""
        for number in self._given_up:
            if number >= session.first:
                error = AgentError("this rank gave the save up when agents were lost", rank=session.link.rank)
                ended = SaveOutcome("")
                ended.end(error)  # the user already has the error
                session.new_save(number, ended).abandon(error, self._options.timeout_s)
        self._given_up.clear()

    def _first_waiting(self) -> int:
        """Return the number of the first save in which new agents can take part."""
        with self._lock:
            return min(self._waiting, default=self.count)

    def _install_instead(self, session: AgentSession, lost: AgentSession) -> None:
        """Use new agents in place of lost ones, or end them if `close` has not waited for them."""
        if self.session is lost:  # in the log before a waiting save continues, and without the lock
            logger.warning("agents were lost; new ones take their place from save %d on", session.first)
        with self._lock:
            if wanted := self.session is lost:
                self._install(session)
        if not wanted:
            session.link.quit()

    def _install(self, session: AgentSession) -> None:
        """Use new agents for all later saves, and report to them the saves that this rank gave up."""
        session.link.failed = lambda: self.replace(session)
        with self._lock:
            self._report_given_up(session)
            self.session = session
            self._lock.notify_all()
        if session.link.broken and not session.link.ended_on_purpose:
            self.replace(session)  # lost already, before `failed` was set
