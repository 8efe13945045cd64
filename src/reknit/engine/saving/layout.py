"""The layout of a rank's data files, reused while its holdings keep their layout."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash
from msgspec import Struct

from reknit.engine import messages
from reknit.engine.memory.devices import Transfer
from reknit.engine.memory.images import Entries, Image, LiveImages
from reknit.engine.memory.workers import image_nbytes
from reknit.format import paths
from reknit.format.data_file import HeaderEntry, encode_header, file_metadata
from reknit.planner.columns import packed
from reknit.planner.save import plan_save

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reknit.engine.memory.images import Sources
    from reknit.types.shard import FilePlan, Holdings


class OutlinedFile(Struct, frozen=True):
    """A planned data file, with `write_id` in its header; all ids have the same length."""

    plan: FilePlan
    header: bytes
    write_id: str
    entries: Entries

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.plan.nbytes


class Outline(Struct, frozen=True):
    """The data files of a rank, and their chunks in the form of its receipt."""

    rank: int
    files: tuple[OutlinedFile, ...]
    columns: messages.ArrayColumns

    def images(self, write_id: str, sources: Sources) -> list[Image]:
        """Return the files of one save, to be filled from the `bits` of shards with this layout."""
        return [
            Image(
                paths.data_path(file.plan.item, self.rank, write_id, file.plan.part),
                file.header.replace(file.write_id.encode(), write_id.encode()),
                file.entries,
                file.nbytes,
                sources,
            )
            for file in self.files
        ]


class Owners(Struct, frozen=True):
    """The owners of the shards that a rank claimed, with the outlines of its earlier saves.

    `plan` stands for the files of its layout under these owners, and may have an outline in `outlines`.
    """

    plan: bytes
    of_claims: bytes
    outlines: Mapping[bytes, Outline]


class LiveFiles(Struct, frozen=True):
    """The data files of a rank in one save: their outline, and their bytes in live memory.

    `items` are those of the rank, also without a file.  `sources` are the `bits` of its shards.  `is_known`
    says whether an earlier save had the same `plan`.
    """

    plan: bytes
    items: Sequence[str]
    outline: Outline
    sources: Sources
    budget_nbytes: int | None
    is_known: bool

    @property
    def listed(self) -> list[tuple[str, int, int]]:
        """Item, part and size of each file."""
        return [(file.plan.item, file.plan.part, file.nbytes) for file in self.outline.files]

    @property
    def columns(self) -> messages.ArrayColumns | None:
        """The chunks in the files; None if the root has the chunks of this plan."""
        return None if self.is_known else self.outline.columns

    @property
    def nbytes(self) -> int:
        """Size of the arena that holds the files."""
        return image_nbytes([file.nbytes for file in self.outline.files])

    def images(self, write_id: str) -> list[Image]:
        """Return the files under a write id, to be filled from live memory."""
        return self.outline.images(write_id, self.sources)

    @contextmanager
    def source(self, write_id: str, timeout_s: float) -> Iterator[LiveImages]:
        """Return the bytes of the files under a write id, within a block in which devices copy them."""
        with Transfer(self.sources.on_devices, "what is saved", timeout_s) as transfer:
            yield LiveImages(self.images(write_id), transfer, self.budget_nbytes)


class FileCut(Struct, frozen=True):
    """The cut of a rank's data into files: see `planner.save.plan_save`."""

    max_file_nbytes: int
    num_parts: int = 1


def layout_digest(holdings: Holdings, cut: FileCut) -> bytes:
    """Return a digest of 16 bytes of the inputs of an outline: holdings without their values."""
    key = "layout", cut
    known: bytes | None = holdings.known.get(key)
    if known is None:
        known = holdings.known[key] = _layout_digest(holdings, cut)
    return known


def _layout_digest(holdings: Holdings, cut: FileCut) -> bytes:
    layout = (
        cut,
        holdings.items,
        [
            (s.item, s.fqn, s.spec.dtype, s.spec.shape, s.box.offsets, s.box.lengths, s.replicas, s.frozen)
            for s in holdings.shards
        ],
        [(a.item, a.fqn, a.of) for a in holdings.aliases],
    )
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(layout))


def outline(holdings: Holdings, rank: int, cut: FileCut) -> Outline:
    """Return the files of a rank whose shards all list their replicas; a layout is planned once."""
    key = "outline", rank, cut
    known: Outline | None = holdings.known.get(key)
    if known is None:
        known = holdings.known[key] = _outline(holdings, rank, cut)
    return known


def _outline(holdings: Holdings, rank: int, cut: FileCut) -> Outline:
    plan = plan_save(holdings.shards, rank, cut.max_file_nbytes, cut.num_parts)
    write_id = paths.new_write_id()
    files = tuple(
        OutlinedFile(file, _header(holdings, rank, file, write_id), write_id, Entries.of(file.entries))
        for file in plan.files
    )
    return Outline(rank, files, _columns(holdings, files))


def _header(holdings: Holdings, rank: int, file: FilePlan, write_id: str) -> bytes:
    """Return the header of a planned file."""
    entries = []
    for entry in file.entries:
        shard = holdings.shards[entry.shard]
        key = paths.entry_key(shard.fqn, shard.spec, entry.box)
        entries.append(HeaderEntry(key, shard.spec.dtype, entry.box.lengths, entry.start, entry.nbytes))
    here = {holdings.shards[entry.shard].fqn for entry in file.entries}
    aliases = {a.fqn: a.of for a in holdings.aliases if a.item == file.item and a.of in here}
    return encode_header(entries, file_metadata(write_id, rank, file.item, aliases))


def _columns(holdings: Holdings, files: Sequence[OutlinedFile]) -> messages.ArrayColumns:
    """Return the chunks of a rank's files as columns, with all tensors that it holds, even unwritten ones."""
    tensors: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    for shard in holdings.shards:
        tensors.setdefault((shard.item, shard.fqn, shard.spec.dtype, shard.spec.shape), len(tensors))
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int, int]] = []
    for number, file in enumerate(files):
        for entry in file.plan.entries:
            shard = holdings.shards[entry.shard]
            tensor = tensors[shard.item, shard.fqn, shard.spec.dtype, shard.spec.shape]
            start = len(file.header) + entry.start
            rows.append((tensor, entry.box.offsets, entry.box.lengths, number, start, entry.nbytes))
    ndim = max([len(row[1]) for row in rows], default=1) or 1
    fill = [(0,) * (ndim - n) for n in range(ndim + 1)], [(1,) * (ndim - n) for n in range(ndim + 1)]
    return messages.ArrayColumns(
        tensors=list(tensors),
        files=[(file.plan.item, file.plan.part) for file in files],
        ndim=ndim,
        tensor=packed([row[0] for row in rows], "i8"),
        offsets=packed([row[1] + fill[0][len(row[1])] for row in rows], "i8"),
        lengths=packed([row[2] + fill[1][len(row[2])] for row in rows], "i8"),
        file=packed([row[3] for row in rows], "i8"),
        start=packed([row[4] for row in rows], "i8"),
        nbytes=packed([row[5] for row in rows], "i8"),
        aliases=[(a.item, a.fqn, a.of) for a in holdings.aliases],
    )


PLANS_KEPT = 4
"""Number of plans that a rank keeps."""

_Kept = TypeVar("_Kept")


def keep_latest(kept: dict[bytes, _Kept], key: bytes, value: _Kept, most: int) -> _Kept:
    """Return a value that is kept as the latest; drop the oldest beyond `most` values.

    Another thread may clear `kept` meanwhile.
    """
    kept.pop(key, None)
    kept[key] = value
    for oldest in list(kept)[:-most]:
        kept.pop(oldest, None)
    return value
