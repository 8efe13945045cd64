"""The end of a save, as every rank goes through it: its receipt, and the round in which all commit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from reknit.comm import base as comm
from reknit.engine import messages
from reknit.engine.saving.commit import clear_own_host, is_committed
from reknit.engine.saving.manifest_content import KINDS
from reknit.engine.saving.packing import merge_receipts, pack
from reknit.engine.saving.write import Written, discard, write_small
from reknit.errors import CommError, ReknitError
from reknit.format import paths
from reknit.planner.columns import NOTHING, said

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.engine.saving.claims import EncodedFile
    from reknit.engine.saving.commit import Destination
    from reknit.engine.saving.coordinator import Coordinator
    from reknit.engine.saving.copies import CopySplit
    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.planner.columns import RankColumns
    from reknit.storage.base import Storage

_Value = TypeVar("_Value")

_MOST_WRITERS = 64
"""Files of blobs that are on their way at once: an object store answers a request in tens of milliseconds."""

_BEFORE_RECEIPT = frozenset({"plan", "stage", "digest", "write"})
"""Phases of a rank's own writing; an error signed with one of them is no lost answer."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a save takes place."""

    group: comm.Group
    to: Destination
    options: SaveOptions
    recorder: Recorder


class BlobPlace(NamedTuple):
    """A file of values that a rank does not share with others, and their coordinate."""

    path: str
    coordinate: dict[str, int]


def write_blobs(
    storage: Storage,
    files: Sequence[EncodedFile],
    rank: int,
    write_id: str,
    recorder: Recorder,
    written: list[Written],
    *,
    threads: int | None = None,
) -> list[BlobPlace]:
    """Write a rank's files of blobs, adding each to `written`, and return where its own values are.

    Several files are written at once, unless `threads` is 1: they may be small and many, and then each waits
    for the store rather than for the disk.
    """
    places: list[BlobPlace] = []
    named: list[tuple[str, bytes]] = []
    for file in files:
        number = None if file.coordinate is None else len(places)
        path = paths.blob_path(file.item, rank, write_id, own=number)
        named.append((path, file.data))
        if file.coordinate is not None:
            places.append(BlobPlace(path, file.coordinate))
    here = f"{storage.url}/{named[0][0]}" if len(named) == 1 else storage.url
    if named:
        with recorder.phase("write", path=here, nbytes=sum(len(data) for _, data in named)):
            write_small(storage, named, written, threads=1 if threads == 1 else _MOST_WRITERS)
    return places


def receipt(
    where: Setting,
    items: Sequence[str],
    written: Sequence[Written],
    plan: bytes,
    columns: messages.ArrayColumns | None,
    places: Sequence[BlobPlace],
    copies: CopySplit,
) -> bytes:
    """Return what a rank tells the root when its files are written (`engine.tally`).

    `plan` stands for the layout of what it holds, and `columns` is None where the root knows those of this
    plan already.
    """
    rank = where.group.rank
    names = [parsed for parsed in (paths.parse_path(file.path) for file in written) if parsed is not None]
    folder, folders = _numbered([name.item or "" for name in names])
    place, kinds = _numbered([tuple(sorted(place.coordinate)) for place in places])
    own = said(
        rank,
        {
            "urls": [where.to.storage.url],
            "items": list(dict.fromkeys(items)),
            "folders": folders,
            "kept": copies.kept,
            "unequal": copies.unequal,
        },
        {
            "plan": (messages.unpacked(plan, "i8"), ""),
            "folder": (folder, "folders"),
            "kind": ([KINDS.index(name.kind) for name in names], ""),
            "number": ([name.part for name in names], ""),
            "nbytes": ([file.nbytes for file in written], ""),
            "num_blocks": ([len(file.digests) for file in written], ""),
            "digests": (np.concatenate([np.zeros(0, np.uint64), *(file.digests for file in written)]), ""),
            "coordinates": ([n for p in places for _, n in sorted(p.coordinate.items())], ""),
        },
    )
    own = own.with_names("places", kinds, place)
    return pack(own, NOTHING if columns is None else chunks_said(rank, columns))


def chunks_said(rank: int, columns: messages.ArrayColumns) -> RankColumns:
    """Return a rank's chunks as the root takes them (`planner.assemble.widened`)."""
    offsets, lengths = (
        messages.unpacked(c, "i8").reshape(-1, columns.ndim) for c in (columns.offsets, columns.lengths)
    )
    folder, folders = _numbered([item for item, _ in columns.files])
    boxes = {f"offset.{d}": (offsets[:, d], "") for d in range(columns.ndim)}
    boxes |= {f"length.{d}": (lengths[:, d], "") for d in range(columns.ndim)}
    return said(
        rank,
        {"tensors": columns.tensors, "folders": folders, "aliases": list(dict.fromkeys(columns.aliases))},
        {
            "tensor": (messages.unpacked(columns.tensor, "i8"), "tensors"),
            **boxes,
            "file": (messages.unpacked(columns.file, "i8"), ""),
            "start": (messages.unpacked(columns.start, "i8"), ""),
            "nbytes": (messages.unpacked(columns.nbytes, "i8"), ""),
            "folder": (folder, "folders"),
            "part": ([part for _, part in columns.files], ""),
        },
    )


def _numbered(values: Sequence[_Value]) -> tuple[list[int], list[_Value]]:
    """Return the different values, and before them which of these each is."""
    numbers: dict[_Value, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values], list(numbers)


def commit_round(
    where: Setting,
    coordinator: Coordinator,
    write_id: str,
    write: Callable[[list[Written]], bytes],
) -> tuple[messages.CommitOutcome, list[Written]]:
    """Let `write` write this rank's files, noting each in the list that it gets, and commit with all ranks.

    Return the outcome and the files.  After an error nothing of them is left, unless they may yet become part
    of a checkpoint.
    """
    written: list[Written] = []
    sent: list[bytes] = []

    def request() -> bytes:
        sent.append(write(written))
        return sent[0]

    try:
        with where.recorder.phase("commit"):
            answer = comm.round(
                where.group,
                "commit",
                request,
                lambda requests: coordinator.commit(where.to, write_id, requests),
                where.options.timeout_s,
                merge=merge_receipts,
                subject=write_id,
            )
        outcome = messages.decode(answer, messages.CommitOutcome)
    except BaseException as error:  # Ctrl-C too: what was written is part of a checkpoint, or litter
        coordinator.give_up()  # before the look at what is committed, which is then the last word
        committed = _clean_up(where, write_id, written, error, sent=bool(sent))
        # That somebody was interrupted after the commit, or is gone, takes nothing away from it.
        elsewhere = isinstance(error, CommError) or type(error) is ReknitError
        if not committed or not elsewhere:
            raise
        outcome = messages.CommitOutcome(
            0, [f"the checkpoint is committed, but the root's answer was lost: {error}"]
        )
    with suppress(ReknitError):  # what could not be deleted takes memory, until the next save to this path
        clear_own_host(where.to.storage, where.group, write_id)
    return outcome, written


def _clean_up(
    where: Setting, write_id: str, written: list[Written], error: BaseException, *, sent: bool
) -> bool | None:
    """After an error, delete what this rank wrote, unless it is, or may yet become, part of a checkpoint.

    Tells whether the checkpoint is committed all the same; None when nobody can know.
    """
    # The root decides only when it has the receipts of all ranks.
    committed: bool | None = False
    over = not sent or (isinstance(error, ReknitError) and error.phase in _BEFORE_RECEIPT)
    if not over:
        committed = is_committed(where.to.storage, write_id)
        # A rank that lost the answer, or was interrupted while it waited, cannot know how far the root is.
        told = isinstance(error, ReknitError) or where.group.rank == 0
        over = committed is False and told and not isinstance(error, CommError)
    if over:
        for file in written:
            discard(where.to.storage, file.path)
    return committed
