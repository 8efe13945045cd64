"""Which records were added to files since the last look?  To lines of JSON, and to databases of DuckDB."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from reknit.errors import MissingExtraError, StorageError
from reknit.monitor.phase import Deadline
from reknit.monitor.record_tables import TABLES
from reknit.types.decoding import converted, decoder

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
_CLOSED: dict[str, Any] = {"enable_external_access": "false", "lock_configuration": "true"}
"""A stranger's database may have views that read other files, or the network."""


_File = tuple[int, int]
"""A file by its device and number there: its name may be given to another file."""
_HEAD_NBYTES = 256
"""So many first bytes of a file, with the time of a record, say whether it was written anew."""


class RecordFiles:
    """Files of records that other processes append to: each call of `read` continues where the last ended.

    Files may be renamed, replaced, or cut and written anew.
    """

    def __init__(self) -> None:
        self.num_invalid = 0
        self.amount = 0
        """How much has been read: bytes of lines, and rows of databases."""
        self._positions: dict[_File, int] = {}
        self._heads: dict[_File, bytes] = {}
        self._rows: dict[_File, Counter[str]] = {}
        self._unfinished: set[_File] = set()
        self._decoders = {
            f'{{"{next(iter(table.columns))}"'.encode(): decoder(table.record, json=True) for table in TABLES
        }

    @property
    def num_unfinished(self) -> int:
        """The number of files that end in the middle of a line."""
        return len(self._unfinished)

    def read(self, path: Path) -> Iterator[Record]:
        """Yield the records that were added to a file.  Raises `OSError`, `StorageError`."""
        if path.suffix == ".duckdb":
            yield from self._read_rows(path)
            return
        with _opened(path) as lines:
            file, size = self._begin(lines)
            begin = self._positions[file]
            if size <= begin:
                return
            self._unfinished.discard(file)
            lines.seek(begin)
            while line := lines.readline(_MOST_NBYTES):
                if not line.endswith(b"\n") and len(line) < _MOST_NBYTES:
                    self._unfinished.add(file)  # another process may be writing it
                    break
                self._positions[file] += len(line)
                self.amount += len(line)
                begun = line[:20].partition(b":")[0]
                decode = self._decoders.get(begun) or self._decoders[b'{"phase"']
                if (record := self._valid(decode, line)) is not None:
                    yield record

    def _begin(self, lines: BinaryIO) -> tuple[_File, int]:
        """Return a file and its size; forget its position if it was cut, or if its number has a new file."""
        found = os.fstat(lines.fileno())
        file, head = _identity(found), lines.read(_HEAD_NBYTES)
        position, before = self._positions.get(file, 0), self._heads.get(file, b"")
        if found.st_size < position or not head.startswith(before):
            position = 0
            self._unfinished.discard(file)
        self._positions[file], self._heads[file] = position, head
        return file, found.st_size

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
        read = self._rows.setdefault(_identity(path.stat()), Counter())
        try:
            with _connected(str(path)) as database:
                found = database.execute("SELECT table_name FROM duckdb_tables()").fetchall()
                for table in TABLES:
                    if (table.name,) not in found:  # a view would run the code of a stranger
                        raise StorageError(
                            f"{path} has no table {table.name}, so it is not a database of events",
                            path=str(path),
                            remedy="name other files of events",
                        )
                    times = [name for name, kind in table.columns.items() if kind == "time"]
                    columns = ", ".join(f"epoch({name}) AS {name}" for name in times)
                    (number,) = database.execute(f"SELECT count(*) FROM {table.name}").fetchone()
                    if number < read[table.name]:  # it was made anew
                        read[table.name] = 0
                    rest = f"{table.name} OFFSET {read[table.name]}"
                    answer = database.execute(f"SELECT * REPLACE ({columns}) FROM {rest}")
                    names = [column[0] for column in answer.description]
                    convert = partial(converted, kind=table.record)
                    while rows := answer.fetchmany(_ROWS_AT_ONCE):
                        read[table.name] += len(rows)
                        self.amount += len(rows)
                        records = (self._valid(convert, dict(zip(names, row, strict=True))) for row in rows)
                        yield from filter(None, records)
        except duckdb.Error as error:
            raise StorageError(
                f"the events in {path} cannot be read: {error}",
                path=str(path),
                remedy="if a process is writing them now, try again",
            ) from error


def _identity(found: os.stat_result) -> _File:
    return found.st_dev, found.st_ino


def _opened(path: Path) -> BinaryIO:
    """Open a file.  Raises `OSError`, also for a pipe, which would never end, and for a folder."""
    lines = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(lines.fileno()).st_mode):
        return lines
    lines.close()
    raise OSError(f"{path} is not a file")


def _connected(path: str) -> Any:
    """Open a database; a process that writes to it has it open for moments only."""
    import duckdb

    deadline = Deadline(_BUSY_S)
    while True:
        try:
            return duckdb.connect(path, read_only=True, config=_CLOSED)
        except duckdb.IOException as error:
            if "set lock" not in str(error) or deadline.passed():  # a bad file stays bad
                raise
        time.sleep(0.1)
