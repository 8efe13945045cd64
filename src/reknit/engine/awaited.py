"""An outcome that threads wait for, which is in the log before they continue."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from reknit.engine.call_reports import PromotionReport, SaveReport
from reknit.errors import DeadlineError, ReknitError

if TYPE_CHECKING:
    from collections.abc import Callable

_Report = TypeVar("_Report", SaveReport, PromotionReport)

LOG_S = 1.0
"""Longest wait for the line of an outcome in the log: its handler may need a lock of the waiting thread."""


def write_line(log: Callable[[], object] | None) -> None:
    """Write a line of the log.

    An error of a handler is printed where `logging` prints errors, since the thread that writes has more to
    do.
    """
    try:
        if log is not None:
            log()
    except Exception:
        if logging.raiseExceptions and sys.stderr:
            with suppress(Exception):  # of a stream that is closed
                traceback.print_exc()


class Awaited(Generic[_Report]):
    """A report or an error, set once by the engine and waited for by anyone."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.logged = True
        """Whether its end is also logged, because nobody may ask for it."""
        self.asked = False
        """Whether somebody asked for the outcome; if not, the next save raises a failure."""
        self.report: _Report | None = None
        self.error: BaseException | None = None
        self._ended, self._log_written = threading.Event(), threading.Event()
        self._ending = threading.Lock()

    def end(self, outcome: _Report | BaseException, log: Callable[[], object] | None = None) -> bool:
        """Set the outcome, and return whether there was none before; only then `log` is called.

        Threads that wait for the outcome continue after `log`, since the process may end at once after them.
        """
        log = log if self.logged else None
        if not self._set(outcome, log):
            return False
        self._settle()
        try:
            write_line(log)
        finally:
            self._log_written.set()
        return True

    def _settle(self) -> None:
        """End all parts that depend on the outcome, which is set."""

    def _set(self, outcome: _Report | BaseException, log: Callable[[], object] | None) -> bool:
        with self._ending:
            if self._ended.is_set():
                return False
            if isinstance(outcome, BaseException):
                self.error = outcome
            else:
                self.report = outcome
            if log is None:
                self._log_written.set()
            self._ended.set()
            return True

    def disown(self, error: ReknitError) -> None:
        """End in a forked child with `error`, unless it had ended: there nobody else ends it.

        A thread that the child does not have may have held the locks.
        """
        ended = self._ended.is_set()
        self._ended, self._log_written, self._ending = threading.Event(), threading.Event(), threading.Lock()
        self._log_written.set()
        if ended:
            self._ended.set()
        else:
            self.asked = True  # by no later save
            self._set(error, None)

    def done(self) -> bool:
        """Return whether there is an outcome, good or bad."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the outcome.  Raises `DeadlineError` after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise DeadlineError(f"the {self._what} has not ended within {timeout:g} s")
        self._log_written.wait(LOG_S)

    def result(self, timeout: float | None = None) -> _Report:
        """Return the report or raise the error.  Raises `DeadlineError` after `timeout` seconds."""
        self.wait(timeout)
        self.asked = True
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report
