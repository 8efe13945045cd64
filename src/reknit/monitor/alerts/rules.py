"""What deserves an alert?  Rules, as frozen values, over what one process or all ranks recorded."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from reknit.keywords import checked_call
from reknit.monitor.alerts.base import Alert, AlertRule, Unmoved, Watch, positive, source
from reknit.monitor.alerts.stores import CoolingBehind, Retries, SlowWrite, StorageFull
from reknit.monitor.records import PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.monitor.records import Record


def _ended_save(record: PhaseRecord) -> bool:
    """Tell whether a record is of a save as a whole."""
    return record.action == record.phase == "save"


@checked_call
@dataclass(frozen=True, slots=True)
class Failures:
    """A save, load or other action failed, or an own phase did."""

    def watch(self) -> Watch:
        """Return the rule at work."""
        return Unmoved(self._look)

    def _look(self, record: Record) -> Iterator[Alert]:
        if isinstance(record, PhaseRecord) and record.outcome != "ok":
            what = f"{record.action} {record.path}".strip()
            text = f"{what} failed in {record.phase} on {source(record)}: {record.outcome}"
            text += f" -> {record.detail}" if record.detail else ""
            yield Alert("failures", f"{record.action} {record.outcome}", text, record.rank, record.step)


@checked_call
@dataclass(frozen=True, slots=True)
class Stragglers:
    """A rank was busy in a phase `ratio` times as long as the median of all ranks, and `least_s` longer.

    This needs the events of all ranks: give `folder` to `Alerts`.
    """

    ratio: float = 2.0
    least_s: float = 5.0

    def __post_init__(self) -> None:
        positive(ratio=self.ratio, least_s=self.least_s)

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
                        f"{source(record)} took {_busy_s(record):.3g} s for {lane} of {record.action} "
                        f"{record.path}, the median rank {middle:.3g} s"
                    )
                    yield Alert("stragglers", lane, text, rank, record.step)


def _busy_s(record: PhaseRecord) -> float:
    return min(record.seconds, record.ended - record.started)


@checked_call
@dataclass(frozen=True, slots=True)
class LongSave:
    """A save took longer than `share` of the time between the ends of the last two saves.

    With `longest_s` also one that took longer than that.  Saves of less than `least_s` do not count.
    """

    share: float = 1.0
    longest_s: float | None = None
    least_s: float = 5.0

    def __post_init__(self) -> None:
        positive(
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


@checked_call
@dataclass(frozen=True, slots=True)
class NoCommit:
    """No save has ended well for `within_s`, counted from the first event or the last good end."""

    within_s: float

    def __post_init__(self) -> None:
        positive(within_s=self.within_s)

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


_STORES = (Retries(), SlowWrite(), StorageFull(), CoolingBehind())
DEFAULTS: tuple[AlertRule, ...] = (Failures(), Stragglers(), LongSave(), *_STORES)
"""What most jobs want to hear of."""
