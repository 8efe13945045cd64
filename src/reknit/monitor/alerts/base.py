"""What is a rule for alerts, and what does it find?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.monitor.records import PhaseRecord, Record, StorageRecord


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


def positive(**values: float) -> None:
    """Raise `UsageError` unless all values are numbers above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UsageError(f"{name} is a number above 0, not {value!r}")


def source(record: PhaseRecord | StorageRecord) -> str:
    """Say where a record is from."""
    place = "".join(f", {axis} {number}" for axis, number in getattr(record, "coordinate", {}).items())
    return f"rank {record.rank}{place} on {record.host}"
