"""The outcome of a save: the handle that users hold, and the side that the engine writes to."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from reknit.engine.reports import PromotionReport, SaveReport, Shown, logged, ranks
from reknit.errors import AgentError, DeadlineError, ReknitError, SkippedError, UsageError
from reknit.events.phase import Deadline
from reknit.events.progress import amount
from reknit.keywords import checked_call
from reknit.locations import location_text
from reknit.types.entry import refuse_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.events.records import PhaseRecord
    from reknit.options import PromotionTarget


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
        self.is_read = False
        """Whether somebody has read the outcome; if not, the next save raises a failure."""
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
            self.is_read = True  # by no later save
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
        self.is_read = True
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


class SaveOutcome(Awaited[SaveReport]):
    """The engine's side of a save: its facts, and its outcome, which the engine sets here."""

    def __init__(
        self,
        path: str,
        step: int | None = None,
        *,
        logged: bool = True,
        promote_to: Sequence[PromotionTarget] = (),
    ) -> None:
        super().__init__(f"save to {path}")
        self.path = path
        self.step = step
        self.logged = logged
        self.place: tuple[str, object] | None = None
        """URL and writer: saves of one writer to one URL keep their order."""
        self.ranks = 1
        """How many ranks save together."""
        self.places = [str(location_text(target.path)) for target in promote_to]
        self.promotions = [Awaited[PromotionReport](f"promotion to {place}") for place in self.places]
        """Those to each place."""
        self.promotion: Awaited[PromotionReport] | None = None
        """All of them together."""
        self.promote_to = ", ".join(self.places)
        if promote_to:
            self.promotion = Awaited(f"promotion to {self.promote_to}")
        self._staged = threading.Event()

    def after_fork(self) -> None:
        """End in a forked child: this is a save of its parent."""
        error = AgentError(
            f"the save to {self.path} is one of process {os.getppid()}, from which this one was forked",
            remedy="ask for it there",
        )
        for awaited in (self, *self.promotions, self.promotion):
            if awaited is not None:
                awaited.disown(error)
        self._staged = threading.Event()
        self._staged.set()

    @property
    def unread(self) -> bool:
        """Whether it failed, and nobody has read the error."""
        if self.error is not None:
            return not self.is_read and not self.skipped
        promotion = self.promotion
        return promotion is not None and promotion.error is not None and not promotion.is_read

    def failure(self) -> tuple[str, BaseException | None]:
        """Return the part that has failed, with its error: the save, or its promotion."""
        if self.error is not None or self.promotion is None:
            return f"save to {self.path}", self.error
        return f"promotion of {self.path} to {self.promote_to}", self.promotion.error

    def note_staged(self) -> None:
        """Let `wait_staged` return: nothing more is copied from the state."""
        self._staged.set()

    def is_staged(self) -> bool:
        """Return whether the state may be changed again."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state may be changed again.  Raises `DeadlineError` after `timeout` seconds."""
        if not self._staged.wait(timeout):
            raise DeadlineError(f"the state was not staged within {timeout:g} s")

    def lose(self, error: ReknitError) -> None:
        """End with an error all that has not ended."""
        self.end(error)
        for number in range(len(self.promotions)):
            self.end_promotion(number, error)

    def _settle(self) -> None:
        """End the staging, and promotions of a save that failed."""
        if self.error is not None:
            for number in range(len(self.promotions)):
                self.end_promotion(number, self.error)
        self._staged.set()

    def end_promotion(
        self, number: int, outcome: PromotionReport | BaseException, log: Callable[[], object] | None = None
    ) -> None:
        """Set the outcome of a promotion; the last one ends them all.

        Their report is that of the last place, with all bytes, and their error the first that there is.
        """
        assert self.promotion is not None
        log = log if self.promotions[number].end(outcome) else None
        if not all(each.done() for each in self.promotions):
            write_line(log)  # nobody waits for one place alone
            return
        if error := next((each.error for each in self.promotions if each.error is not None), None):
            if not self.promotion.end(error, log):
                write_line(log)
            return
        reports = [each.report for each in self.promotions if each.report is not None]
        whole = replace(
            reports[-1],
            nbytes=sum(report.nbytes for report in reports),
            num_files=sum(report.num_files for report in reports),
            phases=tuple(phase for report in reports for phase in report.phases),
        )
        self.promotion.end(whole)

    def over(self) -> bool:
        """Return whether the save has ended, and its promotion, if it has one."""
        return self.done() and (self.promotion is None or self.promotion.done())

    def wait_over(self, timeout: float | None = None) -> None:
        """Wait until the save and its promotion have ended.  Raises `DeadlineError` after `timeout` s."""
        deadline = None if timeout is None else Deadline(timeout)
        self.wait(timeout)
        if self.promotion is not None:
            self.promotion.wait(None if deadline is None else deadline.remaining())

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped, as `SaveOptions.when_busy` asks for."""
        return isinstance(self.error, SkippedError)

    def summary(self, seconds: float) -> str:
        """Return the line that the log has of this save, which went well and took so long."""
        assert self.report is not None
        by = f"by {ranks(self.ranks)}"
        return logged(
            "saved", self.report.path, self.report.step, self.report.total_nbytes, by, seconds=seconds
        )


@checked_call
class PendingSave(Shown):
    """A save that is under way or has ended, as `reknit.save` returns it."""

    def __init__(self, outcome: SaveOutcome) -> None:
        """Use `reknit.save`."""
        self._outcome = outcome

    @property
    def path(self) -> str:
        """Where the checkpoint is saved."""
        return self._outcome.path

    @property
    def step(self) -> int | None:
        """The training step that the caller gave."""
        return self._outcome.step

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state may be changed again, also because the save has failed.

        Raises `DeadlineError` after `timeout` seconds.
        """
        self._refuse_inside("staged")
        self._outcome.wait_staged(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save has ended, well or not.  Raises `DeadlineError` after `timeout` seconds."""
        self._refuse_inside("wait")
        self._outcome.wait(timeout)

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._outcome.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Return the report once the checkpoint is committed, or raise the error of the save.

        Raises `DeadlineError` if it has not ended after `timeout` seconds; the save itself goes on.
        """
        self._refuse_inside("result")
        return self._outcome.result(timeout)

    def wait_promoted(self, timeout: float | None = None) -> None:
        """Wait until the save and its promotion, if it has one, have ended, well or not.

        Raises `DeadlineError` after `timeout` seconds.
        """
        self._refuse_inside("wait_promoted")
        self._outcome.wait_over(timeout)

    def promotion_done(self, place: int | None = None) -> bool:
        """Return whether the save and its promotion, if it has one, have ended, well or not.

        Of several places, `place` is the number of one, from 0 on; by default it is about all.
        """
        return self._outcome.over() if place is None else self._outcome.promotions[place].done()

    def promoted(self, timeout: float | None = None) -> PromotionReport:
        """Return the report once the checkpoint is at `SaveOptions.promote_to` too, or raise the error.

        Where that names several places, the report is that of the last, with the bytes of all.

        Raises `DeadlineError` if that has not ended after `timeout` seconds; it goes on.
        """
        outcome = self._outcome
        if outcome.promotion is None:
            raise UsageError(f"the save to {self.path} was not asked to promote the checkpoint")
        self._refuse_inside("promoted")
        outcome.promotion.wait(timeout)
        if outcome.error is not None:
            outcome.is_read = True  # the error that is raised now is that of the save
        return outcome.promotion.result()

    def _refuse_inside(self, wait: str) -> None:
        """Raise `UsageError` in a signal handler that would wait for the call that it interrupts."""
        if not self._outcome.over():
            refuse_inside(f"PendingSave.{wait}")

    @property
    def error(self) -> BaseException | None:
        """The error of the save, None while it is under way and when it ended well."""
        return self._outcome.error

    @property
    def promotion_error(self) -> BaseException | None:
        """The error of the promotion, None while it is under way, when it ended well, and without one."""
        return None if self._outcome.promotion is None else self._outcome.promotion.error

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped, as `SaveOptions.when_busy` asks for."""
        return self._outcome.skipped

    @property
    def phases(self) -> tuple[PhaseRecord, ...]:
        """The phases of this rank, once the save has ended well."""
        return () if self._outcome.report is None else self._outcome.report.phases

    def _facts(self) -> dict[str, object]:
        outcome, now, promoted = self._outcome, "staging", None
        if outcome.skipped:
            now = "skipped"
        elif outcome.error is not None:
            why = str(outcome.error).partition("\n")[0]
            now = f"failed: {type(outcome.error).__name__}: {why}"
        elif outcome.report is not None:
            now = f"committed, {amount(outcome.report.total_nbytes)}"
        elif outcome.is_staged():
            now = "staged, being written"
        if (promotion := outcome.promotion) is not None:
            ended = "failed" if promotion.error else "done" if promotion.done() else "not yet"
            promoted = f"{outcome.promote_to} ({ended})"
        return {"path": self.path, "step": self.step, "now": now, "promoted to": promoted}
