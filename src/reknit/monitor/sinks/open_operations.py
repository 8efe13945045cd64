"""Saves and loads of this process that have not ended, with their phases until now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.monitor.records import PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.records import Record

_MOST_OPEN = 64
_MOST_PHASES = 1_000


class OpenOperations:
    """The phases of operations that have not ended; if there are too many, the oldest is forgotten."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int | None, int], list[PhaseRecord]] = {}

    def add(self, records: Sequence[Record]) -> Iterator[list[PhaseRecord]]:
        """Add records, and yield the phases of each operation that ends, with the phase of the whole last."""
        for record in records:
            if not isinstance(record, PhaseRecord):
                continue
            key = (record.action, record.path, record.step, record.rank)
            phases = self._open.setdefault(key, [])
            if len(phases) < _MOST_PHASES or record.phase == record.action:
                phases.append(record)
            if record.phase == record.action and record.process == "trainer":
                yield self._open.pop(key)
            elif len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
