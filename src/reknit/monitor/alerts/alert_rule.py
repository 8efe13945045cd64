"""Rules for alerts, and the alerts that they cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from reknit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.monitor.records import PhaseRecord, Record, StorageRecord


class Alert(NamedTuple):
    """Something that needs attention; alerts of one rule and `subject` are sent once, with their number."""

    rule: str
    subject: str
    text: str
    rank: int | None = None
    step: int | None = None


class Watch(Protocol):
    """A rule at work, with the state that it keeps."""

    def see(self, record: Record) -> Iterable[Alert]:
        """Return the alerts that one record causes."""

    def tick(self, now_s: float) -> Iterable[Alert]:
        """Return the alerts that are due at this time, in seconds since the epoch."""


@runtime_checkable
class AlertRule(Protocol):
    """A condition that causes alerts."""

    def watch(self) -> Watch:
        """Return a new watch for this rule."""


class RecordWatch:
    """A watch whose alerts depend on single records only, not on the time."""

    def __init__(self, see: Callable[[Record], Iterable[Alert]]) -> None:
        self._see = see

    def see(self, record: Record) -> Iterable[Alert]:
        """Return the alerts that one record causes."""
        return self._see(record)

    def tick(self, now_s: float) -> Iterable[Alert]:
        """Return no alerts."""
        return ()


def check_positive(**values: Any) -> None:
    """Raise `UsageError` unless all values are numbers above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UsageError(f"{name} is a number above 0, not {value!r}")


def source_text(record: PhaseRecord | StorageRecord) -> str:
    """Return the rank of a record, with its place in the parallel grid and its host."""
    place = "".join(f", {axis} {number}" for axis, number in getattr(record, "coordinate", {}).items())
    return f"rank {record.rank}{place} on {record.host}"
