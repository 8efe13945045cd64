"""The messages between a trainer and its agent."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from reknit.engine.call_reports import SaveTotals  # noqa: TC001 (msgspec looks them up)
from reknit.engine.round_messages import ArrayColumns, RankClaims  # noqa: TC001 (msgspec looks them up)
from reknit.processes.channel import Message
from reknit.processes.circumstances import Circumstances  # noqa: TC001 (msgspec looks them up)
from reknit.types.decoding import decoder


class AgentMessage(Message):
    """Base of all messages here: a message of one of its subclasses may be received."""


class Join(AgentMessage):
    """To the agent: open a server for the agents below, as a rank of this group of agents.

    `hosts`, `fan_out` and `generation` are the same as in the trainers' tree.  `generation` is None for a
    single process that was given none.
    """

    job: str
    rank: int
    hosts: list[int]
    fan_out: int
    generation: int | None
    comm: dict[str, Any]
    low_priority: bool


class ConnectParent(AgentMessage):
    """To the agent: connect to the agent above, at its address."""

    above: str


class GiveArena(AgentMessage):
    """To the agent, with a descriptor: the memory of an arena."""

    number: int
    nbytes: int


class DropArenas(AgentMessage):
    """To the agent: these arenas are no longer used."""

    numbers: tuple[int, ...]


class Lend(AgentMessage):
    """To the agent, with a descriptor, before `Begin`: values of this save that lie in shared memory.

    `blobs` has the number of each value in the save, and its begin and end in the shared memory.
    """

    number: int
    nbytes: int
    blobs: list[tuple[int, int, int]]


class Begin(AgentMessage):
    """To the agent: a save begins.

    `factory` opens its store, and comes from `storage.registry.recipe`.  `extra` has the values for the
    manifest of the root, as JSON.  A `warm_up` is not a save: it ends with `Ready` instead of `Planned`, and
    nothing is written.  `promote_to` has the URL, factory and rate of each store to which the checkpoint is
    promoted, and the record of the run there.  `record` is the record of the run that the checkpoint is a
    step of, or None.
    """

    number: int
    url: str
    factory: str | None
    overwrite: bool
    options: dict[str, Any]
    extra: bytes
    claims: RankClaims
    warm_up: bool = False
    promote_to: list[tuple[str, str | None, float | None, str | None]] = msgspec.field(default_factory=list)
    coordinate: dict[str, int] = msgspec.field(default_factory=dict)
    record: str | None = None
    sends_events: bool = False
    """Whether the agent sends its events to the trainer, for sinks that only the trainer can open."""
    circumstances: Circumstances | None = None
    """The circumstances of this save, if they differ from those of the save before."""


class Planned(AgentMessage):
    """To the agent: the files of a save, which the arena will hold.

    `files` has the item, part and size of each file.  `ring` is the used capacity of the arena.  `columns` is
    None if the root has the columns of this plan.
    """

    number: int
    items: list[str]
    files: list[tuple[str, int, int]]
    columns: ArrayColumns | None
    arena: int
    ring: int


class Filled(AgentMessage):
    """To the agent: a span of the arena holds its bytes."""

    number: int
    span: int


class Ready(AgentMessage):
    """To the agent: the trainer has done its part of a warm-up."""

    number: int


class Abandon(AgentMessage):
    """To the agent: the trainer gave up this save; `unbegun` when that was before `Begin`."""

    number: int
    unbegun: bool
    error: dict[str, Any]
    timeout_s: float


class Quit(AgentMessage):
    """To the agent: finish the saves that have begun, and end."""


class Listening(AgentMessage):
    """To the trainer: the agent's own address, and the rank of the agent above it."""

    address: str
    above: int | None


class Joined(AgentMessage):
    """To the trainer: the agent is part of the tree, or the error that prevents it."""

    error: dict[str, Any] | None


class Assigned(AgentMessage):
    """To the trainer: the owners of the shards that it claimed."""

    number: int
    shard_owners: bytes


class Freed(AgentMessage):
    """To the trainer: a span of the arena is written and may be filled again."""

    number: int
    span: int


class ArenaFree(AgentMessage):
    """To the trainer: this save no longer reads from the arena; it may have failed."""

    number: int


class Events(AgentMessage):
    """To the trainer: the agent's records of a save, for sinks that it cannot open itself."""

    number: int
    records: list[dict[str, Any]]


class SaveDone(AgentMessage):
    """To the trainer: a save ended, with an error or its totals; `records` are the phases of the agent."""

    number: int
    error: dict[str, Any] | None
    totals: SaveTotals | None = None
    records: list[dict[str, Any]] = msgspec.field(default_factory=list)


class Promoted(AgentMessage):
    """To the trainer: a promotion of a committed save has ended; `target` is its number in `promote_to`."""

    number: int
    target: int
    error: dict[str, Any] | None
    path: str = ""
    nbytes: int = 0
    num_files: int = 0
    records: list[dict[str, Any]] = msgspec.field(default_factory=list)


class Broken(AgentMessage):
    """To the trainer: the tree of agents is broken, so that no later save can succeed in it.

    `on_purpose`: another rank's agent has left, since its trainer ended or closed it.
    """

    on_purpose: bool


class Fell(AgentMessage):
    """To the trainer: the agent ends because of an error, after it has written the staged saves."""

    error: dict[str, Any]


decode = decoder(reduce(or_, AgentMessage.__subclasses__()))
