"""The background saves of one group: staged here, written and committed by agents."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reknit.engine.background.session import AgentSupervisor
from reknit.engine.memory.arena_pool import Arenas
from reknit.errors import AgentError, DeadlineError, ReknitError, ShortageError
from reknit.events.phase import Deadline
from reknit.system import AtExit, at_very_end, end_with_failure, start_thread
from reknit.types.entry import OneAtATime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.comm.group import Group
    from reknit.engine.outcome import SaveOutcome
    from reknit.options import SaveOptions


class UnreadSaves:
    """The saves of this process whose failures are printed at its end, unless somebody asks for them before.

    The exit status of a process with such a failure is not 0, so that launchers and shells see it, too.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all saves, which belong to the parent in a forked process."""
        self._lock = threading.RLock()  # a handler of a signal may save, too
        self._saves: list[SaveOutcome] = []
        self._watching = False

    def watch(self, save: SaveOutcome) -> None:
        """Watch a save that begins."""
        with self._lock:
            self._saves = [*(each for each in self._saves if each.unread or not each.over()), save]
            if not self._watching:
                self._watching = True
                at_very_end(self.report)

    def report(self) -> None:
        """Print the failures that nobody asked for, and end this process with a status other than 0."""
        failed = [save for save in self._saves if save.unread]
        if failed:
            self._saves = []
            lines = ["reknit: this process ends with an error, since nobody has asked for the results of"]
            for save in failed:
                what, error = save.failure()
                lines.append(f"  {what}, which failed: {type(error).__name__}: {error}")
            with suppress(Exception):  # standard error may be closed, or missing
                sys.stderr.write("\n".join([*lines, ""]))
            end_with_failure()


unread_saves = UnreadSaves()
os.register_at_fork(after_in_child=unread_saves.reset)


logger = logging.getLogger("reknit")


class Background:
    """The background saves of this rank in one group.

    The first save starts the agents, unless `start_agents` has.  With `in_process` they are threads of the
    trainers, for stores that no other process can open.
    """

    def __init__(self, *, in_process: bool) -> None:
        self._in_process = in_process
        self.when_closed: Callable[[], object] = lambda: None
        self._exit_wait_s = 0.0
        self.reset()
        _all.add(self)

    def reset(self) -> None:
        """Drop all saves, agents and arenas, which belong to the parent in a forked process."""
        self.supervisor = AgentSupervisor(in_process=self._in_process)
        self.arenas: Arenas | None = None
        self.pending: list[SaveOutcome] = []
        self._exit: AtExit | None = None
        self._lock, self._closing = threading.Lock(), threading.RLock()  # a signal handler may close it, too
        self._saving = OneAtATime("a save that does not wait")
        self._begun: SaveOutcome | None = None

    def after_fork(self) -> None:
        """Begin anew in a forked child, which must not keep the memory of the parent's arenas alive."""
        arenas, theirs = self.arenas, self.pending
        self.reset()
        for pending in theirs:
            pending.after_fork()
        if arenas is not None:
            arenas.forget()

    @contextmanager
    def entered(self, save: SaveOutcome, options: SaveOptions) -> Iterator[Arenas]:
        """Register a save or warm-up, which begins within the block, and return the memory for it.

        Only one thread at a time is in such a block.  Raises `DeadlineError`, and `UsageError` in a block.
        """
        if options.on_error == "raise" and not save.is_read:
            unread_saves.watch(save)
        with self._saving.taken(options.timeout_s):
            self._watch_exit()
            with self._lock:
                keep = options.on_error == "raise"
                self.pending = [p for p in self.pending if not p.over() or (keep and p.unread)]
                self.pending.append(save)
                self._begun = save
            self._exit_wait_s = max(self._exit_wait_s, options.exit_wait_s)
            self.arenas = self.arenas or Arenas(options.host_nbytes)
            yield self.arenas

    def start_agents(self, group: Group, options: SaveOptions) -> None:
        """Start an agent for this rank, for `join_agents` or the first save.

        An error is dropped, since these start an agent again.  Only Ctrl-C is raised.
        """
        self._watch_exit()
        with suppress(ReknitError), self._saving.taken(options.timeout_s):
            self.supervisor.start_early(group, options)

    def join_agents(self, group: Group, options: SaveOptions) -> None:
        """Join the agents of all ranks before there is a save; all ranks call this after `start_agents`.

        An error is logged, since the first save starts agents again.
        """
        self._watch_exit()
        try:
            with self._saving.taken(options.timeout_s):
                self.supervisor.join_early(group, options)
        except ReknitError as error:
            if group.rank == 0:
                logger.warning("no agents before the first save, which tries again: %s", error)

    def _watch_exit(self) -> None:
        """Close at the end of the process."""
        if self._exit is None:  # once in each process: `multiprocessing` removes the entries of a parent
            self._exit = AtExit(self.at_exit)

    def wait_for(self, url: str, timeout_s: float, *, exclude: object) -> None:
        """Wait until no save to `url` is under way, except those of the agents `exclude`, in their order.

        If two saves commit at once, one may remove the files of the other.  Raises `DeadlineError`.
        """
        for pending in self.under_way(url):
            if pending.place is not None and pending.place[1] is not exclude:
                pending.wait_over(timeout_s)

    def under_way(self, url: str) -> list[SaveOutcome]:
        """Return the saves to `url` that agents have begun and not ended, including their promotions."""
        return [
            pending for pending in self._unfinished() if pending.place is not None and pending.place[0] == url
        ]

    def raise_unread_errors(self, exclude: SaveOutcome) -> None:
        """Raise the error of a save or promotion, except `exclude`, whose outcome nobody has requested."""
        with self._lock:
            failed = [pending for pending in self.pending if pending.unread and pending is not exclude]
        for pending in failed:
            pending.result()
            if pending.promotion is not None:
                pending.promotion.result()

    def wait_staged(self, timeout_s: float) -> None:
        """Wait until the states of all saves may change, except a save that this thread is inside of."""
        for pending in self._unfinished():
            if not (self._saving.mine and pending is self._begun):
                pending.wait_staged(timeout_s)

    def _unfinished(self) -> list[SaveOutcome]:
        """Return the saves that are under way, including their promotions."""
        with self._lock:
            return [pending for pending in self.pending if not pending.over()]

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for the saves under way, and end the agent; return whether all saves have ended.

        Waits up to `timeout_s`, None for the longest `exit_wait_s` of all saves.  A save that is staged by
        then is still written and committed.
        """
        deadline = Deadline(self._exit_wait_s if timeout_s is None else timeout_s)
        if not self._closing.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            return not self._unfinished()  # another thread waits for the agent
        try:
            pending = self._unfinished()
            for save in pending:
                with suppress(DeadlineError):
                    save.wait_over(deadline.remaining())
            self.supervisor.close(deadline, lambda: all(save.done() for save in pending))
            arenas, self.arenas = self.arenas, None
            if arenas is not None:
                arenas.close()
            at_exit, self._exit = self._exit, None
            if at_exit is not None:
                at_exit.cancel()
            self.when_closed()
        finally:
            self._closing.release()
        return all(save.over() for save in pending)

    def retire(self) -> None:
        """Close in a thread of its own, after the group is gone.  Else the end of the process closes this.

        The collector calls this in any line of any thread, under any lock.
        """
        if self._exit is not None:
            with suppress(ShortageError):
                start_thread("reknit-retires", self.close)

    def at_exit(self) -> None:
        """Wait for the saves under way when the interpreter ends, and log their fate."""
        if unfinished := len(self._unfinished()):
            text = "this process waits for %d saves under way, for up to %g s; Ctrl-C ends the wait"
            logger.info(text, unfinished, self._exit_wait_s)
        with suppress(KeyboardInterrupt):  # a user who stops the wait still reads the fate of the saves
            if self.close():
                return
        if self._in_process:
            lost = "this process ends before its saves are committed, and they are lost with it"
            logger.warning(lost)
            for save in self._unfinished():
                save.lose(AgentError(lost, remedy="wait for the result before the process ends"))
        else:
            logger.warning(
                "this process ends before its saves are committed, or promoted; its agent goes on with them"
            )


_all: weakref.WeakSet[Background] = weakref.WeakSet()


def _after_fork() -> None:
    for background in list(_all):
        background.after_fork()


os.register_at_fork(after_in_child=_after_fork)
