"""What ranks tell the root, and what it answers: plain columns in MessagePack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from reknit.format import paths
from reknit.planner.assemble import Written

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from numpy.typing import NDArray


Message = TypeVar("Message")

encode = msgspec.msgpack.encode


def decode(data: bytes, kind: type[Message]) -> Message:
    """Return the message of this kind."""
    return msgspec.msgpack.decode(data, type=kind)


def packed(column: Any, kind: str) -> bytes:
    """Return a column of numbers as little-endian bytes."""
    return np.ascontiguousarray(column, np.dtype(kind).newbyteorder("<")).tobytes()


def unpacked(data: bytes, kind: str) -> NDArray[Any]:
    """Return the column that `packed` made."""
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<"))


class ShardClaims(msgspec.Struct, array_like=True):
    """The `shard_key`s and sizes, as columns, of shards of which a rank cannot know who else holds them."""

    keys: bytes
    nbytes: bytes


class Claims(msgspec.Struct, array_like=True):
    """Before a save's commit: what a rank holds of which only all ranks together can say who writes it.

    `write_id` is empty where the root has to choose one.  `step` is the one that the rank saves.  `plan`
    stands for the layout of all that the rank holds; `shards` is None where it is what the rank last claimed
    under this plan.
    """

    write_id: str
    step: int | None
    plan: bytes
    shards: ShardClaims | None
    blob_keys: bytes
    blob_digests: bytes


class Assignment(msgspec.Struct, array_like=True):
    """The root's answer to `Claims`: who writes each of those shards and blobs, and the id of this save."""

    write_id: str
    shard_owners: bytes
    blob_owners: bytes


class EncodedBlob(msgspec.Struct, array_like=True):
    """A value of a rank, already encoded: a file of blobs that holds just this one.

    `key` stands for item and FQN; `coordinate` is as in `types.shard.Blob`.
    """

    item: str
    key: int
    coordinate: dict[str, int] | None
    data: bytes


class FileReceipt(msgspec.Struct, array_like=True):
    """A file that a rank wrote, with the digests of its blocks."""

    path: str
    nbytes: int
    digests: bytes


class BlobReceipt(msgspec.Struct, array_like=True):
    """A file of blobs that a rank wrote."""

    item: str
    path: str
    coordinate: dict[str, int] | None


class Columns(msgspec.Struct, array_like=True):
    """The chunks that a rank writes (`planner.assemble.Written`); `files` are item and part of data files."""

    tensors: list[tuple[str, str, str, tuple[int, ...]]]
    files: list[tuple[str, int]]
    ndim: int
    tensor: bytes
    offsets: bytes
    lengths: bytes
    file: bytes
    start: bytes
    nbytes: bytes
    aliases: list[tuple[str, str, str]]

    def written(self, rank: int, write_id: str) -> Written:
        """Return the columns as arrays, for the files that a rank wrote in one save."""
        files = [paths.data_path(item, rank, write_id, part) for item, part in self.files]
        column = [unpacked(c, "i8") for c in (self.tensor, self.file, self.start, self.nbytes)]
        offsets, lengths = (unpacked(c, "i8").reshape(-1, self.ndim) for c in (self.offsets, self.lengths))
        tensor, file, start, nbytes = column
        return Written(self.tensors, files, tensor, offsets, lengths, file, start, nbytes, self.aliases)


class Receipt(msgspec.Struct, array_like=True):
    """After a save's writing: what a rank wrote, and the digests of the copies that it holds.

    `url` is where it wrote.  `plan` stands for the layout of what it holds, and `columns` is None where the
    root knows those of this plan already.  `copies` are `shard_key`s, `copy_digests` the digests of the
    bytes; the root compares them between ranks.
    """

    rank: int
    url: str
    items: list[str]
    files: list[FileReceipt]
    plan: bytes
    columns: Columns | None
    blobs: list[BlobReceipt]
    copies: bytes
    copy_digests: bytes
    copy_names: list[str]


class Outcome(msgspec.Struct, array_like=True):
    """The root's answer to `Receipt`: the checkpoint is committed."""

    total_nbytes: int
    warnings: list[str]


class OwnNames(msgspec.Struct, array_like=True):
    """The names of values that ranks saved for themselves; items in `unknown` may have more than these."""

    names: list[tuple[str, str]]
    unknown: list[str]


class Opened(msgspec.Struct, array_like=True):
    """The root's answer to `Items`: what it read of a checkpoint, as far as it is about these items.

    That is the manifest, the index, and the files of shared blobs.  The first two are files of format 1 with
    fewer entries: the manifest names all items, but only those files that belong to the wanted ones.
    `own` is there where things are to be renamed: no rank reads the files of others for the names in them.
    """

    manifest: bytes
    index: bytes
    blobs: dict[str, bytes]
    own: OwnNames | None = None


class Items(msgspec.Struct, array_like=True):
    """At the start of a load: the items that a rank wants, and those that it can do without."""

    names: list[str]
    optional: list[str]


class Offer(msgspec.Struct, array_like=True):
    """Before a load's reading: what a rank would read alone, and how it could share that with others.

    Ranks with equal `host` reach each other by `link`; `carries` tells whether bytes can go to other hosts.
    Reads do not cross multiples of `cell` bytes, and are verified as `verify` says.  `read_rate` is measured,
    in bytes per second, and 0 where it was not.  `columns` are file (a number of `files`), start and size.
    """

    host: str
    link: str
    carries: bool
    cell: int
    verify: str
    read_rate: float
    files: list[str]
    columns: list[bytes]


class Share(msgspec.Struct, array_like=True):
    """The root's answer to `Offer`: a `planner.sharing.Part`, by the rank's own numbers of files.

    `peers` are the links of the ranks that take something from this one.
    """

    num_turns: int
    columns: list[bytes]
    peers: dict[int, str]


class Wish(msgspec.Struct, array_like=True):
    """Before a load's reading: which saved tensors and blobs a rank takes, and what does not fit.

    `tensors` and `blobs` are `bitmaps` of the names that the rank's part of the checkpoint has.  `idle` are
    patterns of `LoadOptions.only` that match nothing in the rank's target, `damaged` sentences about files.
    """

    rank: int
    tensors: dict[str, bytes]
    blobs: dict[str, bytes]
    missing: list[tuple[str, str]]
    mismatched: list[tuple[str, str]]
    idle: list[str]
    damaged: list[str]
    offer: Offer | None


class Stopped(msgspec.Struct, array_like=True):
    """After a load's reading, in place of nothing: what stopped a rank that met no error of its own."""

    rank: int
    why: str


class Agreed(msgspec.Struct, array_like=True):
    """The root's answer to `Wish`: names that no rank takes, which a lenient load puts up with.

    `share` is this rank's part in reading together, None where it reads alone.
    """

    unexpected: list[str]
    share: Share | None


Name = tuple[str, str]
"""Item and FQN."""


def bitmaps(names: Iterable[Name], taken: Container[Name]) -> dict[str, bytes]:
    """Return, by item, a bit per name of the item: whether it is one of the taken.

    Within an item all ranks have the same names in the same order, whatever other items they have.
    """
    flags: dict[str, list[bool]] = {}
    for name in names:
        flags.setdefault(name[0], []).append(name in taken)
    return {item: np.packbits(np.array(bits, np.bool_)).tobytes() for item, bits in flags.items()}


def left_over(names: Iterable[Name], ranks: Sequence[Mapping[str, bytes]]) -> list[Name]:
    """Return the names that none of the ranks took, given the `bitmaps` of each."""
    by_item: dict[str, list[Name]] = {}
    for name in names:
        by_item.setdefault(name[0], []).append(name)
    left = []
    for item, members in by_item.items():
        union = np.zeros(-(-len(members) // 8), np.uint8)
        for taken in ranks:
            if item in taken:
                union |= np.frombuffer(taken[item], np.uint8)
        bits = np.unpackbits(union, count=len(members)).tolist()
        left += [name for name, bit in zip(members, bits, strict=True) if not bit]
    return left


class Seat(msgspec.Struct, array_like=True):
    """While a tree forms: a rank's address in it, and the rank above it.

    `number` is that of the next save which the rank has not begun.
    """

    address: str
    above: int | None
    number: int = 0


class Place(msgspec.Struct, array_like=True):
    """The root's answer to `Seat`: the address above, and what all ranks have in common from now on.

    That is the seed of all write ids to come, and the number of the first save in which all can take part.
    """

    above: str
    seed: str
    number: int
