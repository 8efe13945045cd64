"""The trainer's link to its agent: start it, exchange messages, notice its death."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from reknit.engine.background import messages
from reknit.engine.stored.agents import MODULE
from reknit.errors import AgentError, DeadlineError, ReknitError, ShortageError, from_wire, typed
from reknit.events.phase import Deadline
from reknit.processes import start_child
from reknit.processes.channel import Channel, Message
from reknit.system import identity, socket_pair, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.background.lanes import Door
    from reknit.engine.background.messages import ProcessContext
    from reknit.processes.channel import ReceivedMessage

_REAP_S = 10.0
_IDENTITY = {
    "user": "effective user",
    "group": "effective group",
    "groups": "supplementary groups",
    "root": "root folder (device and inode)",
    "mounts": "mount namespace",
}


class AgentLink:
    """The trainer's end of the channel to its agent.

    Its thread calls `deliver` with every message about a save, and `lost` once when the agent is gone.  It
    calls `failed` when no later save can succeed, unless the agents were asked to end.
    """

    def __init__(
        self, rank: int, *, in_process: bool, send_timeout_s: float, door: Door | None = None
    ) -> None:
        self.rank = rank
        self.deliver: Callable[[Any], None] = _ignore
        self.lost: Callable[[ReknitError], None] = _ignore
        self.failed: Callable[[], None] = lambda: None
        self.broken = False
        """Whether no later save can succeed with this agent."""
        self.ended_on_purpose = False
        """Whether the cause is that the trainer of another rank ended, or closed its agent."""
        self._quitting = self._has_joined = False
        self._process: subprocess.Popen[bytes] | None = None
        self.in_process = in_process
        self.context: ProcessContext | None = None
        """The process context of the last save that the agent received."""
        self._identity = identity()
        self._answered = threading.Condition()
        self._answers: list[messages.Listening | messages.Joined] = []
        self.door = door
        """The socket of the agent's server, kept here until the agent has joined the others."""
        self.unjoined: Callable[[ReknitError], None] = _ignore
        """Called last when the agent is gone, if it did not join the others."""
        self.gone: ReknitError | None = None
        self._fell: ReknitError | None = None
        """The error with which the agent announced its end."""
        ours, theirs = socket_pair()
        self.channel = Channel(ours, messages.decode, send_timeout_s=send_timeout_s)
        try:
            if in_process:
                self._run_here(Channel(theirs, messages.decode))
            else:
                self._process = self.spawn(theirs.fileno())
                theirs.close()
            start_thread(f"reknit-hears-agent-{rank}", self._listen)
        except BaseException:
            theirs.close()
            self.channel.close()
            self._shut_door()
            if self._process is not None:
                self._process.kill()  # it has done nothing yet
                self._process.wait()
            raise
        open_links.add(self)

    @property
    def pid(self) -> int | None:
        """The process id of the agent, or None if it runs in this process."""
        return None if self._process is None else self._process.pid

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message.  Raises `AgentError` when the agent is gone."""
        try:
            self.channel.send(message, fd)
        except OSError as error:
            self.broken = True
            gone = AgentError(f"the other end of the agent's socket is gone: {error}")
            raise (self.gone or gone) from error
        if isinstance(message, messages.Begin):
            self.context = message.context or self.context

    def send_to_starting(self, message: Message, fd: int | None = None) -> None:
        """Send a message to an agent that starts.  Raises the reason of its end when it is gone."""
        try:
            self.send(message, fd)
        except AgentError:
            self.ended(_REAP_S)
            if self.gone is not None:
                raise self.gone from None
            raise

    def require_same_identity(self) -> None:
        """Raise `AgentError` if this process has changed its user or root folder since the agent began."""
        now = identity()
        if self.in_process or now == self._identity:
            return
        name, old, new = next(
            (name, old, new)
            for name, old, new in zip(now._fields, self._identity, now, strict=True)
            if old != new
        )
        raise AgentError(
            f"the {_IDENTITY[name]} of this process changed from {old} to {new} after its agent was started, "
            "and the agent would write with the old one",
            rank=self.rank,
            remedy="let every rank call reknit.close() after the change, so that the next save starts new "
            "agents; or save with wait=True",
        )

    def answer(self, timeout_s: float) -> messages.Listening | messages.Joined:
        """Return the next answer of the agent, or raise the error of an agent without one."""
        deadline = Deadline(timeout_s)
        with self._answered:
            self._answered.wait_for(lambda: self._answers or self.gone, deadline.remaining())
            if self._answers:
                return self._answers.pop(0)
        raise self.gone or DeadlineError(
            f"the agent of rank {self.rank} did not answer within {timeout_s:g} s", rank=self.rank
        )

    def quit(self) -> None:
        """Ask the agent to end when it has finished its saves."""
        self._quitting = self.broken = True
        with contextlib.suppress(ReknitError):
            self.send(messages.Quit())

    def end(self) -> None:
        """End an agent without saves, or one that is still starting, and wait until it is gone."""
        self.quit()
        self.unjoined = _ignore  # no other agent needs it
        if self._process is not None:
            self._process.kill()
            self.ended(_REAP_S)

    def ended(self, timeout_s: float) -> bool:
        """Wait until the agent is gone, and return whether it is."""
        with self._answered:
            return self._answered.wait_for(lambda: self.gone is not None, timeout_s)

    def forget(self) -> None:
        """Drop the agent in a forked child of the trainer, to which it does not belong."""
        self.broken = True
        self.gone = AgentError("a forked process has no part in the saves of its parent")
        self.channel.close()
        if self.door is not None:
            self.door.close()

    def spawn(self, fd: int) -> subprocess.Popen[bytes]:
        """Start the agent in a session of its own, out of reach of the terminal's signals, and return it."""
        if not sys.executable:
            raise AgentError(
                "there is no Python executable to start an agent with",
                remedy="save with wait=True, or set sys.executable",
            )
        # Blocked signals stay blocked in the process.  Until the agent ignores these, they would end it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, messages.FOR_TRAINERS)
        try:
            return start_child(MODULE, fd, str(os.getpid()), stdout=subprocess.DEVNULL, new_session=True)
        except OSError as error:
            raise AgentError(
                f"the agent of rank {self.rank} could not be started: {error}", rank=self.rank
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _run_here(self, channel: Channel) -> None:
        # Imported only here: `python -m` would complain of a module that is there before it is run.
        # And all of it here, not in the agent's threads: a process that another thread forks meanwhile would
        # have modules that are half imported.
        import reknit.engine.background.agent_save
        import reknit.format.index.arrow_file  # noqa: F401
        from reknit.engine.background.agent import Agent

        start_thread(f"reknit-agent-{self.rank}", Agent(channel, None).run)

    def _listen(self) -> None:
        """Receive messages until the agent is gone."""
        while (received := self._receive()) is not None:
            message = received.message
            if isinstance(message, (messages.Listening, messages.Joined)):
                if isinstance(message, messages.Joined):
                    self._has_joined = True
                    if self.door is not None:
                        self.door.close()
                with self._answered:
                    self._answers.append(message)
                    self._answered.notify_all()
            elif isinstance(message, messages.Broken):
                self.ended_on_purpose = message.on_purpose
                self.broken = True
                if not message.on_purpose:
                    self.failed()
            elif isinstance(message, messages.AgentFailed):
                self._fell = from_wire(message.error)
                self.broken = True
            else:
                self.deliver(message)
        self.broken = True  # before anything else, so that the next save does not begin with this agent
        error = self._error_of_end(self._how_it_ended())
        self.channel.close()
        self.lost(error)
        if not (self.ended_on_purpose or self._quitting):
            self.failed()
        with self._answered:
            self.gone = error
            self._answered.notify_all()
        if not self._has_joined:
            self.unjoined(error)
        self._shut_door()

    def _shut_door(self) -> None:
        """Close the socket of a server that nobody needs any more."""
        if self.door is not None:
            self.door.close()
            self.door.remove()

    def _receive(self) -> ReceivedMessage | None:
        """Return the next message; None when the agent is gone, or a message came without its descriptor."""
        try:
            return self.channel.receive()
        except OSError as error:
            self._fell = self._fell or typed(error)
            return None

    def _error_of_end(self, how: str) -> ReknitError:
        """Return the error of an agent that has ended, with the reason that it gave."""
        why = self._fell
        if why is None:
            return AgentError(how, rank=self.rank)
        kind = ShortageError if isinstance(why, ShortageError) else AgentError
        return kind(f"{how}: {why.message}", remedy=why.remedy, rank=self.rank)

    def _how_it_ended(self) -> str:
        """Reap the process of the agent, and return words about its end."""
        if self._process is None:
            return f"the agent of rank {self.rank} has ended"
        try:
            status = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            # If it continued, it would write from an arena that has been filled again.
            self._process.kill()
            self._process.wait()
            how = "did not read its channel, and was killed"
        else:
            how = "has ended"
            if status:
                how = f"was killed by signal {-status}" if status < 0 else f"failed with exit status {status}"
        return f"the agent of rank {self.rank} (process {self._process.pid}) {how}"


def _ignore(_: Any) -> None:
    """Ignore a message."""


open_links: weakref.WeakSet[AgentLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(open_links):
        link.forget()


# A forked worker with an open socket would hide the death of the trainer from the agent.
os.register_at_fork(after_in_child=_after_fork)
