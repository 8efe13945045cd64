"""Records in a ClickHouse server, through its HTTP interface."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlencode, urlsplit

from reknit.errors import StorageError, UsageError
from reknit.keywords import checked_call
from reknit.monitor.record_losses import take_writable
from reknit.monitor.record_tables import TABLES, by_table
from reknit.monitor.web_post import post

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reknit.monitor.records import Record

_TYPES = {
    "text": "String",
    "number": "Int64",
    "number or null": "Nullable(Int64)",
    "float": "Float64",
    "float or null": "Nullable(Float64)",
    "time": "Float64",
    "map": "String",
}
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@checked_call
class ClickHouse:
    """Writes events to tables of a server: ``reknit_phases``, ``reknit_operations`` and ``reknit_dropped``.

    `url` is ``http://user:password@host:8123/database``, or ``https://``; user, password and database are
    optional.  Missing tables are made.  ``started`` and ``ended`` are seconds since the epoch, the column
    ``time`` is ``started`` as a date, ``coordinate`` is JSON.  No package is needed.  A request fails after
    `timeout_s`.  Raises `UsageError`.
    """

    def __init__(self, url: str, *, prefix: str = "reknit_", timeout_s: float = 30.0) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or (8443 if parts.scheme == "https" else 8123)
        except ValueError:  # its text may have a part of the password
            parts, port = urlsplit(""), 0
        database = unquote(parts.path.strip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                "the URL of a ClickHouse server is http://host:8123/database, or https://",
                remedy="give the port of its HTTP interface, and write / and # of a password as %2F and %23",
            )
        for name in filter(None, (database, prefix)):
            if not _WORD.fullmatch(name):
                raise UsageError(f"{name!r} cannot be in the name of a table")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self._url = f"{parts.scheme}://{host}:{port}/"
        self._database, self._prefix, self._timeout_s = database or "default", prefix, timeout_s
        self._headers = {}
        if parts.username is not None:
            self._headers["X-ClickHouse-User"] = unquote(parts.username)
            self._headers["X-ClickHouse-Key"] = unquote(parts.password or "")
        self._made = False

    def __repr__(self) -> str:
        return f"ClickHouse({self._url}{self._database})"  # without the password

    def take(self, records: Sequence[Record]) -> None:
        """Insert records, one request for each table.  Raises `LostRecords`, `StorageError`, `OSError`."""
        if not self._made:
            for table in TABLES:
                kinds = ", ".join(f"{name} {_TYPES[kind]}" for name, kind in table.columns.items())
                self._send(
                    f"CREATE TABLE IF NOT EXISTS {self._prefix}{table.name} "
                    f"({kinds}, time DateTime MATERIALIZED toDateTime(toUInt32(started))) "
                    "ENGINE = MergeTree ORDER BY started"
                )
            self._made = True
        inserts: list[tuple[str, bytes]] = []

        def encode(some: Sequence[Record]) -> None:
            inserts[:] = self._inserts(some)

        try:
            take_writable(records, encode)
        finally:
            for query, data in inserts:
                self._send(query, data)

    def _inserts(self, records: Sequence[Record]) -> Iterator[tuple[str, bytes]]:
        """Yield a query for each table, with its rows."""
        for table, columns in by_table(records):
            for name in (name for name in columns if table.columns[name] == "map"):
                columns[name] = [json.dumps(value) for value in columns[name]]
            rows = "\n".join(
                json.dumps(dict(zip(columns, row, strict=True)))
                for row in zip(*columns.values(), strict=True)
            )
            names = ", ".join(columns)
            yield f"INSERT INTO {self._prefix}{table.name} ({names}) FORMAT JSONEachRow", rows.encode()

    def _send(self, query: str, data: bytes = b"") -> None:
        """Send a query to the server.  Raises `StorageError`, `OSError`."""
        address = f"{self._url}?{urlencode({'query': query, 'database': self._database})}"
        try:
            post(address, data, self._headers, self._timeout_s)
        except StorageError as error:
            raise StorageError(f"{self!r} refuses: {error}") from None
