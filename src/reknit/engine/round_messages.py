"""What ranks tell the root, and what it answers: plain columns in MessagePack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Message = TypeVar("Message")

encode = msgspec.msgpack.encode


def decode(data: bytes, kind: type[Message]) -> Message:
    """Return the message of this kind."""
    return msgspec.msgpack.decode(data, type=kind)


class ShardClaims(msgspec.Struct, array_like=True):
    """The `shard_key`s and sizes, as columns, of shards of which a rank cannot know who else holds them."""

    keys: bytes
    nbytes: bytes


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """Shards of which several ranks have copies, as a rank tells of them to whoever compares.

    `keys` (their `shard_key`) and `digests` are columns.  `names` are item, FQN, dtype and shape of each, as
    a message, which is read only where copies differ.  `data` are the bytes of the first ones, end to end:
    those that the rank can keep as values of its own.
    """

    keys: bytes
    digests: bytes
    names: bytes
    data: bytes


NO_COPIES = Copies(b"", b"", b"", b"")


class Witnesses(msgspec.Struct, frozen=True, array_like=True):
    """Values that another rank must have: their names as users are told them, and a column of `blob_key`s."""

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
    """What a rank says before all ranks' work is assigned: what only all together can say who writes.

    `write_id` is empty where the root has to choose one.  `plan` stands for the layout of all that the rank
    holds; `shards` is None where it is what the rank last claimed under this plan.  `places` is to how many
    places it promotes the checkpoint.
    """

    write_id: str
    step: int | None
    plan: bytes
    shards: ShardClaims | None
    blobs: list[EncodedBlob]
    copies: Copies = NO_COPIES
    witnesses: Witnesses = NO_WITNESSES
    places: int = 0


class Assignment(msgspec.Struct, array_like=True):
    """The root's answer to `claims`: who writes each of those shards and blobs, and the id of this save.

    `differing` are keys of shards of which ranks hold different values, each with the lowest of these ranks.
    """

    write_id: str
    shard_owners: bytes
    blob_owners: bytes
    differing: list[tuple[int, list[int]]]


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
    """The root's answer to `Items`: what a checkpoint holds of these items, but not where its tensors lie.

    `manifest` is a file of format 1 with fewer entries: it has all items, and of files just the index and
    those of values.  `tensors` are item, FQN, dtype and shape of all tensors, `files` those in which they
    lie, `blobs` the files of shared values, by path.  `own` is there where things are to be renamed: no rank
    reads the files of others for the names in them.
    """

    manifest: bytes
    tensors: list[tuple[str, str, str, tuple[int, ...]]]
    files: Files
    blobs: dict[str, bytes]
    own: OwnNames | None = None


class Items(msgspec.Struct, array_like=True):
    """At the start of a load: the items that a rank wants, and those that it can do without."""

    names: list[str]
    optional: list[str]


class Asked(msgspec.Struct, array_like=True):
    """Once a rank knows what it wants: which tensors and blobs it takes, as `bitmaps` of the names it knows.

    `refused` are tensors and values that it has names for but cannot take.  `boxes` stands for the boxes that
    it wants: where these are equal, so are the files.  `made` tells like `tensors` which of those it has
    names for that transforms make.
    """

    tensors: dict[str, bytes]
    blobs: dict[str, bytes]
    refused: list[tuple[str, str]]
    boxes: int
    made: dict[str, bytes] = {}


class Answer(msgspec.Struct, array_like=True):
    """The root's answer to `Asked`: where these tensors lie, as `index_part.blocks_for` encodes it.

    `alike` has a number for each rank; it is the same for ranks that asked for the same boxes.
    """

    blocks: list[bytes]
    alike: bytes


class Offer(msgspec.Struct, array_like=True):
    """Before a load's reading: what a rank would read alone, and how it could share that with others.

    Ranks with equal `host` reach each other by `link`.  `carries` says by what bytes can go to other hosts:
    a type of device, or nothing if the process group has no backend for one that is there; None without one.
    Reads do not cross multiples of `cell` bytes, and are verified as `verify` says.  `read_rate` is measured,
    in bytes per second, and 0 where it was not.  `columns` are file (a number of `files`), start and size.
    """

    host: str
    link: str
    carries: str | None
    cell: int
    verify: str
    read_rate: float
    files: list[str]
    columns: list[bytes]


class SharePlan(msgspec.Struct, array_like=True):
    """The root's answer to `Offer`: a `planner.sharing.FetchTable`, by the rank's own numbers of files.

    `peers` are the links of the ranks that take something from this one.  There are `num_turns` exchanges
    between hosts, each in `num_steps` steps.
    """

    num_turns: int
    num_steps: int
    columns: list[bytes]
    peers: dict[int, str]


class LoadRequest(msgspec.Struct, array_like=True):
    """Before a load's reading: what does not fit on a rank, and what it would read.

    `idle` are patterns of the load that match nothing in the rank's target, `idle_rules` numbers of
    transforms that match nothing in its items, `damaged` sentences about files.  `num_tensors` are those that
    the rank asks for, `num_filled` those that it finds, `num_values` other values that it finds.  `lacking`
    and `unfit` are what is missing and mismatched in a lenient load on a rank that finds no tensor at all.
    `early` tells whether the rank has objects, which are loaded before tensors, and `early_offer` is about
    what it would read for them.
    """

    rank: int
    missing: list[tuple[str, str]]
    mismatched: list[tuple[str, str]]
    idle: list[str]
    damaged: list[str]
    offer: Offer | None
    idle_rules: list[int] = []
    num_tensors: int = 0
    num_filled: int = 0
    num_values: int = 0
    lacking: list[tuple[str, str]] = []
    unfit: list[tuple[str, str]] = []
    early: bool = False
    early_offer: Offer | None = None


class Stopped(msgspec.Struct, array_like=True):
    """After a load's reading, in place of nothing: what stopped a rank that met no error of its own."""

    rank: int
    why: str


class LoadDecision(msgspec.Struct, array_like=True):
    """The root's answer to `LoadRequest`: names that no rank takes, which a lenient load puts up with.

    `left` are items of the checkpoint that no rank asked for.  `share` is this rank's part in reading
    together, None where it reads alone.  With `early` some rank has objects, and there is a round for them;
    `early_share` is as `share`, for what is read for them.
    """

    unexpected: list[str]
    left: list[str]
    share: SharePlan | None
    early: bool = False
    early_share: SharePlan | None = None


class ListenAddress(msgspec.Struct, array_like=True):
    """While a tree forms: a rank's address in it, and the rank above it.

    `number` is that of the next save which the rank has not begun.
    """

    address: str
    above: int | None
    number: int = 0


class TreeAddress(msgspec.Struct, array_like=True):
    """The root's answer to `ListenAddress`: the address above, and what all ranks have in common from now on.

    That is the seed of all write ids to come, and the number of the first save in which all can take part.
    """

    above: str
    seed: str
    number: int
