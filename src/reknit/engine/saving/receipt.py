"""The receipt of a rank for the files that it wrote, and the writing of files of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from reknit.engine.packed_columns import unpacked
from reknit.engine.saving.manifest_content import KINDS
from reknit.engine.saving.packing import Sections
from reknit.engine.small_files import write_small
from reknit.format import paths
from reknit.planner.columns import NOTHING, columns_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reknit.engine import round_messages
    from reknit.engine.saving.claims import EncodedFile
    from reknit.engine.saving.compared_copies import CopySplit
    from reknit.engine.saving.save_job import SaveJob
    from reknit.engine.small_files import Written
    from reknit.planner.columns import RankColumns

_Value = TypeVar("_Value")

_MOST_WRITERS = 64
"""Files of blobs that are written at once, since a request to an object store takes tens of milliseconds."""


def write_blobs(
    job: SaveJob, files: Sequence[EncodedFile], write_id: str, written: list[Written]
) -> list[dict[str, int]]:
    """Write the files of blobs of a rank, add each to `written`, and return the coordinates of its values.

    Several files are written at once, unless the options allow only one thread: many small files wait for
    requests rather than for the disk.
    """
    storage, threads = job.storage, job.options.threads
    places: list[dict[str, int]] = []
    named: list[tuple[str, bytes]] = []
    for file in files:
        number = None if file.coordinate is None else len(places)
        path = paths.blob_path(file.item, job.group.rank, write_id, own=number)
        named.append((path, file.data))
        if file.coordinate is not None:
            places.append(file.coordinate)
    here = f"{storage.url}/{named[0][0]}" if len(named) == 1 else storage.url
    if named:
        with job.recorder.phase("write", path=here, nbytes=sum([len(data) for _, data in named])):
            write_small(storage, named, written, threads=1 if threads == 1 else _MOST_WRITERS)
    return places


def receipt(
    job: SaveJob,
    items: Sequence[str],
    written: Sequence[Written],
    *,
    plan: bytes,
    columns: round_messages.ArrayColumns | None,
    places: Sequence[Mapping[str, int]],
    copies: CopySplit,
) -> Sections:
    """Return the receipt of a rank for the root, after its files are written (see `manifest_content`).

    `plan` identifies the layout of its holdings; `columns` is None if the root has the columns of this plan.
    """
    rank = job.group.rank
    names = [name for file in written if (name := paths.parse_path(file.path)) is not None]
    folder, folders = _numbered([name.item or "" for name in names])
    place, kinds = _numbered([tuple(sorted(place)) for place in places])
    own = columns_of(
        rank,
        {
            "urls": [job.storage.url],
            "items": list(dict.fromkeys(items)),
            "folders": folders,
            "kept": copies.kept,
            "unequal": copies.unequal,
        },
        {
            "plan": (unpacked(plan, "i8"), ""),
            "folder": (folder, "folders"),
            "kind": ([KINDS.index(name.kind) for name in names], ""),
            "number": ([name.part for name in names], ""),
            "nbytes": ([file.nbytes for file in written], ""),
            "num_blocks": ([len(file.digests) for file in written], ""),
            "digests": (np.concatenate([np.zeros(0, np.uint64), *[file.digests for file in written]]), ""),
            "coordinates": ([n for place in places for _, n in sorted(place.items())], ""),
        },
    )
    own = own.with_names("places", kinds, place)
    return Sections(own, NOTHING if columns is None else chunks_said(rank, columns))


def chunks_said(rank: int, columns: round_messages.ArrayColumns) -> RankColumns:
    """Return a rank's chunks in the form that the root merges (`planner.assemble.widened`)."""
    offsets, lengths = (
        unpacked(c, "i8").reshape(-1, columns.ndim) for c in (columns.offsets, columns.lengths)
    )
    folder, folders = _numbered([item for item, _ in columns.files])
    boxes = {f"offset.{d}": (offsets[:, d], "") for d in range(columns.ndim)}
    boxes |= {f"length.{d}": (lengths[:, d], "") for d in range(columns.ndim)}
    return columns_of(
        rank,
        {"tensors": columns.tensors, "folders": folders, "aliases": list(dict.fromkeys(columns.aliases))},
        {
            "tensor": (unpacked(columns.tensor, "i8"), "tensors"),
            **boxes,
            "file": (unpacked(columns.file, "i8"), ""),
            "start": (unpacked(columns.start, "i8"), ""),
            "nbytes": (unpacked(columns.nbytes, "i8"), ""),
            "folder": (folder, "folders"),
            "part": ([part for _, part in columns.files], ""),
        },
    )


def _numbered(values: Sequence[_Value]) -> tuple[list[int], list[_Value]]:
    """Return the number of each value among the distinct values, and the distinct values."""
    numbers: dict[_Value, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values], list(numbers)
