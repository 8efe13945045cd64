"""The metadata that the root reads once for all ranks of a load, and the part of each rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct, structs

from reknit.engine import round_messages
from reknit.engine.loading import index_part
from reknit.engine.loading.match import uncovered
from reknit.engine.packed_columns import Name, left_over, packed, taken_numbers, unpacked
from reknit.engine.record.file_checks import read_once
from reknit.engine.stored.opening import Contents, opened, read_opened, unknown_items
from reknit.engine.stored.places import files_at
from reknit.engine.stored.renaming import Naming
from reknit.format.checksum import num_blocks
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.planner.columns import distinct
from reknit.types.manifest import FileEntry, Index, TensorEntry
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet
    from mmap import mmap

    from reknit.engine.loading.index_part import Reach
    from reknit.engine.loading.load_job import LoadJob
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.types.manifest import Manifest


_MOST_SENT = 16 << 20
"""Bytes of files of values that the root sends to other ranks; it and they have a few copies meanwhile."""


class RootMetadata(NamedTuple):
    """On the root: the items that any rank loads, and the answer to each rank.

    Ranks with the same request share one answer, which is sent once.  `tensors` are all tensors of the
    checkpoint.
    """

    checkpoint: OpenCheckpoint
    answers: list[round_messages.ItemContents]
    tensors: tuple[TensorEntry, ...] = ()

    def with_rows(self, checkpoint: OpenCheckpoint, reach: Reach, _: round_messages.Answer) -> OpenCheckpoint:
        """Return the root's own part of the checkpoint, with the rows of its index that it needs."""
        return replace(checkpoint, index=index_part.kept(checkpoint.index, reach))


class ReceivedMetadata(Struct, frozen=True):
    """On another rank: the items that it requested, without the rows of the index."""

    checkpoint: OpenCheckpoint
    files: round_messages.Files

    @classmethod
    def of(cls, message: round_messages.ItemContents, job: LoadJob) -> ReceivedMetadata:
        """Open the items in the root's answer."""
        tensors = [TensorEntry(i, fqn, TensorSpec(shape, dtype)) for i, fqn, dtype, shape in message.tensors]
        manifest = structs.replace(decode_manifest(message.manifest), other=message.other)
        blobs = message.blobs | _read_unsent(message.unsent, manifest, job)
        contents = Contents(manifest, names_only(tensors), blobs, message.own)
        checkpoint = opened(job.storage, contents, job.items, job.options, job.replicas, writable=True)
        return cls(checkpoint, message.files)

    def with_rows(
        self, checkpoint: OpenCheckpoint, reach: Reach, answer: round_messages.Answer
    ) -> OpenCheckpoint:
        """Return a part of the checkpoint with the rows that it needs, and the files of these rows."""
        rows = index_part.rows_of(checkpoint.index, answer.blocks, reach)
        manifest = checkpoint.manifest
        entries = _entries(self.files, set(distinct(rows.file)), manifest.block_nbytes)
        index = index_part.with_rows(checkpoint.index, rows, {n: file.path for n, file in entries.items()})
        new = [file for file in entries.values() if file.path not in checkpoint.files]
        return replace(
            checkpoint, index=index, manifest=structs.replace(manifest, files=(*manifest.files, *new))
        )


def read_for_all(job: LoadJob, wanted: Sequence[round_messages.Items]) -> RootMetadata:
    """Read the items that ranks load; the root alone opens the manifest, the index and the shared values.

    With transforms of names, any item may hold wanted entries, so all items are read, and all names are sent
    to all ranks.  With ``verify="full"`` all ranks get the whole manifest, with the digests of all files.
    Raises `MismatchError` for an item that is needed and missing, and the errors of `opened`.
    """
    items = list(dict.fromkeys(item for rank in wanted for item in rank.names))
    optional = {item for rank in wanted for item in rank.optional}
    renaming = Naming.of(job.options) is not None
    contents = read_opened(
        job.storage,
        None if renaming else items,
        own=renaming,
        replicas=job.replicas,
        most_kept=0 if len(wanted) == 1 else _MOST_SENT,
    )
    whole = opened(job.storage, contents, items, job.options, job.replicas, writable=True)
    known = whole.offered
    if absent := [item for item in items if item not in known and item not in optional]:
        remedy = "leave the others out of `state`, or name those to load in `items`"
        if not set(items).intersection(known):  # such as a state_dict without the name of its item
            remedy = f"pass the targets by these names: {{{', '.join(f'{item!r}: ...' for item in known)}}}"
        raise unknown_items(absent, known, contents.manifest, job.storage.url, remedy)
    everything = frozenset(contents.manifest.items)
    with_digests = job.options.verify == "full" and contents.manifest.other is None
    # The root keeps the whole contents, so it gets no answer.
    parts: dict[frozenset[str], round_messages.ItemContents] = {}
    for rank in wanted[1:]:
        if (asked := frozenset(rank.names)) not in parts:
            parts[asked] = _part(contents, everything if renaming else asked, whole_manifest=with_digests)
    answers = [round_messages.NO_CONTENTS, *(parts[frozenset(rank.names)] for rank in wanted[1:])]
    return RootMetadata(whole.of_items(items), answers, whole.index.tensors)


def _part(
    contents: Contents, items: AbstractSet[str], *, whole_manifest: bool
) -> round_messages.ItemContents:
    """Return the part of the contents that concerns these items.

    A checkpoint of ten thousand ranks has a manifest of several megabytes, most of it digests of files.
    """
    manifest = contents.manifest
    blobs = tuple(blob for blob in manifest.blobs if blob.item in items)
    named = {manifest.index_path, *(blob.path for blob in blobs)}
    part = structs.replace(manifest, files=tuple(f for f in manifest.files if f.path in named), blobs=blobs)
    index = contents.index.of_items(items)
    return round_messages.ItemContents(
        manifest=encode_manifest(structs.replace(manifest if whole_manifest else part, other=None)),
        tensors=[(e.item, e.fqn, e.spec.dtype, e.spec.shape) for e in index.tensors],
        files=_columns(manifest, frozenset(index.files)),
        blobs={path: bytes(data) for path, data in contents.blobs.items() if path in named - contents.once},
        own=contents.own,
        other=manifest.other,
        unsent=sorted(named & contents.once),
    )


def _read_unsent(paths: Sequence[str], manifest: Manifest, job: LoadJob) -> dict[str, bytearray | mmap]:
    """Read the files of values that the root does not send, and that are in memory once so."""
    files = {file.path: file for file in manifest.files}
    storage = files_at(job.storage, manifest.moved_to)
    return {
        path: job.within_deadline(
            "reading values of",
            partial(read_once, storage, files[path], manifest.block_nbytes, job.replicas),
        )
        for path in paths
    }


def _columns(manifest: Manifest, paths: AbstractSet[str]) -> round_messages.Files:
    """Return the entries of files as columns."""
    numbers = [number for number, file in enumerate(manifest.files) if file.path in paths]
    files = [manifest.files[number] for number in numbers]
    digests = np.fromiter(chain.from_iterable(file.digests for file in files), np.uint64)
    return round_messages.Files(
        packed(numbers, "i8"),
        [file.path for file in files],
        packed([file.nbytes for file in files], "i8"),
        packed(digests, "u8"),
    )


def _entries(
    files: round_messages.Files, numbers: AbstractSet[int], block_nbytes: int
) -> dict[int, FileEntry]:
    """Return the entries of the files with these numbers."""
    digests, first = unpacked(files.digests, "u8"), 0
    entries = {}
    known = unpacked(files.numbers, "i8").tolist()
    sizes = unpacked(files.nbytes, "i8").tolist()
    for number, path, nbytes in zip(known, files.paths, sizes, strict=True):
        end = first + num_blocks(nbytes, block_nbytes)
        if number in numbers:
            entries[number] = FileEntry(path, nbytes, tuple(digests[first:end].tolist()))
        first = end
    return entries


def names_only(tensors: Sequence[TensorEntry]) -> Index:
    """Return an index with tensors, and without rows."""
    boxes = np.zeros((0, max((len(entry.spec.shape) for entry in tensors), default=1) or 1), np.int64)
    none = np.zeros(0, np.int64)
    return Index(
        tensors=tuple(tensors),
        files=(),
        tensor=none,
        offsets=boxes,
        lengths=boxes,
        file=none,
        start=none,
        nbytes=none,
    )


class Handout(NamedTuple):
    """On the root: an answer for each rank, names that no rank takes, and faults of the index.

    `items` are the items of the checkpoint that no rank requested.
    """

    answers: list[round_messages.Answer]
    left: list[Name]
    damaged: list[str]
    items: list[str]


def hand_out(checkpoint: OpenCheckpoint, asked: Sequence[round_messages.Asked]) -> Handout:
    """Return the requested rows of the index for each rank; equal answers are one object.

    The answer to the root has no rows: it has them in memory.
    """
    index = checkpoint.index
    first = index_part.first_numbers(index)
    requests = [tuple(sorted(rank.tensors.items())) for rank in asked]
    taken = {request: taken_numbers(first, dict(request)) for request in dict.fromkeys(requests)}
    others = list(dict.fromkeys(requests[1:]))
    places = {file.path: number for number, file in enumerate(checkpoint.manifest.files)}
    files = np.array([places[path] for path in index.files], np.int64)
    blocks = index_part.blocks_for(index, files, [taken[request] for request in others])
    alike = _alike([(request, rank.boxes) for request, rank in zip(requests, asked, strict=True)])
    rows = {request: round_messages.Answer(own, alike) for request, own in zip(others, blocks, strict=True)}
    return Handout(
        [round_messages.Answer([], alike), *(rows[request] for request in requests[1:])],
        _left(checkpoint, asked),
        uncovered(index, frozenset(np.concatenate(list(taken.values())).tolist())),
        [item for item in checkpoint.offered if item not in checkpoint.items],
    )


def _alike(wants: Sequence[object]) -> bytes:
    """Return a number for each rank, which ranks with equal requests share."""
    numbers = {want: number for number, want in enumerate(dict.fromkeys(wants))}
    return packed([numbers[want] for want in wants], "i4")


def _left(checkpoint: OpenCheckpoint, asked: Sequence[round_messages.Asked]) -> list[Name]:
    """Return the names of tensors and shared values that no rank takes or uses."""
    tensors = {tuple(rank.tensors.items()) for rank in asked}
    blobs = {tuple(rank.blobs.items()) for rank in asked}
    refused = {name for rank in asked for name in rank.refused}
    left = left_over(checkpoint.index.ids, [dict(each) for each in tensors])
    values = left_over(checkpoint.blob_names(), [dict(each) for each in blobs])
    left += [name for name in values if not _stands_for_more(checkpoint, *name)]
    return [name for name in left if name not in refused]


def _stands_for_more(checkpoint: OpenCheckpoint, item: str, fqn: str) -> bool:
    """Return whether a value is an empty container on this rank whose members other ranks saved."""
    value = checkpoint.blobs[item][fqn]
    if not isinstance(value, (dict, list, tuple)) or value:
        return False
    below = f"{fqn}/" if fqn else ""
    names = (*checkpoint.index.ids, *checkpoint.blob_names())
    return any(name.startswith(below) and name != fqn for of, name in names if of == item)
