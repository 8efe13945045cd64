"""Records as columns, for databases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.monitor.records import DroppedRecord, PhaseRecord, StorageRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.records import Record

PLACE = {
    "action": "text",
    "path": "text",
    "step": "number or null",
    "rank": "number",
    "host": "text",
    "process": "text",
    "started": "time",
    "seconds": "float",
    "nbytes": "number",
    "outcome": "text",
}


class Table(NamedTuple):
    """A table of events: its name, the type of its records, and what each column holds."""

    name: str
    kind: type
    columns: dict[str, str]


TABLES = (
    Table(
        "phases",
        PhaseRecord,
        {
            "phase": "text",
            **PLACE,
            "ended": "time",
            "coordinate": "map",
            "behind_s": "float or null",
            "detail": "text",
        },
    ),
    Table(
        "operations",
        StorageRecord,
        {"operation": "text", "store": "text", **PLACE, "retries": "number", "at_once": "number"},
    ),
    Table("dropped", DroppedRecord, {"num_dropped": "number", "host": "text", "started": "time"}),
)


def by_table(records: Sequence[Record]) -> Iterator[tuple[Table, dict[str, list[Any]]]]:
    """Yield the columns of each table that gets some of the records."""
    for table in TABLES:
        mine = [record for record in records if type(record) is table.kind]
        if mine:
            yield table, {name: [getattr(record, name) for record in mine] for name in table.columns}
