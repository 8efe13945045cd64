"""A virtual process: real, blocking code in a greenlet that can die, stop or be interrupted at any step."""

from __future__ import annotations

from collections import deque
from contextvars import ContextVar, copy_context
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from reknit.errors import MissingExtraError

try:
    import greenlet
except ImportError as error:
    raise MissingExtraError(
        "the simulator needs the package greenlet", remedy="pip install greenlet"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.simulation.clock import Schedule

    Plan = Mapping[int, Sequence[Callable[["Process"], None]]]
    """Faults of a process, by the number of its step, from 1."""


_RUNNING: ContextVar[Process] = ContextVar("running")


def sleep(seconds: float) -> None:
    """Wait for some virtual seconds, in the process whose code calls this."""
    _RUNNING.get().sleep(seconds)


class Dead(BaseException):
    """Raised in the rest of a dead process when its stack is cleared away; nothing sees its effects."""


class Process:
    """A rank of an incarnation (`run`) of a job.

    Its own code runs in a greenlet, and waits in `sleep` and `wait`.  Inputs from outside (messages, timers)
    are actions, done one after another, as by the threads of a server.  Every action is a step, and so is
    every call of `here` by its code; `plan` has the faults by step.  A dead process does no further step, and
    a stopped one none before it goes on.
    """

    def __init__(self, schedule: Schedule, run: int, rank: int, plan: Plan) -> None:
        self.schedule = schedule
        self.run, self.rank, self.name = run, rank, f"{run}.{rank}"
        self.steps = 0
        self.stopped_s = 0.0
        self.dead = self.ended = False
        self.on_death: Callable[[bool], None] = lambda silent: None
        self._plan = dict(plan)
        self._until = 0.0
        self._actions: deque[tuple[str, Callable[[], object]]] = deque()
        self._pumping = self._waiting = self._unwinding = False
        self._interrupt: BaseException | None = None
        self._ticket = 0
        self._own: greenlet.greenlet | None = None
        self._hub: greenlet.greenlet | None = None

    @property
    def stopped(self) -> bool:
        """Whether it does nothing at the moment, and may go on."""
        return self.schedule.moment < self._until

    @property
    def running(self) -> bool:
        """Whether it is neither dead nor stopped."""
        return not (self.dead or self.stopped)

    @property
    def live(self) -> bool:
        """Whether it is neither dead nor stopped for ever."""
        return not self.dead and self._until < inf

    @property
    def unstruck(self) -> int:
        """The number of steps with planned faults that it did not reach."""
        return len(self._plan)

    def start(self, work: Callable[[], object]) -> None:
        """Let its own code begin, now."""
        self._hub = greenlet.getcurrent()
        self._own = greenlet.greenlet(partial(self._live, work))
        # A greenlet begins with an empty context, which would have the real clock.
        self._own.gr_context = copy_context()
        self.schedule.after(0.0, partial(self._resume, self._ticket))

    def _live(self, work: Callable[[], object]) -> None:
        _RUNNING.set(self)
        try:
            self.hold()
            work()
        except Dead:
            return
        self.ended = True

    # Called by its own code.

    def here(self, label: str) -> None:
        """Pass a step of its own code."""
        if not self._unwinding:
            self._step(label)
        self.hold()

    def hold(self) -> None:
        """Wait until the process runs."""
        if self._unwinding:
            raise Dead
        while self.dead or self.stopped:
            if not self.dead:
                self.schedule.at(self._until, partial(self._resume, self._ticket + 1))
            self._park()

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""
        if self._unwinding:
            raise Dead
        self.schedule.after(seconds, partial(self._resume, self._ticket + 1))
        self._park()
        self.hold()

    def wait(self) -> None:
        """Wait until `wake` is called, after which the caller must check its condition again."""
        self._waiting = True
        try:
            self._park()
        finally:
            self._waiting = False
        self.hold()

    def act(self, label: str, action: Callable[[], object]) -> None:
        """Do an action now, after all waiting ones, and wait until the process runs."""
        if self._unwinding:
            raise Dead
        self.later(label, action)
        self.hold()

    # Called by the world around it.

    def later(self, label: str, action: Callable[[], object]) -> None:
        """Do an action after all earlier ones."""
        self._actions.append((label, action))
        self._pump()

    def next(self, label: str, action: Callable[[], object]) -> None:
        """Do another action before all waiting ones; called within an action."""
        self._actions.appendleft((label, action))

    def wake(self) -> None:
        """Let its own code check its condition again."""
        if self._waiting:
            self._waiting = False
            self.schedule.after(0.0, partial(self._resume, self._ticket))

    def die(self, *, silent: bool) -> None:
        """End at once; unless it is `silent`, the neighbours see their connections break."""
        if not self.dead:
            self.dead = True
            self._actions.clear()
            self.schedule.note(self.name, "DIES" + (" silently" if silent else ""))
            self.on_death(silent)

    def stop(self, seconds: float) -> None:
        """Do nothing for some seconds, and then go on."""
        self.schedule.note(self.name, f"STOPS for {seconds:g} s")
        self._until = self.schedule.moment + seconds
        self.stopped_s += seconds
        self.schedule.at(self._until, self._pump)

    def interrupt(self, error: BaseException) -> None:
        """Raise an error in its own code, where it waits now or next."""
        self.schedule.note(self.name, f"IS INTERRUPTED by {type(error).__name__}")
        self._interrupt = error
        self.wake()

    def unwind(self) -> None:
        """Clear its stack away at the end of a simulation; its cleanup has no effect."""
        self.dead = self._unwinding = True
        if self._own is not None and self._own:
            self._own.throw(Dead)

    def _step(self, label: str) -> None:
        self.steps += 1
        self.schedule.note(self.name, f"{self.steps}: {label}")
        for strike in self._plan.pop(self.steps, ()):
            strike(self)

    def _pump(self) -> None:
        """Do the waiting actions, as long as the process runs."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._actions and self.running:
                label, action = self._actions.popleft()
                self._step(label)
                if self.stopped:
                    self._actions.appendleft((f"{label} (goes on)", action))
                elif not self.dead:
                    action()
        finally:
            self._pumping = False

    def _park(self) -> None:
        self._ticket += 1
        assert self._hub is not None
        self._hub.switch()
        if self._interrupt is not None and not self._unwinding:
            error, self._interrupt = self._interrupt, None
            raise error

    def _resume(self, ticket: int) -> None:
        """Resume its own code, unless it waits for something else by now."""
        if ticket == self._ticket and not self.dead and self._own is not None:
            self._own.switch()
