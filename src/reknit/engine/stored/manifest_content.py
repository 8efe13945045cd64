"""The files that all ranks wrote in a save, merged by the root from their receipts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from reknit.errors import ProtocolError
from reknit.format import paths
from reknit.format.checksum import num_blocks
from reknit.format.file_table import blobs, encode_table, entries
from reknit.planner.tiling import SHOWN
from reknit.types.manifest import FileTable, TablePlace
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.planner.columns import RankColumns
    from reknit.types.manifest import Manifest

    Ints = NDArray[np.int64]

KINDS = ("data", "blobs", "own")
"""The kinds of `format.paths.FileName` that a rank writes; `kind` in a receipt is an index of these."""


MAX_LISTED_FILES, MAX_LISTED_BLOCKS = 128, 2048
"""Limits of the files and blocks in a manifest of about 64 KiB; a larger table goes into the index."""


class ManifestContent(Struct, frozen=True):
    """The files that ranks wrote, in the order of ranks, with the rank of each; `urls` has the URL by rank.

    `kept` has item and FQN of the tensors that ranks keep as values of their own.
    """

    items: tuple[str, ...]
    files: FileTable
    ranks: Ints
    urls: list[str]
    warnings: list[str]
    kept: frozenset[tuple[str, str]]


def receipts_to_manifest(receipts: RankColumns, write_id: str) -> ManifestContent:
    """Return the content of the manifest from the receipts of all ranks.

    Receipts have these columns for each rank:

    - `urls` and `items`: tables of the places where ranks wrote, and of the items;
    - `plan`: 16 bytes as two numbers, or none;
    - `kept` and `unequal`: tables of item, FQN and ranks of copies that differ.

    For each file of a rank: `folder` (a number of the table `folders`, items), `kind` (a number of `KINDS`),
    `number` (part, or number of the own values), `nbytes` and `num_blocks`.  `digests` has the digests of the
    blocks of all its files.  For each file of own values, `places` has the names of its coordinate (a table),
    and `coordinates` their numbers.
    """
    lists, tables = receipts.lists, receipts.tables
    ranks = np.repeat(receipts.ranks, lists["folder"].counts)
    folder, kind, nbytes = (lists[name].flat() for name in ("folder", "kind", "nbytes"))
    if len(wrong := np.flatnonzero(num_blocks(nbytes) != lists["num_blocks"].flat())):
        rank = int(ranks[wrong[0]])
        raise ProtocolError(f"rank {rank} reports a file with more or fewer digests than blocks", rank=rank)
    items = tuple(tables["items"])
    numbers = {item: number for number, item in enumerate(items)}
    item = np.array([numbers.get(name, len(items)) for name in tables["folders"]], np.int32)[folder]
    place = np.full(len(kind), -1, np.int32)
    place[kind == KINDS.index("own")] = lists["places"].flat()
    files = FileTable(
        paths=paths.rank_paths(
            tables["folders"], folder, ranks, _tails(kind, lists["number"].flat(), write_id)
        ),
        nbytes=nbytes,
        digests=lists["digests"].flat().view(np.uint64),
        item=np.where(kind == KINDS.index("data"), np.int32(-1), item),
        place=place,
        places=tuple(tables["places"]),
        coordinates=lists["coordinates"].flat(),
    )
    urls = [tables["urls"][url] for url in lists["urls"].flat().tolist()]
    unequal = frozenset((item, fqn) for item, fqn, _ in tables["unequal"])
    kept = frozenset((item, fqn) for item, fqn, _ in tables["kept"]) - unequal
    warnings = _differing_copies(tables) + _shared_places(files, items, ranks)
    return ManifestContent(items=items, files=files, ranks=ranks, urls=urls, warnings=warnings, kept=kept)


def list_files(manifest: Manifest, index: bytes, files: FileTable) -> tuple[bytes, Manifest]:
    """Return the bytes of the index, and a manifest that lacks only the entry of this file."""
    if len(files.paths) <= MAX_LISTED_FILES and len(files.digests) <= MAX_LISTED_BLOCKS:
        own, values = entries(files, manifest.block_nbytes), blobs(files, manifest.items)
        return index, replace(manifest, files=own, blobs=values)
    from reknit.format.index.parquet import with_section  # only thousands of files need a table

    table = encode_table(files, manifest)
    data, start = with_section(index, table)
    place = TablePlace(start, len(table), len(files.paths), sum(files.nbytes.tolist()))
    return data, replace(manifest, table=place)


def _tails(kinds: Ints, numbers: Ints, write_id: str) -> list[str]:
    """Return the part of each path after the rank."""
    tails = {}
    both = (numbers << 8 | kinds).tolist()
    for each in set(both):
        number, kind = divmod(each, 1 << 8)
        own = number if KINDS[kind] == "own" else None
        data = KINDS[kind] == "data"
        tails[each] = paths.data_tail(write_id, number) if data else paths.blob_tail(write_id, own)
    return [tails[each] for each in both]


def _differing_copies(tables: Mapping[str, list[Any]]) -> list[str]:
    """Return warnings for tensors whose copies differ, for kept and for unequal copies."""
    lines = []
    for table, what in (
        (
            "kept",
            "each rank's copy was stored, and loads on the same number of ranks only. "
            "Make them equal, or wrap them in reknit.PerRank",
        ),
        (
            "unequal",
            "one rank's copy was stored. Make them equal, or wrap them in reknit.PerRank to keep each",
        ),
    ):
        if names := [f"{full_name(item, fqn)} (ranks {ranks})" for item, fqn, ranks in tables[table]]:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"ranks hold different values of {', '.join(names[:SHOWN])}{more}; {what}.")
    return lines


def _shared_places(files: FileTable, items: Sequence[str], ranks: Ints) -> list[str]:
    """Return a warning for every coordinate under which several ranks saved different values."""
    sizes = np.array([len(names) for names in files.places], np.int64)
    own = np.flatnonzero(files.place >= 0)
    counts = sizes[files.place[own]]
    begins = np.cumsum(counts) - counts
    blocks = num_blocks(files.nbytes)
    first = np.cumsum(blocks) - blocks
    lines = []
    for number, names in enumerate(files.places):
        here = np.flatnonzero(files.place[own] == number)
        numbers = files.coordinates[begins[here, None] + np.arange(len(names))]
        keys = np.column_stack((files.item[own[here]], numbers))
        order = np.lexsort(keys.T[::-1])
        changes = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
        for group in np.split(order, np.flatnonzero(changes) + 1) if not changes.all() else []:
            holders: dict[bytes, list[int]] = {}
            for file in own[here[group]].tolist():
                digests = files.digests[first[file] : first[file] + blocks[file]]
                holders.setdefault(digests.tobytes(), []).append(int(ranks[file]))
            if len(holders) > 1:
                shown = ", ".join(str(rank) for group in holders.values() for rank in group[:4])
                place = dict(zip(names, numbers[group[0]].tolist(), strict=True))
                item = items[keys[group[0], 0]]
                lines.append(
                    f"ranks {shown} saved different values of {item} under one coordinate {place}; "
                    "a load restores the first value on each of them. Give each rank a coordinate of its own."
                )
    return lines
