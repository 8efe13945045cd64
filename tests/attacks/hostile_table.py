"""Tables of files that are wrong, that decompress to too much, or that lead out of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from reknit.types.manifest import FileEntry, TablePlace
from tests.format.samples import sample_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.types.manifest import Manifest

HUGE = 1 << 62
FLOOD = 1 << 20

GOOD: dict[str, Any] = {
    "paths": "model/a\nextra/b\nextra/c",
    "nbytes": [4097, 0, 7],
    "digests": [1, 2, 3],
    "item": [-1, 0, 0],
    "place": [-1, -1, 0],
    "places": [["dp", "tp"]],
    "coordinates": [3, -1],
}
NBYTES = 4104


def table_of(**changes: Any) -> bytes:
    """Return the bytes of the good table with some columns changed."""
    columns = GOOD | changes
    kinds = {"nbytes": "<i8", "digests": "<u8", "item": "<i4", "place": "<i4", "coordinates": "<i8"}
    return msgspec.msgpack.encode(
        [
            np.array(column, kinds[name]).tobytes() if name in kinds and isinstance(column, list) else column
            for name, column in columns.items()
        ]
    )


def manifest_of(table: bytes, num_files: int = 3, nbytes: int = NBYTES) -> Manifest:
    """Return a manifest that leads to this table, with nothing before it in the index."""
    good = sample_manifest()
    index = FileEntry(good.index_path, len(table), tuple(range(-(-len(table) // good.block_nbytes))))
    place = TablePlace(0, len(table), num_files, nbytes)
    return replace(good, files=(index,), blobs=(), table=place)


def attacks() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name of every attack, the table, and, where these matter, the manifest's counts of it."""
    for name, changes in _CHANGES.items():
        yield name, (table_of(**changes),)
    good = table_of()
    yield "cut_short", (good[:-1],)
    yield "bytes_after_it", (good + b"\xc0",)
    yield "a_map", (msgspec.msgpack.encode(GOOD),)
    yield "a_column_too_many", (b"\x98" + good[1:] + b"\xc0",)
    yield "paths_not_utf8", (good.replace(b"model/a", b"model/\xff"),)
    yield "fewer_files_than_the_manifest_says", (good, 4)
    yield "more_files_than_the_manifest_says", (good, 2)
    yield "other_bytes_than_the_manifest_says", (good, 3, NBYTES + 1)
    yield "files_without_number", (good, HUGE)
    yield "nested_a_million_deep", (b"\x97" + b"\x91" * 1_000_000,)
    yield "flood_of_paths", (table_of(paths="\n" * FLOOD), FLOOD + 1)
    short = [0] * FLOOD
    yield (
        "flood_of_equal_paths",
        (
            table_of(
                paths="a\n" * (FLOOD - 1) + "a",
                nbytes=short,
                digests=[],
                item=[-1] * FLOOD,
                place=[-1] * FLOOD,
            ),
            FLOOD,
        ),
    )
    yield "flood_of_places", (table_of(places=[[]] * FLOOD),)
    yield "flood_of_names", (table_of(places=[[""] * FLOOD]),)


_CHANGES: dict[str, dict[str, Any]] = {
    "path_up": {"paths": "model/a\nextra/b\n../c"},
    "path_absolute": {"paths": "/etc/passwd\nextra/b\nextra/c"},
    "path_empty": {"paths": "model/a\n\nextra/c"},
    "path_part_empty": {"paths": "model//a\nextra/b\nextra/c"},
    "path_here": {"paths": "model/a\n.\nextra/c"},
    "path_backslash": {"paths": "model\\a\nextra/b\nextra/c"},
    "path_drive": {"paths": "c:a\nextra/b\nextra/c"},
    "path_control": {"paths": "model/\x1b\nextra/b\nextra/c"},
    "path_delete": {"paths": "model/\x7f\nextra/b\nextra/c"},
    "path_too_long": {"paths": "/".join(["m" * 200] * 6) + "\nextra/b\nextra/c"},
    "path_part_too_long": {"paths": "m" * 201 + "\nextra/b\nextra/c"},
    "path_part_too_long_in_bytes": {"paths": "ü" * 101 + "\nextra/b\nextra/c"},
    "path_twice": {"paths": "extra/b\nextra/b\nextra/c"},
    "lists_the_manifest": {"paths": "manifest.json\nextra/b\nextra/c"},
    "lists_the_index": {"paths": "index.01234567.parquet\nextra/b\nextra/c"},
    "size_negative": {"nbytes": [4097, -1, 7]},
    "size_huge": {"nbytes": [HUGE, 0, 7]},
    "sizes_that_overflow": {"nbytes": [(1 << 63) - 1, (1 << 63) - 1, 4098]},
    "too_few_digests": {"digests": [1, 2]},
    "too_many_digests": {"digests": [1, 2, 3, 4]},
    "half_a_digest": {"digests": b"\0" * 23},
    "too_few_sizes": {"nbytes": [4097, 0]},
    "too_few_items": {"item": [-1, 0]},
    "too_few_places": {"place": [-1, -1]},
    "unknown_item": {"item": [-1, 0, 3]},
    "item_below_none": {"item": [-2, 0, 0]},
    "coordinate_without_item": {"item": [-1, 0, -1]},
    "unknown_place": {"place": [-1, -1, 1]},
    "place_below_none": {"place": [-2, -1, 0]},
    "too_few_coordinates": {"coordinates": [3]},
    "too_many_coordinates": {"coordinates": [3, -1, 5]},
    "name_twice": {"places": [["dp", "dp"]]},
    "names_too_long": {"places": [["dp", "t" * 1000]]},
    "name_no_text": {"places": [["dp", 7]]},
    "paths_as_binary": {"paths": b"model/a\nextra/b\nextra/c"},
    "sizes_as_text": {"nbytes": "8 bytes, 8 bytes, 8 byte"},
}
