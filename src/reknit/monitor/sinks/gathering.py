"""Which phases belong to one save or load of this rank?  They are kept until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.monitor.records import PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.records import Record

_MOST_OPEN = 64
_MOST_PHASES = 1_000


class Gathering:
    """The phases of what is under way; of what never ends the oldest is forgotten."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, int | None, int], list[PhaseRecord]] = {}

    def ended(self, records: Sequence[Record]) -> Iterator[list[PhaseRecord]]:
        """Yield the phases of each save, load or the like that ends, the whole one last."""
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
