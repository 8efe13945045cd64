"""Which alerts are told, and when?  Those that belong together once, and then not again for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reknit.types.rank_text import spelled

if TYPE_CHECKING:
    from reknit.monitor.alerts.base import Alert

_MOST_GROUPS = 1_000
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class Told:
    """An alert as it is told: the first of `number` that belong together, since the last time.

    `ranks` are those that they are about, the first 16.
    """

    alert: Alert
    number: int
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        named = f", {spelled(self.ranks)}" if len(self.ranks) > 1 else ""
        more = f" ({self.number} of the kind{named})" if self.number > 1 else ""
        return f"{self.alert.rule}: {self.alert.text}{more}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**self.alert._asdict(), "number": self.number, "ranks": self.ranks}


@dataclass(slots=True)
class _Group:
    """Alerts of one rule and subject: the first untold, how many are untold, and when they may be told."""

    first: Alert
    untold: int
    due: float
    ranks: list[int] = field(default_factory=list)


class Grouping:
    """Lets alerts of one cause come together, and each kind be told once in a while.

    A new kind waits for `wait_s`; after it was told, what comes within `cool_off_s` is only counted.
    """

    def __init__(self, wait_s: float, cool_off_s: float) -> None:
        self._wait_s, self._cool_off_s = wait_s, cool_off_s
        self._groups: dict[tuple[str, str], _Group] = {}

    def add(self, alert: Alert, now_s: float) -> None:
        """Take an alert."""
        key = (alert.rule, alert.subject)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= _MOST_GROUPS:
                key = (alert.rule, "")  # more kinds than anybody reads
            group = self._groups.setdefault(key, _Group(alert, 0, now_s + self._wait_s))
        if not group.untold:
            group.first = alert
        group.untold += 1
        if alert.rank is not None and alert.rank not in group.ranks and len(group.ranks) < _MOST_RANKS:
            group.ranks.append(alert.rank)

    def due(self, now_s: float) -> list[Told]:
        """Return what is to be told now, and forget what has been quiet for long."""
        told = []
        for key, group in list(self._groups.items()):
            if now_s < group.due:
                continue
            if not group.untold:
                del self._groups[key]
                continue
            told.append(Told(group.first, group.untold, tuple(group.ranks)))
            group.untold, group.due = 0, now_s + self._cool_off_s
            group.ranks = []
        return told
