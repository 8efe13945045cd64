"""The metadata that the root reads once for all ranks of a load, and the part of each rank.

The root has all rows.  A rank sends a bit for each tensor that it takes.  Tensors that the same ranks take
are sent together, in blocks that are encoded once for all of these ranks.  So the root's work grows with the
index and with the number of different requests, not with the number of ranks.  Ranks that take the same
tensors (data parallel, FSDP, tensor parallel) receive one answer, which the tree sends once.  A rank decodes
one block at a time, and keeps only the rows in its own boxes.  See docs/decisions/0008.
"""

from __future__ import annotations

import hashlib
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, structs
from msgspec.structs import replace as replace_struct

from reknit.engine import messages
from reknit.engine.loading.match import uncovered
from reknit.engine.stored.file_checks import read_once
from reknit.engine.stored.opening import Contents, opened, read_opened, unknown_items
from reknit.engine.stored.places import files_at
from reknit.engine.stored.renaming import Naming
from reknit.format.checksum import num_blocks
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.planner.columns import Name, distinct, left_over, packed, spread, taken_numbers, unpacked
from reknit.planner.pieces import box_columns
from reknit.types.manifest import FileEntry, Index, TensorEntry
from reknit.types.shard import TensorSpec
from reknit.types.small import decoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from mmap import mmap

    from numpy.typing import NDArray

    from reknit.engine.loading.match import Fill
    from reknit.engine.loading.task import LoadTask
    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.types.manifest import Manifest
    from reknit.types.wanted import Wanted

    Ints = NDArray[np.int64]


BLOCK_ROWS = 1 << 16
"""Rows of a block; all rows of a tensor are in one block."""

MAX_KINDS = 1 << 12
"""Sets of ranks that distinguish tensors; with more sets, ranks receive rows that they do not need."""

_SMALL_NBYTES = 64 << 10
"""Columns up to this size are not compressed: the rank of a small checkpoint needs no library for it."""

_FAR = (1 << 63) - 1


class Reach(Struct, frozen=True):
    """A box around the wanted parts of each tensor of a rank's index: from `low` up to `high`, excluded."""

    low: Ints
    high: Ints

    @classmethod
    def of(cls, index: Index, fills: Sequence[Fill], wanted: Wanted) -> Reach:
        """Return the reach of these fills; tensors tied to wanted ones share their place."""
        width = index.offsets.shape[1]
        begin, size = box_columns([fill.box for fill in fills], width)
        tensor = np.array([fill.tensor for fill in fills], np.int64)
        low = np.full((len(index.tensors), width), _FAR, np.int64)
        high = np.zeros((len(index.tensors), width), np.int64)
        np.minimum.at(low, tensor, begin)
        np.maximum.at(high, tensor, begin + size)
        for item, fqn, *of in wanted.aliases:
            alias, tied = index.ids[item, fqn], index.ids.get((of[0], of[1]))
            if tied is not None:
                low[alias], high[alias] = low[tied], high[tied]
        return cls(low, high)

    def touched(self, tensor: Ints, offsets: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Return the chunks that have elements in the boxes around the wanted parts of their tensors."""
        inside = np.ones(len(tensor), np.bool_)
        for axis in range(offsets.shape[1]):
            inside &= offsets[:, axis] < self.high[tensor, axis]
            inside &= offsets[:, axis] + lengths[:, axis] > self.low[tensor, axis]
        return inside


class _Block(msgspec.Struct, array_like=True):
    """All rows of some tensors of an item, as columns of differences: `kinds` has the type of each.

    For each tensor, columns have its number in the item, and its number of rows.  For each row, columns have
    offsets and lengths by dimension, file and start.  `nbytes` is the size of these columns; `body` has them
    compressed if it is smaller.
    """

    item: str
    num_tensors: int
    num_rows: int
    kinds: list[str]
    nbytes: int
    body: bytes


_decode = decoder(_Block)


def blocks_for(index: Index, files: Ints, requests: Sequence[Ints]) -> list[list[bytes]]:
    """Return, for each request of numbers of tensors, the blocks with all rows of these tensors.

    `files` are the numbers of files that all ranks use.
    """
    wanted = np.zeros(len(index.tensors), np.bool_)
    # Tensors with equal sums are in the same requests.  If two sums are equal by chance, ranks receive rows
    # of tensors that they did not request, and drop them.
    marks = np.array([_number(request) for request in range(len(requests))], np.uint64)
    sums = np.zeros(len(index.tensors), np.uint64)
    for numbers, mark in zip(requests, marks, strict=True):
        wanted[numbers] = True
        sums[numbers] += mark
    block, members = _cut(index, sums, np.flatnonzero(wanted))
    first = first_numbers(index)
    encoded = [encode_block(index, files, first, numbers) for numbers in members]
    return [[encoded[number] for number in distinct(block[numbers])] for numbers in requests]


def _number(request: int) -> int:
    """Return a number that looks random.  `numpy.random` takes longer to import than all of this takes."""
    return int.from_bytes(hashlib.blake2b(request.to_bytes(8, "little"), digest_size=8).digest(), "little")


def _cut(index: Index, sums: NDArray[np.uint64], tensors: Ints) -> tuple[Ints, list[Ints]]:
    """Return the block of each tensor, and the tensors of each block, ascending."""
    places = {item: number for number, item in enumerate(dict.fromkeys(e.item for e in index.tensors))}
    item = np.array([places[entry.item] for entry in index.tensors], np.int64)[tensors]
    distinct, kind = np.unique(sums[tensors], return_inverse=True)
    if len(distinct) > MAX_KINDS:
        kind = kind * MAX_KINDS // len(distinct)
    order = np.lexsort((kind, item))
    rows = (index.first[tensors + 1] - index.first[tensors])[order]
    part = (np.cumsum(rows) - rows) // BLOCK_ROWS
    key = np.stack((item[order], kind[order], part))
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    block = np.zeros(len(index.tensors), np.int64)
    block[tensors[order]] = np.cumsum(fresh) - 1
    return block, np.split(tensors[order], np.flatnonzero(fresh)[1:]) if len(order) else []


def first_numbers(index: Index) -> dict[str, int]:
    """Return the number of each item's first tensor."""
    first: dict[str, int] = {}
    for number, entry in enumerate(index.tensors):
        first.setdefault(entry.item, number)
    return first


def encode_block(index: Index, files: Ints, first: dict[str, int], tensors: Ints) -> bytes:
    """Return the block of some tensors of one item."""
    counts = index.first[tensors + 1] - index.first[tensors]
    rows = spread(index.first[tensors], counts)
    item, width = index.tensors[tensors[0]].item, max(1, *(len(index.tensors[t].spec.shape) for t in tensors))
    columns = [_steps(tensors - first[item]), _steps(counts)]
    columns += [
        _steps(boxes[rows, axis]) for boxes in (index.offsets, index.lengths) for axis in range(width)
    ]
    columns += [_steps(files[index.file[rows]]), _steps(index.start[rows])]
    plain = b"".join(column.tobytes() for column in columns)
    body = plain if len(plain) <= _SMALL_NBYTES else _compressed(plain)
    kinds = [column.dtype.str for column in columns]
    return msgspec.msgpack.encode(
        _Block(
            item=item, num_tensors=len(tensors), num_rows=len(rows), kinds=kinds, nbytes=len(plain), body=body
        )
    )


def _compressed(plain: bytes) -> bytes:
    import pyarrow as pa

    packed: bytes = pa.Codec("zstd", compression_level=1).compress(plain, asbytes=True)
    return min(plain, packed, key=len)


def _decompressed(block: _Block) -> bytes:
    if len(block.body) == block.nbytes:
        return block.body
    import pyarrow as pa

    plain: bytes = pa.Codec("zstd").decompress(block.body, decompressed_size=block.nbytes, asbytes=True)
    return plain


def _steps(column: Ints) -> NDArray[np.signedinteger]:
    """Return the difference of each number to its predecessor, in the smallest type that fits all."""
    steps = np.diff(column, prepend=0)
    low, high = int(steps.min()), int(steps.max())
    nbytes = next(n for n in (1, 2, 4, 8) if -(1 << 8 * n - 1) <= low and high < 1 << 8 * n - 1)
    return steps.astype(f"<i{nbytes}")


class Rows(NamedTuple):
    """Rows of an index, as columns; `file` has numbers that all ranks use."""

    tensor: Ints
    offsets: Ints
    lengths: Ints
    file: Ints
    start: Ints


def rows_of(index: Index, blocks: Sequence[bytes], reach: Reach) -> Rows:
    """Return the rows of the blocks that a rank needs, in the order of its index, which has no rows yet."""
    first, width = first_numbers(index), index.offsets.shape[1]
    empty = np.zeros(0, np.int64)
    boxes = np.zeros((0, width), np.int64)
    parts = [Rows(empty, boxes, boxes, empty, empty)]
    parts += [_decoded(block, first, width, reach) for block in blocks]
    rows = Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    order = np.argsort(rows.tensor, kind="stable")
    return Rows(*(column[order] for column in rows))


def _decoded(data: bytes, first: dict[str, int], width: int, reach: Reach) -> Rows:
    """Return the rows of a block that a rank needs."""
    block = _decode(data)
    plain = _decompressed(block)
    at, columns = 0, []
    for number, kind in enumerate(block.kinds):
        steps = np.frombuffer(plain, kind, block.num_tensors if number < 2 else block.num_rows, at)
        at += steps.nbytes
        columns.append(np.cumsum(steps, dtype=np.int64))
    numbers, counts, *sides, file, start = columns
    tensor = np.repeat(numbers + first[block.item], counts)
    ndim = len(sides) // 2
    offsets, lengths = np.zeros((len(tensor), width), np.int64), np.ones((len(tensor), width), np.int64)
    for axis in range(ndim):
        offsets[:, axis], lengths[:, axis] = sides[axis], sides[ndim + axis]
    kept = reach.touched(tensor, offsets, lengths)
    return Rows(*(column[kept] for column in (tensor, offsets, lengths, file, start)))


def kept(index: Index, reach: Reach) -> Index:
    """Return the index with all its tensors, and only the rows that a rank needs."""
    rows = np.flatnonzero(reach.touched(index.tensor, index.offsets, index.lengths))
    if len(rows) == len(index.tensor):
        return index
    columns = (index.tensor, index.offsets, index.lengths, index.file, index.start)
    return with_rows(index, Rows(*(column[rows] for column in columns)), index.files)


def with_rows(index: Index, rows: Rows, paths: Sequence[str] | Mapping[int, str]) -> Index:
    """Return the index with these rows instead of its own; `paths` maps numbers of files."""
    used = np.bincount(rows.file) > 0
    return replace_struct(
        index,
        files=tuple(paths[number] for number in np.flatnonzero(used).tolist()),
        tensor=rows.tensor,
        offsets=rows.offsets,
        lengths=rows.lengths,
        file=(np.cumsum(used) - 1)[rows.file],
        start=rows.start,
        nbytes=rows.lengths.prod(axis=1) * index.itemsize[rows.tensor],
    )


_MOST_SENT = 16 << 20
"""Bytes of files of values that the root sends to other ranks; it and they have a few copies meanwhile."""


class RootMetadata(Struct, frozen=True):
    """On the root: the items that any rank loads, and the answer to each rank.

    Ranks with the same request share one answer, which is sent once.  `tensors` are all tensors of the
    checkpoint.
    """

    checkpoint: OpenCheckpoint
    answers: list[messages.ItemContents]
    tensors: tuple[TensorEntry, ...] = ()

    @property
    def places(self) -> dict[str, int]:
        """The numbers that all ranks use for files, by path."""
        return {file.path: number for number, file in enumerate(self.checkpoint.manifest.files)}

    def with_rows(self, checkpoint: OpenCheckpoint, reach: Reach, _: messages.Answer) -> OpenCheckpoint:
        """Return the root's own part of the checkpoint, with the rows of its index that it needs."""
        return structs.replace(checkpoint, index=kept(checkpoint.index, reach))


class ReceivedMetadata(Struct, frozen=True):
    """On another rank: the items that it requested, without the rows of the index."""

    checkpoint: OpenCheckpoint
    files: messages.Files

    @classmethod
    def of(cls, message: messages.ItemContents, task: LoadTask) -> ReceivedMetadata:
        """Open the items in the root's answer."""
        tensors = [TensorEntry(i, fqn, TensorSpec(shape, dtype)) for i, fqn, dtype, shape in message.tensors]
        manifest = structs.replace(decode_manifest(message.manifest), other=message.other)
        blobs = message.blobs | _read_unsent(message.unsent, manifest, task)
        contents = Contents(manifest, names_only(tensors), blobs, message.own)
        checkpoint = opened(task.storage, contents, task.items, task.options, task.replicas, writable=True)
        return cls(checkpoint, message.files)

    @property
    def places(self) -> dict[str, int]:
        """The numbers that all ranks use for files, by path."""
        return dict(zip(self.files.paths, unpacked(self.files.numbers, "i8").tolist(), strict=True))

    def with_rows(self, checkpoint: OpenCheckpoint, reach: Reach, answer: messages.Answer) -> OpenCheckpoint:
        """Return a part of the checkpoint with the rows that it needs, and the files of these rows."""
        rows = rows_of(checkpoint.index, answer.blocks, reach)
        manifest = checkpoint.manifest
        entries = _entries(self.files, set(distinct(rows.file)), manifest.block_nbytes)
        index = with_rows(checkpoint.index, rows, {n: file.path for n, file in entries.items()})
        new = [file for file in entries.values() if file.path not in checkpoint.files]
        return structs.replace(
            checkpoint, index=index, manifest=structs.replace(manifest, files=(*manifest.files, *new))
        )


def read_for_all(task: LoadTask, wanted: Sequence[messages.Items]) -> RootMetadata:
    """Read the items that ranks load; the root alone opens the manifest, the index and the shared values.

    With transforms of names, any item may hold wanted entries, so all items are read, and all names are sent
    to all ranks.  With ``verify="full"`` all ranks get the whole manifest, with the digests of all files.
    Raises `MismatchError` for an item that is needed and missing, and the errors of `opened`.
    """
    items = list(dict.fromkeys(item for rank in wanted for item in rank.names))
    optional = {item for rank in wanted for item in rank.optional}
    renaming = Naming.of(task.options) is not None
    contents = read_opened(
        task.storage,
        None if renaming else items,
        own=renaming,
        replicas=task.replicas,
        most_kept=0 if len(wanted) == 1 else _MOST_SENT,
    )
    whole = opened(task.storage, contents, items, task.options, task.replicas, writable=True)
    known = whole.offered
    if absent := [item for item in items if item not in known and item not in optional]:
        remedy = "leave the others out of `state`, or name those to load in `items`"
        if not set(items).intersection(known):  # such as a state_dict without the name of its item
            remedy = f"pass the targets by these names: {{{', '.join(f'{item!r}: ...' for item in known)}}}"
        raise unknown_items(absent, known, contents.manifest, task.storage.url, remedy)
    everything = frozenset(contents.manifest.items)
    with_digests = task.options.verify == "full" and contents.manifest.other is None
    # The root keeps the whole contents, so it gets no answer.
    parts: dict[frozenset[str], messages.ItemContents] = {}
    for rank in wanted[1:]:
        if (asked := frozenset(rank.names)) not in parts:
            parts[asked] = _part(contents, everything if renaming else asked, whole_manifest=with_digests)
    answers = [messages.NO_CONTENTS, *(parts[frozenset(rank.names)] for rank in wanted[1:])]
    return RootMetadata(whole.of_items(items), answers, whole.index.tensors)


def _part(contents: Contents, items: AbstractSet[str], *, whole_manifest: bool) -> messages.ItemContents:
    """Return the part of the contents that concerns these items.

    A checkpoint of ten thousand ranks has a manifest of several megabytes, most of it digests of files.
    """
    manifest = contents.manifest
    blobs = tuple(blob for blob in manifest.blobs if blob.item in items)
    named = {manifest.index_path, *(blob.path for blob in blobs)}
    part = structs.replace(manifest, files=tuple(f for f in manifest.files if f.path in named), blobs=blobs)
    index = contents.index.of_items(items)
    return messages.ItemContents(
        manifest=encode_manifest(structs.replace(manifest if whole_manifest else part, other=None)),
        tensors=[(e.item, e.fqn, e.spec.dtype, e.spec.shape) for e in index.tensors],
        files=_columns(manifest, frozenset(index.files)),
        blobs={path: bytes(data) for path, data in contents.blobs.items() if path in named - contents.once},
        own=contents.own,
        other=manifest.other,
        unsent=sorted(named & contents.once),
    )


def _read_unsent(paths: Sequence[str], manifest: Manifest, task: LoadTask) -> dict[str, bytearray | mmap]:
    """Read the files of values that the root does not send, and that are in memory once so."""
    files = {file.path: file for file in manifest.files}
    storage = files_at(task.storage, manifest.moved_to)
    return {
        path: task.within_deadline(
            "reading values of",
            partial(read_once, storage, files[path], manifest.block_nbytes, task.replicas),
        )
        for path in paths
    }


def _columns(manifest: Manifest, paths: AbstractSet[str]) -> messages.Files:
    """Return the entries of files as columns."""
    numbers = [number for number, file in enumerate(manifest.files) if file.path in paths]
    files = [manifest.files[number] for number in numbers]
    digests = np.fromiter(chain.from_iterable(file.digests for file in files), np.uint64)
    return messages.Files(
        packed(numbers, "i8"),
        [file.path for file in files],
        packed([file.nbytes for file in files], "i8"),
        packed(digests, "u8"),
    )


def _entries(files: messages.Files, numbers: AbstractSet[int], block_nbytes: int) -> dict[int, FileEntry]:
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


class Handout(Struct, frozen=True):
    """On the root: an answer for each rank, names that no rank takes, and faults of the index.

    `items` are the items of the checkpoint that no rank requested.
    """

    answers: list[messages.Answer]
    left: list[Name]
    damaged: list[str]
    items: list[str]


def hand_out(checkpoint: OpenCheckpoint, asked: Sequence[messages.Asked]) -> Handout:
    """Return the requested rows of the index for each rank; equal answers are one object.

    The answer to the root has no rows: it has them in memory.
    """
    index = checkpoint.index
    first = first_numbers(index)
    requests = [tuple(sorted(rank.tensors.items())) for rank in asked]
    taken = {request: taken_numbers(first, dict(request)) for request in dict.fromkeys(requests)}
    others = list(dict.fromkeys(requests[1:]))
    places = {file.path: number for number, file in enumerate(checkpoint.manifest.files)}
    files = np.array([places[path] for path in index.files], np.int64)
    blocks = blocks_for(index, files, [taken[request] for request in others]) if others else []
    # An answer names only the ranks with its request: those of all would be most of the bytes.
    alike: dict[object, list[tuple[int, int]]] = {}
    for number, (request, rank) in enumerate(zip(requests, asked, strict=True)):
        alike.setdefault(request, []).append((number, rank.boxes))
    rows = {r: messages.Answer(own, packed(alike[r], "u8")) for r, own in zip(others, blocks, strict=True)}
    return Handout(
        [messages.Answer([], packed(alike[requests[0]], "u8")), *(rows[request] for request in requests[1:])],
        _left(checkpoint, asked),
        uncovered(index, frozenset(np.concatenate(list(taken.values())).tolist())),
        [item for item in checkpoint.offered if item not in checkpoint.items],
    )


def _left(checkpoint: OpenCheckpoint, asked: Sequence[messages.Asked]) -> list[Name]:
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
