"""The messages of ranks to the root, and its answers: plain columns in MessagePack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from reknit.errors import CommError
from reknit.types.small import OtherFormat, decoder

Message = TypeVar("Message")

encode = msgspec.msgpack.encode


def decode(data: bytes, kind: type[Message]) -> Message:
    """Return the message of this kind."""
    return decoder(kind)(data)


class ShardClaims(msgspec.Struct, array_like=True):
    """The `shard_key`s and sizes, as columns, of shards of which no framework records the other holders."""

    keys: bytes
    nbytes: bytes


class FirstClaims(msgspec.Struct, array_like=True):
    """The claims of a rank while its agent starts; None where it has failed, or joins without a save."""

    shards: ShardClaims | None


class FirstOwners(msgspec.Struct, array_like=True):
    """The root's answer: the owners that the agents will find, or None if some rank has no claims."""

    shards: bytes | None


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """Shards of which several ranks have copies, as a rank sends them to be compared.

    `keys` (their `shard_key`) and `digests` are columns.  `names` are item, FQN, dtype and shape of each, as
    a message, which is read only where copies differ.  `data` are the bytes of the first ones, end to end,
    which the rank can keep as values of its own.
    """

    keys: bytes
    digests: bytes
    names: bytes
    data: bytes


NO_COPIES = Copies(b"", b"", b"", b"")


class Witnesses(msgspec.Struct, frozen=True, array_like=True):
    """Values that another rank must have: their names for users, and a column of `blob_key`s."""

    names: list[str]
    keys: bytes


NO_WITNESSES = Witnesses([], b"")


class EncodedBlob(msgspec.Struct, array_like=True):
    """A value of a rank, already encoded: a file of blobs that holds just this one.

    `key` stands for item, FQN and coordinate; `coordinate` is as in `types.shard.Blob`.
    """

    item: str
    key: int
    coordinate: dict[str, int] | None
    data: bytes


class RankClaims(msgspec.Struct, array_like=True):
    """The claims of a rank before all ranks' work is assigned: data whose owner only the root can choose.

    `write_id` is empty if the root has to choose one.  `plan` stands for the layout of all that the rank
    holds; `shards` is None if the rank claimed the same under this plan before.  `places` is the number of
    places to which it promotes the checkpoint.
    """

    write_id: str
    step: int | None
    plan: bytes
    shards: ShardClaims | None
    blobs: list[EncodedBlob]
    copies: Copies = NO_COPIES
    witnesses: Witnesses = NO_WITNESSES
    places: int = 0


class EarlierFiles(msgspec.Struct, frozen=True, array_like=True):
    """The data files of a rank in an earlier checkpoint, in a `folder` beside the new one.

    `nbytes` and `digests` are columns; the digests are those of all blocks, one file after another.
    """

    folder: str
    paths: list[str]
    nbytes: bytes
    digests: bytes


class Assignment(msgspec.Struct, array_like=True):
    """The root's answer to `claims`: the owner of each of those shards and blobs, and the id of this save.

    `differing` are keys of shards of which ranks hold different values, each with the lowest of these ranks.
    `earlier` are files that the rank may take over, in the first save of a process.
    """

    write_id: str
    shard_owners: bytes
    blob_owners: bytes
    differing: list[tuple[int, list[int]]]
    earlier: EarlierFiles | None = None


class ArrayColumns(msgspec.Struct, array_like=True):
    """The chunks that a rank writes, row by row: `tensor` and `file` count `tensors` and `files`.

    `tensors` (item, FQN, dtype, shape) are all that the rank holds, `files` are item and part of data files,
    `aliases` (item, alias FQN, FQN) of tied tensors.
    """

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


class CommitOutcome(msgspec.Struct, array_like=True):
    """The root's answer to a receipt: the checkpoint is committed."""

    total_nbytes: int
    warnings: list[str]


class OwnNames(msgspec.Struct, array_like=True):
    """The names of values that ranks saved for themselves; items in `unknown` may have more than these."""

    names: list[tuple[str, str]]
    unknown: list[str]


class Files(msgspec.Struct, array_like=True):
    """Files of a checkpoint, as columns; `numbers` are their places in its manifest, ascending.

    `digests` are those of all their blocks, one file after another.
    """

    numbers: bytes
    paths: list[str]
    nbytes: bytes
    digests: bytes


class ItemContents(msgspec.Struct, array_like=True):
    """The root's answer to `Items`: the contents of these items, but not the places of their tensors.

    `manifest` is a file of format 1 with fewer entries: it has all items, and of files just the index and
    those of values.  `tensors` are item, FQN, dtype and shape of all tensors, `files` those in which they
    lie, `blobs` the files of shared values, by path; each rank reads the large ones, `unsent`, itself.
    `own` is there where things are to be renamed: no rank reads the files of others for the names in them.
    """

    manifest: bytes
    tensors: list[tuple[str, str, str, tuple[int, ...]]]
    files: Files
    blobs: dict[str, bytes]
    own: OwnNames | None = None
    other: OtherFormat | None = None
    unsent: list[str] = []


NO_CONTENTS = ItemContents(b"", [], Files(b"", [], b"", b""), {})


class Items(msgspec.Struct, array_like=True):
    """At the start of a load: the items that a rank wants, and the optional ones among them."""

    names: list[str]
    optional: list[str]


class Asked(msgspec.Struct, array_like=True):
    """After the walk through a target: the tensors and blobs that a rank takes, as `bitmaps` of the names.

    `refused` are tensors and values that it has names for but cannot take.  `boxes` stands for the boxes that
    it wants: where these are equal, so are the files.  `made` has, like `tensors`, the tensors with names in
    the target that transforms make.
    """

    tensors: dict[str, bytes]
    blobs: dict[str, bytes]
    refused: list[tuple[str, str]]
    boxes: int
    made: dict[str, bytes] = {}


class Answer(msgspec.Struct, array_like=True):
    """The root's answer to `Asked`: the places of these tensors, as encoded by `loading.contents.blocks_for`.

    `alike` has each rank that asked for these tensors, and a number that stands for its boxes.
    """

    blocks: list[bytes]
    alike: bytes


class SharePlan(msgspec.Struct, array_like=True, eq=False):
    """The root's plan for reading together, one message for all ranks that take part.

    `columns` are those of a `planner.sharing.Division`, in which files have the numbers of `Answer`.  `links`
    are the addresses of the ranks that take something from a rank of their host.  There are `num_turns`
    exchanges between hosts, each in `num_steps` steps.
    """

    num_turns: int
    num_steps: int
    columns: list[bytes]
    links: dict[int, str]


class LoadRequest(msgspec.Struct, array_like=True):
    """Before a load's reading: the names that do not fit on a rank.

    `idle` are patterns of the load that match nothing in the rank's target, `idle_rules` numbers of
    transforms that match nothing in its items, `damaged` sentences about files.  `num_tensors` counts the
    tensors that the rank asks for, `num_filled` those among them that it finds, and `num_values` other values
    that it finds.  `lacking` and `unfit` are the missing and mismatched names in a lenient load on a rank
    that finds no tensor at all.  `refused` are names that no option permits.  With `early`, the rank has
    objects, which are loaded before tensors.
    """

    rank: int
    missing: list[tuple[str, str]]
    mismatched: list[tuple[str, str]]
    idle: list[str]
    damaged: list[str]
    idle_rules: list[int] = []
    num_tensors: int = 0
    num_filled: int = 0
    num_values: int = 0
    lacking: list[tuple[str, str]] = []
    unfit: list[tuple[str, str]] = []
    refused: list[tuple[str, str, str]] = []
    early: bool = False


class Stopped(msgspec.Struct, array_like=True):
    """After a load's reading: the error that stopped a rank if there was one, which was not its own."""

    rank: int
    why: str | None = None


class StoppedError(CommError):
    """Another rank left the shared read; it has the reason."""


class LoadDecision(msgspec.Struct, array_like=True):
    """The root's answer to `LoadRequest`: names that no rank takes, which a lenient load puts up with.

    `left` are items of the checkpoint that no rank asked for.  `share` is the plan for reading together, None
    where this rank reads alone.  With `early` some rank has objects, and there is a round for them;
    `early_share` is as `share`, for their ranges.
    """

    unexpected: list[str]
    left: list[str]
    early: bool = False
    share: SharePlan | None = None
    early_share: SharePlan | None = None


class ListenAddress(msgspec.Struct, array_like=True):
    """While a tree forms: a rank's address in it, and the rank above it.

    `number` is that of the next save which the rank has not begun.  `side` is the address of the rank in a
    second tree that forms with it.
    """

    address: str
    above: int | None
    number: int = 0
    side: str = ""


class TreeAddress(msgspec.Struct, array_like=True):
    """The root's answer to `ListenAddress`: the address above, and values that all ranks share.

    That is the seed of all write ids to come, and the number of the first save in which all can take part.
    `side` is the address above in the second tree.
    """

    above: str
    seed: str
    number: int
    side: str
