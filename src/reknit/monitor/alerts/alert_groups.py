"""Which alerts are sent, and when?  Alerts of one kind once together, and not again for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reknit.types.rank_text import spelled

if TYPE_CHECKING:
    from reknit.monitor.alerts.alert_rule import Alert

_MOST_GROUPS = 1_000
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class GroupedAlert:
    """An alert as it is sent: the first of `number` alerts of its kind since the last time.

    `ranks` are the ranks of these alerts, at most 16.
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
    """Alerts of one rule and subject: the first unsent one, their number, and when they may be sent."""

    first: Alert
    unsent: int
    due: float
    ranks: list[int] = field(default_factory=list)


class AlertGroups:
    """Alerts that wait to be sent, in groups of one rule and subject.

    A new group waits for `wait_s`.  After it was sent, its alerts are only counted for `cool_off_s`.
    """

    def __init__(self, wait_s: float, cool_off_s: float) -> None:
        self._wait_s, self._cool_off_s = wait_s, cool_off_s
        self._groups: dict[tuple[str, str], _Group] = {}

    def add(self, alert: Alert, now_s: float) -> None:
        """Add an alert to its group."""
        key = (alert.rule, alert.subject)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= _MOST_GROUPS:
                key = (alert.rule, "")  # nobody reads more kinds
            group = self._groups.setdefault(key, _Group(alert, 0, now_s + self._wait_s))
        if not group.unsent:
            group.first = alert
        group.unsent += 1
        if alert.rank is not None and alert.rank not in group.ranks and len(group.ranks) < _MOST_RANKS:
            group.ranks.append(alert.rank)

    def take_due(self, now_s: float) -> list[GroupedAlert]:
        """Return the alerts to send now, and forget the groups that were quiet for long."""
        due = []
        for key, group in list(self._groups.items()):
            if now_s < group.due:
                continue
            if not group.unsent:
                del self._groups[key]
                continue
            due.append(GroupedAlert(group.first, group.unsent, tuple(group.ranks)))
            group.unsent, group.due = 0, now_s + self._cool_off_s
            group.ranks = []
        return due
