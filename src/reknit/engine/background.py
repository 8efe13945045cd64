"""Saves of one group that go on in the background: staged here, written and committed by agents."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine.arenas import Arenas
from reknit.engine.crew import Crew
from reknit.engine.report import PendingSave
from reknit.engine.send_off import send_off
from reknit.errors import DeadlineError, ReknitError
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.base import Group
    from reknit.engine.send_off import SendOff
    from reknit.options import SaveOptions

logger = logging.getLogger("reknit")


class Background:
    """The background saves of this rank in one group.

    Nothing is started before the first save.  With `in_process` the agents are threads of the trainers, for
    stores that no other process can open.
    """

    def __init__(self, *, in_process: bool) -> None:
        self._in_process = in_process
        self._exit_wait_s = 0.0
        self.begin_anew()
        atexit.register(self._at_exit)
        _all.add(self)

    def begin_anew(self) -> None:
        """Start without saves, agent and arenas, as a forked process has to: what it sees is its parent's.

        The arenas are not closed, which would empty them for the parent, too.
        """
        self._crew: Crew | None = None
        self._arenas: Arenas | None = None
        self._pending: list[PendingSave] = []
        self._lock = threading.Lock()

    def save(
        self, group: Group, prepare: Callable[[], SendOff], path: str, options: SaveOptions
    ) -> PendingSave:
        """Stage what `prepare` gives, and leave the rest to the agent.

        What goes wrong is told by the `PendingSave`, on every rank; only what is no `Exception` is raised.
        """
        pending = PendingSave(path)
        with self._lock:
            self._pending = [p for p in self._pending if not p.done() or _unasked(p)]
            self._pending.append(pending)
        self._exit_wait_s = max(self._exit_wait_s, options.exit_wait_s)
        try:
            crew = self._formed(group, options)
        except ReknitError as error:
            logger.error("save to %s failed: %s", path, error)
            pending.end(error)
            return pending
        handover = crew.handover(pending)
        try:
            job = prepare()
            if self._arenas is None:
                self._arenas = Arenas(options.host_nbytes)
            send_off(job, crew, handover, self._arenas)
        except BaseException as error:  # whatever it is, the other ranks must hear of it
            handover.abandon(error, options.timeout_s)
            if not isinstance(error, Exception):
                pending.asked = True  # raised here, and not once more by the next save
                raise
        return pending

    def surface(self, but: PendingSave) -> None:
        """Raise the error of a save, `but` excepted, that nobody has asked for the result of."""
        with self._lock:
            failed = [pending for pending in self._pending if _unasked(pending) and pending is not but]
        for pending in failed:
            pending.result()

    def under_way(self) -> list[PendingSave]:
        """Return the saves that have not ended."""
        with self._lock:
            return [pending for pending in self._pending if not pending.done()]

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for what is under way, and let the agent end; tell whether all has ended.

        Waits up to `timeout_s`, None for the longest `exit_wait_s` of all saves.  What is staged by then is
        written and committed all the same.
        """
        deadline = Deadline(self._exit_wait_s if timeout_s is None else timeout_s)
        pending = self.under_way()
        for save in pending:
            with suppress(DeadlineError):
                save.wait(deadline.remaining())
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.link.quit()
            if all(save.done() for save in pending):
                crew.link.ended(deadline.remaining())
        if self._arenas is not None:
            self._arenas.close()
            self._arenas = None
        atexit.unregister(self._at_exit)
        return all(save.done() for save in pending)

    def retire(self) -> None:
        """Close, as the group is gone; what is still under way is waited for when the interpreter ends."""
        if not self.under_way():
            self.close(0.0)

    def _at_exit(self) -> None:
        if self.close():
            return
        if self._in_process:
            logger.warning("this process ends before its saves are committed, and they are lost with it")
        else:
            logger.warning("this process ends before its saves are committed; its agent goes on with them")

    def _formed(self, group: Group, options: SaveOptions) -> Crew:
        """Return the agents of the group, started by all ranks together where there are none that work."""
        if self._crew is not None and self._crew.link.broken:
            self._crew.link.quit()
            self._crew = None
        if self._crew is None:
            self._crew = Crew.form(group, options, in_process=self._in_process)
        return self._crew


def _unasked(pending: PendingSave) -> bool:
    """Tell whether a save failed and nobody has been told."""
    return pending.error is not None and not pending.asked and not pending.skipped


_all: weakref.WeakSet[Background] = weakref.WeakSet()


def _after_fork() -> None:
    for background in list(_all):
        background.begin_anew()


os.register_at_fork(after_in_child=_after_fork)
