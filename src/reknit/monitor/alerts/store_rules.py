"""When does a store need an alert?  After retries or slow writes, when it is full, or steps do not move."""

from __future__ import annotations

import os
import shutil
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.keywords import checked_call
from reknit.monitor.alerts.alert_rule import Alert, RecordWatch, Watch, check_positive, source_text
from reknit.monitor.progress_text import amount
from reknit.monitor.records import PhaseRecord, StorageRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.monitor.records import Record


@checked_call
@dataclass(frozen=True, slots=True)
class Retries:
    """Operations of a store were repeated at least `number` times within `within_s`."""

    number: int = 20
    within_s: float = 300.0

    def __post_init__(self) -> None:
        check_positive(number=self.number, within_s=self.within_s)

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        seen: dict[str, deque[tuple[float, int]]] = {}

        def look(record: Record) -> Iterator[Alert]:
            if not isinstance(record, StorageRecord) or not record.retries:
                return
            recent = seen.setdefault(record.store, deque(maxlen=self.number))
            recent.append((record.started, record.retries))
            while recent[0][0] < record.started - self.within_s:
                recent.popleft()
            total = sum(retries for _, retries in recent)
            if total >= self.number:
                recent.clear()
                last = f"the last by {source_text(record)}"
                text = f"{record.store}: {total} retries within {self.within_s:g} s, {last}"
                yield Alert("retries", record.store, text, record.rank, record.step)

        return RecordWatch(look)


@checked_call
@dataclass(frozen=True, slots=True)
class SlowWrite:
    """A rank wrote less than `mib_per_s` over a whole phase; phases of less than `least_s` do not count."""

    mib_per_s: float = 50.0
    least_s: float = 5.0

    def __post_init__(self) -> None:
        check_positive(mib_per_s=self.mib_per_s, least_s=self.least_s)

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        return RecordWatch(self._look)

    def _look(self, record: Record) -> Iterator[Alert]:
        if not isinstance(record, PhaseRecord) or record.phase != "write" or record.outcome != "ok":
            return
        elapsed_s = record.elapsed_s  # `seconds` adds up threads
        if elapsed_s >= self.least_s and record.nbytes < self.mib_per_s * 2**20 * elapsed_s:
            speed = record.nbytes / 2**20 / elapsed_s
            text = f"{source_text(record)} wrote to {record.path} at {speed:.3g} MiB/s"
            yield Alert("slow write", record.host, text, record.rank, record.step)


@checked_call
@dataclass(frozen=True, slots=True)
class StorageFull:
    """A store is full, or the local file system of a save has less than `free_share` free."""

    free_share: float = 0.1

    def __post_init__(self) -> None:
        check_positive(free_share=self.free_share)
        if not self.free_share < 1:
            raise UsageError(f"free_share is less than 1, not {self.free_share!r}")

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        return _FullWatch(self)


class _FullWatch:
    def __init__(self, rule: StorageFull) -> None:
        self._rule = rule
        self._folder: str | None = None
        self._alerted = False

    def see(self, record: Record) -> Iterator[Alert]:
        if not isinstance(record, StorageRecord):
            return
        if record.outcome == "StorageFullError":
            text = f"{record.store} is full, says {source_text(record)}: {record.path}"
            yield Alert("storage full", record.store, text, record.rank, record.step)
        if record.store == "file" and record.action == "save":
            self._folder = record.path

    def tick(self, now_s: float) -> Iterator[Alert]:
        folder = self._folder
        while folder and not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        if not folder:
            return
        try:
            total, _, free = shutil.disk_usage(folder)
        except OSError:
            return  # the folder is gone
        before, self._alerted = self._alerted, free < self._rule.free_share * total
        if self._alerted and not before:
            text = f"{folder} has {amount(free)} of {amount(total)} free"
            yield Alert("storage full", "file", text)


@checked_call
@dataclass(frozen=True, slots=True)
class CoolingBehind:
    """Old steps move to the cold store more slowly than they become old.

    At least `steps` wait for it, or one has waited for `within_s`.  The alert comes once until none waits.
    """

    steps: int = 3
    within_s: float = 6 * 3600.0

    def __post_init__(self) -> None:
        check_positive(steps=self.steps, within_s=self.within_s)

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        return _CoolingWatch(self)


class _CoolingWatch:
    def __init__(self, rule: CoolingBehind) -> None:
        self._rule = rule
        self._waiting: dict[str, float] = {}
        self._alerted = False

    def see(self, record: Record) -> Iterator[Alert]:
        if isinstance(record, PhaseRecord) and record.phase == record.action and record.outcome == "ok":
            if record.action == "cool_due":
                self._waiting[record.path] = record.started
            elif record.action in ("cool", "remove", "save"):  # a save may have replaced it
                self._waiting.pop(record.path, None)
                self._alerted = self._alerted and bool(self._waiting)
        return iter(())

    def tick(self, now_s: float) -> Iterator[Alert]:
        if not self._waiting or self._alerted:
            return
        path, since = min(self._waiting.items(), key=lambda each: each[1])
        if len(self._waiting) >= self._rule.steps or now_s - since > self._rule.within_s:
            self._alerted = True
            text = (
                f"{len(self._waiting)} steps wait to move to the cold store, {path} for {now_s - since:.0f} s"
            )
            yield Alert("cool-down behind", "cooling", text)
