"""Which phases need an alert?  Rules, as frozen values, over the records of one process or of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from reknit.keywords import checked_call
from reknit.monitor.alerts.alert_rule import (
    Alert,
    AlertRule,
    RecordWatch,
    Watch,
    check_positive,
    source_text,
)
from reknit.monitor.alerts.store_rules import CoolingBehind, Retries, SlowWrite, StorageFull
from reknit.monitor.records import WAITING, PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.monitor.records import Record


def _is_whole_save(record: PhaseRecord) -> bool:
    """Return whether a record is of a save as a whole."""
    return record.action == record.phase == "save"


@checked_call
@dataclass(frozen=True, slots=True)
class Failures:
    """A save, load or other action failed, or a phase of the user's own code."""

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        return RecordWatch(self._look)

    def _look(self, record: Record) -> Iterator[Alert]:
        if isinstance(record, PhaseRecord) and record.outcome != "ok":
            what = f"{record.action} {record.path}".strip()
            text = f"{what} failed in {record.phase} on {source_text(record)}: {record.outcome}"
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
        check_positive(ratio=self.ratio, least_s=self.least_s)

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        return _StragglerWatch(self)


_KEPT = 8  # saves and loads, of all ranks
_FEWEST = 4  # ranks; the median of fewer says little


class _StragglerWatch:
    def __init__(self, rule: Stragglers) -> None:
        self._rule = rule
        self._busy: dict[tuple[str, str, int | None], dict[str, dict[int, PhaseRecord]]] = {}
        self._alerted: dict[tuple[str, str, int | None], set[tuple[str, int]]] = {}

    def see(self, record: Record) -> Iterator[Alert]:
        if not isinstance(record, PhaseRecord) or record.phase in (*WAITING, record.action):
            return
        key = (record.action, record.path, record.step)
        ranks = self._busy.setdefault(key, {}).setdefault(record.lane, {})
        ranks[record.rank] = max(ranks.get(record.rank, record), record, key=lambda each: each.busy_s)
        while len(self._busy) > _KEPT:
            oldest = next(iter(self._busy))
            del self._busy[oldest]
            self._alerted.pop(oldest, None)
        if len(ranks) >= _FEWEST and len(ranks) & (len(ranks) - 1) == 0:
            yield from self._compare(key)

    def tick(self, now_s: float) -> Iterator[Alert]:
        for key in list(self._busy):
            yield from self._compare(key)

    def _compare(self, key: tuple[str, str, int | None]) -> Iterator[Alert]:
        alerted = self._alerted.setdefault(key, set())
        for lane, ranks in self._busy[key].items():
            if len(ranks) < _FEWEST:
                continue
            middle = median(record.busy_s for record in ranks.values())
            bound = max(self._rule.ratio * middle, middle + self._rule.least_s)
            for rank, record in ranks.items():
                if record.busy_s > bound and (lane, rank) not in alerted:
                    alerted.add((lane, rank))
                    text = (
                        f"{source_text(record)} took {record.busy_s:.3g} s for {lane} of {record.action} "
                        f"{record.path}, the median rank {middle:.3g} s"
                    )
                    yield Alert("stragglers", lane, text, rank, record.step)


@checked_call
@dataclass(frozen=True, slots=True)
class LongSave:
    """A save took longer than `share` of the time between the starts of the last two saves.

    With `longest_s`, also a save that took longer than that.  Saves of less than `least_s` do not count.
    """

    share: float = 1.0
    longest_s: float | None = None
    least_s: float = 5.0

    def __post_init__(self) -> None:
        check_positive(
            share=self.share,
            least_s=self.least_s,
            **({} if self.longest_s is None else {"longest_s": self.longest_s}),
        )

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        begun: dict[int, float] = {}

        def look(record: Record) -> Iterator[Alert]:
            if not isinstance(record, PhaseRecord) or not _is_whole_save(record):
                return
            before, begun[record.rank] = begun.get(record.rank), record.started
            if record.rank != 0 or record.outcome != "ok":
                return  # the saves of all ranks end together
            interval_s = float("inf") if before is None else record.started - before
            bound = min(self.longest_s or float("inf"), self.share * interval_s)
            if record.seconds > max(bound, self.least_s):
                text = (
                    f"the save to {record.path} took {record.seconds:.3g} s; saves begin every {bound:.3g} s"
                )
                if bound == self.longest_s:
                    text = f"the save to {record.path} took {record.seconds:.3g} s, more than {bound:.3g} s"
                yield Alert("long save", "save", text, record.rank, record.step)

        return RecordWatch(look)


@checked_call
@dataclass(frozen=True, slots=True)
class NoCommit:
    """No save has succeeded for `within_s`, counted from the first event or the last success."""

    within_s: float

    def __post_init__(self) -> None:
        check_positive(within_s=self.within_s)

    def watch(self) -> Watch:
        """Return a new watch for this rule."""
        return _CommitWatch(self)


class _CommitWatch:
    def __init__(self, rule: NoCommit) -> None:
        self._rule = rule
        self._since: float | None = None
        self._last = "no save has ended well yet"
        self._alerted = False

    def see(self, record: Record) -> Iterator[Alert]:
        if self._since is None:
            self._since = record.started
        if isinstance(record, PhaseRecord) and _is_whole_save(record) and record.outcome == "ok":
            self._since = max(self._since, record.ended)
            self._last = f"the last was {record.path}"
            self._alerted = False
        return iter(())

    def tick(self, now_s: float) -> Iterator[Alert]:
        if self._since is not None and now_s - self._since > self._rule.within_s and not self._alerted:
            self._alerted = True
            text = f"nothing was committed for {now_s - self._since:.0f} s; {self._last}"
            yield Alert("no commit", "commit", text)


_STORES = (Retries(), SlowWrite(), StorageFull(), CoolingBehind())
DEFAULTS: tuple[AlertRule, ...] = (Failures(), Stragglers(), LongSave(), *_STORES)
"""The rules for most jobs."""
