"""Which records were added to files since the last look?  To lines of JSON, and to databases of DuckDB."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from reknit.errors import MissingExtraError, StorageError
from reknit.monitor.phase import Deadline
from reknit.monitor.record_tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reknit.monitor.records import Record

SUFFIXES = (".duckdb", ".jsonl")
"""The suffixes of files that processes write to a folder of events."""

_MOST_NBYTES = 1 << 20
"""Bytes of a line: a record has some hundreds.  A longer line is read in parts, which are not records."""
_ROWS_AT_ONCE = 10_000
_BUSY_S = 10.0
_CLOSED = {"enable_external_access": "false", "lock_configuration": "true"}
"""A stranger's database may have views that read other files, or the network."""


class RecordFiles:
    """Files of records that other processes append to: each call of `read` continues where the last ended."""

    def __init__(self) -> None:
        self.num_invalid = 0
        self._positions: dict[Path, int] = {}
        self._rows: dict[Path, Counter[str]] = {}
        self._unfinished: set[Path] = set()
        self._decoders = {
            f'{{"{next(iter(table.columns))}"'.encode(): msgspec.json.Decoder(table.record)
            for table in TABLES
        }

    @property
    def position(self) -> int:
        """How much has been read: bytes of lines, and rows of databases."""
        return sum(self._positions.values())

    @property
    def num_unfinished(self) -> int:
        """The number of files that end in the middle of a line."""
        return len(self._unfinished)

    def skip(self, path: Path) -> None:
        """Leave out everything that is in a file of lines now.  Raises `OSError`."""
        self._positions[path] = path.stat().st_size

    def read(self, path: Path, most_nbytes: int = 1 << 62) -> Iterator[Record]:
        """Yield the records that were added to a file, for lines about `most_nbytes` of them.

        Raises `OSError`, `StorageError`.
        """
        if path.suffix == ".duckdb":
            yield from self._read_rows(path)
            return
        begin = self._positions.setdefault(path, 0)
        if path.stat().st_size <= begin:
            return
        self._unfinished.discard(path)
        with path.open("rb") as lines:
            lines.seek(begin)
            while self._positions[path] < begin + most_nbytes and (line := lines.readline(_MOST_NBYTES)):
                if not line.endswith(b"\n") and len(line) < _MOST_NBYTES:
                    self._unfinished.add(path)  # another process may be writing it
                    break
                self._positions[path] += len(line)
                begun = line[:20].partition(b":")[0]
                decoder = self._decoders.get(begun) or self._decoders[b'{"phase"']
                if (record := self._valid(decoder.decode, line)) is not None:
                    yield record

    def _valid(self, decode: Callable[[Any], Record], data: Any) -> Record | None:
        """Return the record in a line or a row; None if it is invalid, which is counted."""
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.num_invalid += 1
            return None

    def _read_rows(self, path: Path) -> Iterator[Record]:
        """Yield the rows that were added to the tables of a database."""
        try:
            import duckdb
        except ImportError:
            raise MissingExtraError(
                f"the events in {path} are read with the package duckdb",
                remedy="pip install 'reknit[monitor]'",
            ) from None
        read = self._rows.setdefault(path, Counter())
        try:
            with _connected(str(path)) as database:
                found = database.execute("SELECT table_name FROM duckdb_tables()").fetchall()
                for table in TABLES:
                    if (table.name,) not in found:  # a view would run code of whoever wrote the file
                        raise StorageError(
                            f"{path} has no table {table.name}, so it is not a database of events",
                            path=str(path),
                            remedy="name other files of events",
                        )
                    times = [name for name, kind in table.columns.items() if kind == "time"]
                    columns = ", ".join(f"epoch({name}) AS {name}" for name in times)
                    rest = f"{table.name} OFFSET {read[table.name]}"
                    answer = database.execute(f"SELECT * REPLACE ({columns}) FROM {rest}")
                    names = [column[0] for column in answer.description]
                    convert = partial(msgspec.convert, type=table.record)
                    while rows := answer.fetchmany(_ROWS_AT_ONCE):
                        read[table.name] += len(rows)
                        records = (self._valid(convert, dict(zip(names, row, strict=True))) for row in rows)
                        yield from filter(None, records)
        except duckdb.Error as error:
            raise StorageError(
                f"the events in {path} cannot be read: {error}",
                path=str(path),
                remedy="if a process is writing them now, try again",
            ) from error
        self._positions[path] = read.total()


def _connected(path: str) -> Any:
    """Open a database; a process that writes to it has it open for moments only."""
    import duckdb

    deadline = Deadline(_BUSY_S)
    while True:
        try:
            return duckdb.connect(path, read_only=True, config=_CLOSED)
        except duckdb.IOException:
            if deadline.passed():
                raise
        time.sleep(0.1)
