"""Records as tables, for databases: the columns follow from the fields of the records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import fields

from reknit.monitor.records import (
    Count,
    Difference,
    DroppedRecord,
    Number,
    PhaseRecord,
    Seconds,
    StorageRecord,
    Time,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.records import Record

_KINDS: dict[Any, str] = {
    str: "text",
    Count: "number",
    Number | None: "number or null",
    Seconds: "float",
    Difference | None: "float or null",
    Time: "time",
    dict[str, Number]: "map",
}
"""The kind of a column, by the type of the field."""


class Table(NamedTuple):
    """A table of events: its name, the type of its records, and the kind of each column."""

    name: str
    record: type[Record]
    columns: dict[str, str]


TABLES = tuple(
    Table(name, record, {field.name: _KINDS[field.type] for field in fields(record)})
    for name, record in (("phases", PhaseRecord), ("operations", StorageRecord), ("dropped", DroppedRecord))
)


def by_table(records: Sequence[Record]) -> Iterator[tuple[Table, dict[str, list[Any]]]]:
    """Yield each table that gets some of the records, with their values by column."""
    for table in TABLES:
        mine = [record for record in records if type(record) is table.record]
        if mine:
            yield table, {name: [getattr(record, name) for record in mine] for name in table.columns}
