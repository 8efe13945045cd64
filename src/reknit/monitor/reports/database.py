"""Read events from databases in files, those of `reknit.sinks.DuckDB`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reknit.errors import MissingExtraError, StorageError
from reknit.monitor.phase import Deadline

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator
    from pathlib import Path

_TIMES = "REPLACE (epoch(started) AS started{})"
_TABLES = {"phases": _TIMES.format(", epoch(ended) AS ended"), "operations": _TIMES.format("")}
_AT_ONCE = 10_000
_BUSY_S = 10.0

DATABASE = ".duckdb"
"""How the names of such files end."""


def rows_of(path: Path, known: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all tables but those `known`, and count them there.  Raises `StorageError`."""
    try:
        import duckdb
    except ImportError:
        raise MissingExtraError(
            f"the events in {path} are read with the package duckdb", remedy="pip install 'reknit[monitor]'"
        ) from None
    try:
        with _opened(str(path)) as database:
            for table in ("phases", "operations", "dropped"):
                columns = f"* {_TABLES.get(table, '')}"
                found = database.execute(f"SELECT {columns} FROM {table} OFFSET {known[table]}")
                names = [column[0] for column in found.description]
                while rows := found.fetchmany(_AT_ONCE):
                    known[table] += len(rows)
                    yield from (dict(zip(names, row, strict=True)) for row in rows)
    except duckdb.Error as error:
        raise StorageError(
            f"the events in {path} cannot be read: {error}",
            path=str(path),
            remedy="if a process is writing them now, try again",
        ) from error


def _opened(path: str) -> Any:
    """Open a database; a process that writes to it has it open for moments only."""
    import duckdb

    deadline = Deadline(_BUSY_S)
    while True:
        try:
            return duckdb.connect(path, read_only=True)
        except duckdb.IOException:
            if deadline.passed():
                raise
        time.sleep(0.1)
