"""The messages between a trainer and its agent, and the properties of a process that an agent takes over.

`agent.Agent` has a table of the methods that receive those to the agent.  `session.AgentSession` receives the
others.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from reknit.engine.messages import ArrayColumns, RankClaims  # noqa: TC001 (msgspec looks them up)
from reknit.engine.reports import SaveTotals  # noqa: TC001 (msgspec looks them up)
from reknit.environment import all_variables, fsspec_config, take_variables
from reknit.processes.channel import Message
from reknit.system import umask
from reknit.types.small import decoder

FOR_TRAINERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that agents ignore: they may go to the whole job, and trainers may save once more.

An agent ends with its trainer.
"""


class ProcessContext(msgspec.Struct, array_like=True):
    """The properties of a process on which, beside its arguments, the result of a save depends.

    The variables are the secrets of this user, on their way to another process of this user; nothing may log
    them.  Names are bytes, as the system has them.
    """

    umask: int
    folder: bytes | None
    """The working folder; None where it was removed."""
    variables: dict[bytes, bytes]
    search_path: list[bytes]
    temporary: bytes | None
    """The folder that `tempfile` has chosen; None before its first use."""
    fsspec: str
    """The settings of fsspec, as JSON; empty without any."""

    def __repr__(self) -> str:
        return (
            f"ProcessContext(umask={self.umask:o}, folder={self.folder!r}, {len(self.variables)} variables)"
        )


def process_context() -> ProcessContext:
    """Return the context of this process."""
    folder = None
    with suppress(OSError):
        folder = os.getcwdb()
    temporary = tempfile.tempdir
    entries: list[object] = [*sys.path]
    return ProcessContext(
        umask=umask(),
        folder=folder,
        variables=all_variables(),
        search_path=[os.fsencode(entry) for entry in entries if isinstance(entry, str)],
        temporary=None if temporary is None else os.fsencode(temporary),
        # Without a text of them, this process itself serves the stores that need these settings.
        fsspec=fsspec_config() or "",
    )


def adopt(new: ProcessContext, old: ProcessContext | None) -> None:
    """Adopt the context of another process in this agent, which had the `old` one before."""
    os.umask(new.umask)
    if new.folder is not None:
        with suppress(OSError):  # removed since, or closed to this process: absolute paths need no folder
            os.chdir(new.folder)
    take_variables(new.variables)
    tempfile.tempdir = None if new.temporary is None else os.fsdecode(new.temporary)
    sys.path[:] = [os.fsdecode(entry) for entry in new.search_path]
    importlib.invalidate_caches()
    if new.fsspec or "fsspec.config" in sys.modules:
        _set_fsspec(new.fsspec)
    if old is not None and (registry := sys.modules.get("fsspec.registry")):
        # Connected file systems are kept by their arguments alone, and these may have old credentials.
        for system in set(registry.registry.values()):
            with suppress(Exception):  # anybody's class
                system.clear_instance_cache()


def _set_fsspec(settings: str) -> None:
    with suppress(ImportError):
        from fsspec import config

        config.conf.clear()
        config.conf.update(json.loads(settings) if settings else {})


class AgentMessage(Message):
    """Base of all messages here: a message of one of its subclasses may be received."""


class Join(AgentMessage):
    """To the agent: open a server for the agents below, as a rank of this group of agents.

    `hosts`, `fan_out` and `generation` are the same as in the trainers' tree.  `generation` is None for a
    single process that was given none.  `door` is the address of a socket for that server, whose descriptor
    comes with the message; without one, an agent with others below it answers with `Listening`.
    """

    job: str
    rank: int
    hosts: list[int]
    fan_out: int
    generation: int | None
    comm: dict[str, Any]
    low_priority: bool
    door: str = ""


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


class ShareValues(AgentMessage):
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
    context: ProcessContext | None = None
    """The process context of this save, if it differs from that of the save before."""


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
    """To the trainer: the agent's own address, for the agents below."""

    address: str


class Joined(AgentMessage):
    """To the trainer: the agent is part of the tree."""


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


class AgentFailed(AgentMessage):
    """To the trainer: the agent ends because of an error, after it has written the staged saves."""

    error: dict[str, Any]


decode = decoder(reduce(or_, AgentMessage.__subclasses__()))
