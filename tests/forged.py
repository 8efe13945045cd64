"""Checkpoints whose digests are right, and whose contents break a rule of the format."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet as pq

from reknit.format.checksum import digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and give it the digest that it then has."""
    document = json.loads(path.read_text())
    document.pop("digest")
    change(document)
    data = json.dumps(document, separators=(",", ":")).encode()[:-1]
    path.chmod(0o644)
    path.write_bytes(data + f',"digest":"{digest(data):016x}"}}'.encode())


def digests_of(data: bytes) -> str:
    blocks = [data[start : start + (4 << 20)] for start in range(0, len(data), 4 << 20)]
    return base64.b64encode(b"".join(digest(block).to_bytes(8, "little") for block in blocks)).decode()


def rewritten(path: Path, change: Callable[[pyarrow.Table], pyarrow.Table], **options: Any) -> None:
    """Change the index of a checkpoint, and give the manifest its size and digests."""
    (index,) = path.glob("index.*")
    table = change(pq.read_table(index))
    index.chmod(0o644)
    pq.write_table(table, index, compression="zstd", store_schema=False, **options)
    data = index.read_bytes()
    new = {"path": index.name, "nbytes": len(data), "digests": digests_of(data)}

    def list_anew(document: dict[str, Any]) -> None:
        document["files"] = [new if file["path"] == index.name else file for file in document["files"]]

    resealed(path / "manifest.json", list_anew)


def with_value(table: pyarrow.Table, name: str, value: Any) -> pyarrow.Table:
    """Return the table of an index whose first row has another value in a column."""
    place = table.schema.get_field_index(name)
    field = table.schema.field(place)
    values = [value, *table.column(place).to_pylist()[1:]]
    return table.set_column(place, field, pyarrow.array(values, field.type))
