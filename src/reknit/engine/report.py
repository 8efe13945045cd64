"""What a save or a load did, as told to the user."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reknit.engine.display import Shown, logged, ranks, some
from reknit.errors import DeadlineError, SkippedError, UsageError
from reknit.monitor.phase import Deadline
from reknit.monitor.progress_text import amount

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from reknit.monitor.phase import PhaseRecord


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport(Shown):
    """A committed checkpoint.

    `nbytes` and `num_files` are what this rank wrote, `total_nbytes` what all ranks did.  `warnings` say what
    was stored but looks wrong, such as copies that differ between ranks.  `phases` are this rank's.
    """

    path: str
    step: int | None
    write_id: str
    nbytes: int
    num_files: int
    total_nbytes: int
    warnings: tuple[str, ...]
    phases: tuple[PhaseRecord, ...]
    blocked_s: float
    waited_s: float = 0.0
    streamed: bool = False

    def _facts(self) -> dict[str, object]:
        return {
            "path": self.path,
            "step": self.step,
            "size": amount(self.total_nbytes),
            "of this rank": f"{amount(self.nbytes)} in {self.num_files} files",
            "blocked": f"{self.blocked_s:.3g} s",
            "warnings": some(self.warnings),
        }


@dataclass(frozen=True, slots=True, repr=False)
class PromotionReport(Shown):
    """A committed checkpoint that is now at `path` too.

    `nbytes` and `num_files` are what this rank copied from `source`; `phases` are its own.
    """

    path: str
    source: str
    step: int | None
    write_id: str
    nbytes: int
    num_files: int
    phases: tuple[PhaseRecord, ...]

    def _facts(self) -> dict[str, object]:
        copied = f"{amount(self.nbytes)} in {self.num_files} files"
        return {"path": self.path, "source": self.source, "step": self.step, "copied": copied}


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport(Shown):
    """What a rank restored, and everything that it did not restore exactly.

    Names are `item/fqn`.  `restored`: tensors and values filled on this rank.  `missing`: wanted but not in
    the checkpoint; `unexpected`: in a loaded item of the checkpoint but wanted by no rank; `mismatched`:
    could not be taken as a whole (with the reason, and what was taken of a tensor of another shape).  These
    three are empty unless options of the load allow it.  `left`: items of the checkpoint that no rank asked
    for.  `cast`: converted to another dtype.  `resharded`: read from other boxes than this rank wanted.
    `notes`: left as it was by design, with the reason, such as a random state after a change of world size.
    `nbytes_wanted` are the bytes of the boxes that this rank
    wanted, `nbytes_read` those that it read from storage, for other ranks too, and `nbytes_received` those of
    the ranges that other ranks read for it.
    """

    path: str
    step: int | None
    metadata: Mapping[str, Any]
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, str]
    left: tuple[str, ...]
    cast: tuple[str, ...]
    resharded: tuple[str, ...]
    notes: Mapping[str, str]
    nbytes_wanted: int
    nbytes_read: int
    nbytes_received: int
    phases: tuple[PhaseRecord, ...]

    def _facts(self) -> dict[str, object]:
        lists = ("missing", "unexpected", "mismatched", "cast", "resharded", "notes")
        return {
            "path": self.path,
            "step": self.step,
            "restored": f"{len(self.restored)} tensors and values, {amount(self.nbytes_wanted)}",
            **{name: some(getattr(self, name)) for name in lists},
        }


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """What `reknit.verify` found: `problems` name file and place, and are empty for a sound checkpoint."""

    path: str
    level: str
    num_files: int
    nbytes_checked: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Tell whether the checkpoint is sound."""
        return not self.problems

    def _facts(self) -> dict[str, object]:
        return {
            "path": self.path,
            "level": self.level,
            "ok": self.ok,
            "files": self.num_files,
            "problems": some(self.problems),
        }


class PendingPromotion:
    """A promotion under way, or one that has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.asked = False
        """Whether somebody has asked for the outcome; if not, a failure is raised by the next save."""
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._outcome: PromotionReport | BaseException | None = None

    def end(self, outcome: PromotionReport | BaseException) -> None:
        """End it, unless it has ended."""
        with self._ending:
            if not self._ended.is_set():
                self._outcome = outcome
                self._ended.set()

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What made it fail, None while it is under way and when it ended well."""
        return self._outcome if isinstance(self._outcome, BaseException) else None

    def wait(self, timeout: float | None = None) -> None:
        """Return when it has ended, well or not.  Raises `DeadlineError` after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise DeadlineError(f"the promotion to {self.path} has not ended within {timeout:g} s")

    def result(self, timeout: float | None = None) -> PromotionReport:
        """Return the report, or raise what made it fail.  Raises `DeadlineError` after `timeout` seconds."""
        self.wait(timeout)
        self.asked = True
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class PendingSave(Shown):
    """A save under way, or one that has ended."""

    def __init__(
        self,
        path: str,
        step: int | None = None,
        *,
        logged: bool = True,
        promote_to: str | PathLike[str] | None = None,
    ) -> None:
        """Use `reknit.save`."""
        self.logged = logged
        """Whether a failure is written to the log, too, as nobody may ask for it."""
        self.path = path
        self.step = step
        self.place: tuple[str, object] | None = None
        """URL, and who writes there: saves of one writer to one place keep their order."""
        self.asked = False
        """Whether `result` was called; if not, a failure is raised by the next save."""
        self._staged = threading.Event()
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self.ranks = 1
        """How many save together."""
        self.promotion = None if promote_to is None else PendingPromotion(os.fspath(promote_to))
        """What `SaveOptions.promote_to` asks for, None where it asks for nothing."""

    def _facts(self) -> dict[str, object]:
        standing = "staging"
        if self.skipped:
            standing = "skipped"
        elif self._error is not None:
            why = str(self._error).partition("\n")[0]
            standing = f"failed: {type(self._error).__name__}: {why}"
        elif self._report is not None:
            standing = f"committed, {amount(self._report.total_nbytes)}"
        elif self._staged.is_set():
            standing = "staged, being written"
        return {"path": self.path, "step": self.step, "now": standing, "promoted to": self._promoted_to()}

    def told(self, seconds: float) -> str:
        """Return the line that the log has of this save, which went well and took so long."""
        assert self._report is not None
        by, nbytes = f"by {ranks(self.ranks)}", self._report.total_nbytes
        return logged("saved", self._report.path, self._report.step, nbytes, by, seconds)

    def _promoted_to(self) -> str | None:
        if self.promotion is None:
            return None
        ended = "failed" if self.promotion.error else "done" if self.promotion.done() else "not yet"
        return f"{self.promotion.path} ({ended})"

    def staged(self, timeout: float | None = None) -> None:
        """Return when the state may be changed again, also when the save has failed by then.

        Raises `DeadlineError` after `timeout` seconds.
        """
        if not self._staged.wait(timeout):
            raise DeadlineError(f"the state was not staged within {timeout:g} s")

    def done(self) -> bool:
        """Tell whether the save has ended, well or not."""
        return self._ended.is_set()

    def over(self) -> bool:
        """Tell whether the promotion has ended too, if there is to be one."""
        return self.done() and (self.promotion is None or self.promotion.done())

    def wait_over(self, timeout: float | None = None) -> None:
        """Return when the save and its promotion have ended, well or not.

        Raises `DeadlineError` where one of them has not after `timeout` seconds.
        """
        deadline = None if timeout is None else Deadline(timeout)
        self.wait(timeout)
        if self.promotion is not None:
            self.promotion.wait(None if deadline is None else deadline.remaining())

    def result(self, timeout: float | None = None) -> SaveReport:
        """Return the report once the checkpoint is committed, or raise what made it fail.

        Raises `DeadlineError` when it has not ended after `timeout` seconds; the save itself goes on.
        """
        self.wait(timeout)
        self.asked = True
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def promoted(self, timeout: float | None = None) -> PromotionReport:
        """Return the report once the checkpoint is at `SaveOptions.promote_to` too, or raise what went wrong.

        Raises `DeadlineError` when that has not ended after `timeout` seconds; it goes on.
        """
        if self.promotion is None:
            raise UsageError(f"the save to {self.path} was not asked to promote the checkpoint")
        self.promotion.wait(timeout)
        if self._error is not None:
            self.asked = True  # what is raised now is the failure of the save
        return self.promotion.result()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the save has ended, well or not.  Raises `DeadlineError` after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise DeadlineError(f"the save to {self.path} has not ended within {timeout:g} s")

    @property
    def error(self) -> BaseException | None:
        """What made the save fail, None while it is under way and when it ended well."""
        return self._error

    @property
    def skipped(self) -> bool:
        """Whether the save was skipped, as `SaveOptions.when_busy` asks for."""
        return isinstance(self._error, SkippedError)

    @property
    def phases(self) -> tuple[PhaseRecord, ...]:
        """The phases of this rank, once the save has ended well."""
        return () if self._report is None else self._report.phases

    def note_staged(self) -> None:
        """Let `staged` return."""
        self._staged.set()

    def end(self, outcome: SaveReport | BaseException) -> bool:
        """End the save, and tell whether it had not ended before."""
        with self._ending:
            if self._ended.is_set():
                return False
            if isinstance(outcome, SaveReport):
                self._report = outcome
            else:
                self._error = outcome
                if self.promotion is not None:
                    self.promotion.end(outcome)
            self._staged.set()
            self._ended.set()
            return True
