"""What deserves an alert?  Rules, as frozen values, over what one process or all ranks recorded."""

from __future__ import annotations

import os
import shutil
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from reknit.errors import UsageError
from reknit.monitor.records import PhaseRecord, StorageRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reknit.monitor.records import Record


class Alert(NamedTuple):
    """Something that deserves attention; those of one rule and `subject` are told once, with their number."""

    rule: str
    subject: str
    text: str
    rank: int | None = None
    step: int | None = None


class Watch(Protocol):
    """A rule at work, with what it remembers."""

    def see(self, record: Record) -> Iterable[Alert]:
        """Look at one record."""

    def tick(self, now_s: float) -> Iterable[Alert]:
        """Look at the clock, in seconds since the epoch."""


@runtime_checkable
class AlertRule(Protocol):
    """What deserves an alert."""

    def watch(self) -> Watch:
        """Return the rule at work, without memory."""


class Unmoved:
    """A watch that looks at records only; the base of those below."""

    def __init__(self, look: Callable[[Record], Iterable[Alert]]) -> None:
        self._look = look

    def see(self, record: Record) -> Iterable[Alert]:
        """Look at one record."""
        return self._look(record)

    def tick(self, now_s: float) -> Iterable[Alert]:
        """Nothing changes with time."""
        return ()


def _positive(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UsageError(f"{name} is a number above 0, not {value!r}")


def _on(record: PhaseRecord | StorageRecord) -> str:
    """Say where a record is from."""
    place = "".join(f", {axis} {number}" for axis, number in getattr(record, "coordinate", {}).items())
    return f"rank {record.rank}{place} on {record.host}"


def _ended_save(record: PhaseRecord) -> bool:
    """Tell whether a record is of a save as a whole."""
    return record.action == record.phase == "save"


@dataclass(frozen=True, slots=True)
class Failures:
    """A save, load or other action failed, or an own phase did."""

    def watch(self) -> Watch:
        """Return the rule at work."""
        return Unmoved(self._look)

    def _look(self, record: Record) -> Iterator[Alert]:
        if isinstance(record, PhaseRecord) and record.outcome != "ok":
            what = f"{record.action} {record.path}".strip()
            text = f"{what} failed in {record.phase} on {_on(record)}: {record.outcome}"
            text += f" -> {record.detail}" if record.detail else ""
            yield Alert("failures", f"{record.action} {record.outcome}", text, record.rank, record.step)


@dataclass(frozen=True, slots=True)
class Retries:
    """Operations of a store were repeated at least `number` times within `within_s`."""

    number: int = 20
    within_s: float = 300.0

    def __post_init__(self) -> None:
        _positive(number=self.number, within_s=self.within_s)

    def watch(self) -> Watch:
        """Return the rule at work."""
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
                text = (
                    f"{record.store}: {total} retries within {self.within_s:g} s, the last by {_on(record)}"
                )
                yield Alert("retries", record.store, text, record.rank, record.step)

        return Unmoved(look)


@dataclass(frozen=True, slots=True)
class SlowWrite:
    """A rank wrote, over a whole phase, less than `mib_per_s`; phases of less than `least_s` do not count."""

    mib_per_s: float = 50.0
    least_s: float = 5.0

    def __post_init__(self) -> None:
        _positive(mib_per_s=self.mib_per_s, least_s=self.least_s)

    def watch(self) -> Watch:
        """Return the rule at work."""
        return Unmoved(self._look)

    def _look(self, record: Record) -> Iterator[Alert]:
        if not isinstance(record, PhaseRecord) or record.phase != "write" or record.outcome != "ok":
            return
        elapsed_s = record.ended - record.started  # `seconds` adds up threads
        if elapsed_s >= self.least_s and record.nbytes < self.mib_per_s * 2**20 * elapsed_s:
            speed = record.nbytes / 2**20 / elapsed_s
            text = f"{_on(record)} wrote to {record.path} at {speed:.3g} MiB/s"
            yield Alert("slow write", record.host, text, record.rank, record.step)


@dataclass(frozen=True, slots=True)
class Stragglers:
    """A rank was busy in a phase `ratio` times as long as the median of all ranks, and `least_s` longer.

    This needs the events of all ranks: give `folder` to `Alerts`.
    """

    ratio: float = 2.0
    least_s: float = 5.0

    def __post_init__(self) -> None:
        _positive(ratio=self.ratio, least_s=self.least_s)

    def watch(self) -> Watch:
        """Return the rule at work."""
        return _StragglerWatch(self)


_KEPT = 8  # saves and loads, of all ranks
_FEWEST = 4  # ranks; of fewer the median says little
_WAITS = ("assign", "commit", "agree", "locate", "save", "load", "prepare", "open", "wait", "back_pressure")
"""Phases in which ranks wait for each other: one that is slow makes all of them slow."""


class _StragglerWatch:
    def __init__(self, rule: Stragglers) -> None:
        self._rule = rule
        self._busy: dict[tuple[str, str, int | None], dict[str, dict[int, PhaseRecord]]] = {}
        self._told: dict[tuple[str, str, int | None], set[tuple[str, int]]] = {}

    def see(self, record: Record) -> Iterator[Alert]:
        if not isinstance(record, PhaseRecord) or record.phase in (*_WAITS, record.action):
            return
        key = (record.action, record.path, record.step)
        lane = record.phase if record.process == "trainer" else f"{record.phase} ({record.process})"
        ranks = self._busy.setdefault(key, {}).setdefault(lane, {})
        ranks[record.rank] = max(ranks.get(record.rank, record), record, key=_busy_s)
        while len(self._busy) > _KEPT:
            oldest = next(iter(self._busy))
            del self._busy[oldest]
            self._told.pop(oldest, None)
        if len(ranks) >= _FEWEST and len(ranks) & (len(ranks) - 1) == 0:
            yield from self._compare(key)

    def tick(self, now_s: float) -> Iterator[Alert]:
        for key in list(self._busy):
            yield from self._compare(key)

    def _compare(self, key: tuple[str, str, int | None]) -> Iterator[Alert]:
        told = self._told.setdefault(key, set())
        for lane, ranks in self._busy[key].items():
            if len(ranks) < _FEWEST:
                continue
            middle = median(map(_busy_s, ranks.values()))
            bound = max(self._rule.ratio * middle, middle + self._rule.least_s)
            for rank, record in ranks.items():
                if _busy_s(record) > bound and (lane, rank) not in told:
                    told.add((lane, rank))
                    text = (
                        f"{_on(record)} took {_busy_s(record):.3g} s for {lane} of {record.action} "
                        f"{record.path}, the median rank {middle:.3g} s"
                    )
                    yield Alert("stragglers", lane, text, rank, record.step)


def _busy_s(record: PhaseRecord) -> float:
    return min(record.seconds, record.ended - record.started)


@dataclass(frozen=True, slots=True)
class LongSave:
    """A save took longer than `share` of the time between the ends of the last two saves.

    With `longest_s` also one that took longer than that.  Saves of less than `least_s` do not count.
    """

    share: float = 1.0
    longest_s: float | None = None
    least_s: float = 5.0

    def __post_init__(self) -> None:
        _positive(
            share=self.share,
            least_s=self.least_s,
            **({} if self.longest_s is None else {"longest_s": self.longest_s}),
        )

    def watch(self) -> Watch:
        """Return the rule at work."""
        begun: dict[int, float] = {}

        def look(record: Record) -> Iterator[Alert]:
            if not isinstance(record, PhaseRecord) or not _ended_save(record):
                return
            before, begun[record.rank] = begun.get(record.rank), record.started
            if record.rank != 0 or record.outcome != "ok":
                return  # all ranks' saves end together
            interval_s = float("inf") if before is None else record.started - before
            bound = min(self.longest_s or float("inf"), self.share * interval_s)
            if record.seconds > max(bound, self.least_s):
                text = (
                    f"the save to {record.path} took {record.seconds:.3g} s; saves begin every {bound:.3g} s"
                )
                if bound == self.longest_s:
                    text = f"the save to {record.path} took {record.seconds:.3g} s, more than {bound:.3g} s"
                yield Alert("long save", "save", text, record.rank, record.step)

        return Unmoved(look)


@dataclass(frozen=True, slots=True)
class StorageFull:
    """A store said that it is full, or the file system that is saved to has less than `free_share` free."""

    free_share: float = 0.1

    def __post_init__(self) -> None:
        _positive(free_share=self.free_share)
        if not self.free_share < 1:
            raise UsageError(f"free_share is less than 1, not {self.free_share!r}")

    def watch(self) -> Watch:
        """Return the rule at work."""
        return _FullWatch(self)


class _FullWatch:
    def __init__(self, rule: StorageFull) -> None:
        self._rule = rule
        self._folder: str | None = None
        self._told = False

    def see(self, record: Record) -> Iterator[Alert]:
        if not isinstance(record, StorageRecord):
            return
        if record.outcome == "StorageFullError":
            text = f"{record.store} is full, says {_on(record)}: {record.path}"
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
            return  # it went meanwhile
        before, self._told = self._told, free < self._rule.free_share * total
        if self._told and not before:
            text = f"{folder} has {free / 2**30:.3g} of {total / 2**30:.3g} GiB free"
            yield Alert("storage full", "file", text)


@dataclass(frozen=True, slots=True)
class NoCommit:
    """No save has ended well for `within_s`, counted from the first event or the last good end."""

    within_s: float

    def __post_init__(self) -> None:
        _positive(within_s=self.within_s)

    def watch(self) -> Watch:
        """Return the rule at work."""
        return _CommitWatch(self)


class _CommitWatch:
    def __init__(self, rule: NoCommit) -> None:
        self._rule = rule
        self._since: float | None = None
        self._last = "no save has ended well yet"
        self._told = False

    def see(self, record: Record) -> Iterator[Alert]:
        if self._since is None:
            self._since = record.started
        if isinstance(record, PhaseRecord) and _ended_save(record) and record.outcome == "ok":
            self._since = max(self._since, record.ended)
            self._last = f"the last was {record.path}"
            self._told = False
        return iter(())

    def tick(self, now_s: float) -> Iterator[Alert]:
        if self._since is not None and now_s - self._since > self._rule.within_s and not self._told:
            self._told = True
            text = f"nothing was committed for {now_s - self._since:.0f} s; {self._last}"
            yield Alert("no commit", "commit", text)


_USUAL = (Failures(), Retries(), SlowWrite(), Stragglers(), LongSave(), StorageFull())
DEFAULTS: tuple[AlertRule, ...] = _USUAL
"""What most jobs want to hear of."""
