"""What all ranks wrote in a save: the root merges their receipts."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.format import paths
from reknit.planner.assemble import SHOWN
from reknit.types.manifest import BlobFile, FileEntry
from reknit.types.shard import full_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.planner.columns import Blocks, RankColumns

KINDS = ("data", "blobs", "own")
"""What `kind` in a receipt counts: the kinds of `format.paths.FileName` that a rank writes."""


class ManifestContent(NamedTuple):
    """The files that ranks wrote, in the order of ranks, with who wrote each; `urls` are where, by rank.

    `kept` are item and FQN of tensors that ranks keep as values of their own.
    """

    items: tuple[str, ...]
    files: list[FileEntry]
    blobs: list[BlobFile]
    ranks: list[int]
    urls: list[str]
    warnings: list[str]
    kept: frozenset[tuple[str, str]]


def receipts_to_manifest(receipts: RankColumns, write_id: str) -> ManifestContent:
    """Count up all ranks' receipts of one save.

    The columns of receipts are, for each rank: `urls` (the table of where ranks wrote), `items` (the table of
    what they saved), `plan` (16 bytes as two numbers, or none), `kept` and `unequal` (tables of item, FQN and
    ranks of copies that differ), and for each of its files: `folder` (a number of the table `folders`,
    items), `kind` (a number of `KINDS`), `number` (part, or number of the own values), `nbytes`,
    `num_blocks`; `digests` are those of the blocks of all its files.  For each file of own values
    `places` has the names of its coordinate (a table), `coordinates` what follows them.
    """
    lists, tables = receipts.lists, receipts.tables
    ranks = np.repeat(receipts.ranks, lists["folder"].counts).tolist()
    items = [tables["folders"][folder] for folder in lists["folder"].flat().tolist()]
    kinds, numbers, nbytes = (lists[name].flat().tolist() for name in ("kind", "number", "nbytes"))
    names = [
        _path(item, rank, write_id, kind, number)
        for item, rank, kind, number in zip(items, ranks, kinds, numbers, strict=True)
    ]
    digests = _parts(lists["digests"], lists["num_blocks"])
    files = [
        FileEntry(path, size, tuple(own)) for path, size, own in zip(names, nbytes, digests, strict=True)
    ]
    coordinates = iter(_coordinates(receipts))
    blobs, own = [], []
    for k, kind in enumerate(kinds):
        if KINDS[kind] != "data":
            place = next(coordinates) if KINDS[kind] == "own" else None
            blobs.append(BlobFile(items[k], names[k], None if place is None else dict(place)))
            if place is not None:
                own.append((items[k], place, files[k].digests, ranks[k]))
    urls = [tables["urls"][url] for url in lists["urls"].flat().tolist()]
    unequal = frozenset((item, fqn) for item, fqn, _ in tables["unequal"])
    kept = frozenset((item, fqn) for item, fqn, _ in tables["kept"]) - unequal
    warnings = _differing_copies(tables) + _shared_places(own)
    return ManifestContent(tuple(tables["items"]), files, blobs, ranks, urls, warnings, kept)


def _path(item: str, rank: int, write_id: str, kind: int, number: int) -> str:
    """Return the path of a file."""
    if KINDS[kind] == "data":
        return paths.data_path(item, rank, write_id, number)
    return paths.blob_path(item, rank, write_id, own=number if KINDS[kind] == "own" else None)


def _parts(column: Blocks, sizes: Blocks) -> list[list[int]]:
    """Return the digests of all ranks in parts of the sizes that another column gives."""
    values = column.flat().view(np.uint64).tolist()
    bounds = np.concatenate(([0], np.cumsum(sizes.flat()))).tolist()
    return [values[begin:end] for begin, end in pairwise(bounds)]


_Place = tuple[tuple[str, int], ...]
"""The names and numbers of a coordinate, sorted."""


def _coordinates(receipts: RankColumns) -> list[_Place]:
    """Return the coordinate of every file of own values."""
    names = receipts.tables["places"]
    kinds = receipts.lists["places"].flat().tolist()
    numbers = iter(receipts.lists["coordinates"].flat().tolist())
    return [tuple((name, next(numbers)) for name in names[kind]) for kind in kinds]


def _differing_copies(tables: Mapping[str, list[Any]]) -> list[str]:
    """Return warnings for tensors whose copies differ: those that ranks keep, and those that they do not."""
    told = []
    for table, what in (
        (
            "kept",
            "each rank's own was stored, for as many ranks again; reknit.PerRank says that they are its own",
        ),
        (
            "unequal",
            "one rank's copy was stored. Make them equal, or wrap them in reknit.PerRank to keep each",
        ),
    ):
        if names := [f"{full_name(item, fqn)} (ranks {ranks})" for item, fqn, ranks in tables[table]]:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            told.append(f"ranks hold different values of {', '.join(names[:SHOWN])}{more}; {what}.")
    return told


def _shared_places(own: Sequence[tuple[str, _Place, tuple[int, ...], int]]) -> list[str]:
    """Return a warning for every coordinate under which several ranks saved different values."""
    holders: dict[tuple[str, _Place], dict[tuple[int, ...], list[int]]] = {}
    for item, place, digests, rank in own:
        holders.setdefault((item, place), {}).setdefault(digests, []).append(rank)
    told = []
    for (item, place), values in holders.items():
        if len(values) > 1:
            ranks = ", ".join(str(rank) for group in values.values() for rank in group[:4])
            told.append(
                f"ranks {ranks} saved different values of {item} under one coordinate {dict(place)}; "
                "a load gives all of them the first. Give each rank a coordinate of its own."
            )
    return told
