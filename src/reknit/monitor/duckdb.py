"""Records in a DuckDB database, which is a file; columns follow from the fields of the records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from msgspec.structs import fields

from reknit.errors import MissingExtraError
from reknit.keywords import checked_call
from reknit.locations import local_path
from reknit.plugins.events import (
    Count,
    Deadline,
    Difference,
    DroppedRecord,
    Number,
    PhaseRecord,
    Seconds,
    StorageRecord,
    Time,
    absolute,
    ending,
    file_of_process,
    take_writable,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from reknit.plugins.events import Record


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


_TYPES = {
    "text": ("VARCHAR", pa.string()),
    "number": ("BIGINT", pa.int64()),
    "number or null": ("BIGINT", pa.int64()),
    "float": ("DOUBLE", pa.float64()),
    "float or null": ("DOUBLE", pa.float64()),
    "time": ("TIMESTAMP", pa.timestamp("us")),  # in UTC; with time zones, users would need pytz
    "map": ("MAP(VARCHAR, BIGINT)", pa.map_(pa.string(), pa.int64())),
}
_BUSY_S = 10.0
"""How long to wait for a process that reads the file."""


@checked_call
class DuckDB:
    """Writes events to the tables ``phases``, ``operations`` and ``dropped`` of a DuckDB file.

    DuckDB lets one process at a time open a file for writing.  So give a folder (an existing one, a path
    that ends in a slash, or a new one without a suffix): each process has a file of its own there.  The file
    is open only while there are events to write, and the sink waits for its readers.  Times are in UTC.
    Raises `MissingExtraError`, `OSError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import duckdb
        except ImportError:
            raise MissingExtraError(
                "reknit.sinks.DuckDB needs the package duckdb", remedy="pip install 'reknit[monitor]'"
            ) from None
        self._duckdb = duckdb
        self._connection: Any = None
        self.path = file_of_process(absolute(local_path(path, "events go to")), "duckdb")

    def take(self, records: Sequence[Record]) -> None:
        """Append records.  Raises `LostRecords` if some cannot be written, after the others are."""
        take_writable(records, self._insert)

    def _insert(self, records: Sequence[Record]) -> None:
        """Append records, all or none."""
        if self._connection is None:
            self._connection = self._opened()
        try:
            self._connection.begin()
            for table, columns in by_table(records):
                rows = pa.table(
                    {name: _array(table.columns[name], values) for name, values in columns.items()}
                )
                self._connection.register("rows_to_add", rows)
                self._connection.execute(f"INSERT INTO {table.name} BY NAME SELECT * FROM rows_to_add")
            self._connection.commit()
        except BaseException:
            self.rest()
            raise

    def rest(self) -> None:
        """Close the file, so that others can open it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _opened(self) -> Any:
        """Open the file, with its tables."""
        deadline = Deadline(_BUSY_S)
        while True:
            try:
                connection = self._duckdb.connect(self.path)
                break
            except self._duckdb.IOException as error:
                has_reader = "lock" in str(error)
                if not has_reader or deadline.passed() or ending.wait(0.1):
                    raise
        for table in TABLES:
            columns = ", ".join(f"{name} {_TYPES[kind][0]}" for name, kind in table.columns.items())
            connection.execute(f"CREATE TABLE IF NOT EXISTS {table.name} ({columns})")
        return connection


def _array(kind: str, values: list[Any]) -> pa.Array[Any]:
    if kind == "time":
        values = [round(value * 1e6) for value in values]
    elif kind == "map":
        values = [list(value.items()) for value in values]
    return pa.array(values, _TYPES[kind][1])
