"""The groups beside that of the trainers, and the lanes in which an agent promotes.

A lane is for one store, so that a slow store does not delay others.
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
from typing import TYPE_CHECKING, TypeAlias

from reknit.comm import group as comm
from reknit.engine import messages
from reknit.options import UNIX, CommOptions
from reknit.system import start_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from reknit.comm.meeting.addresses import PrivateSocket
    from reknit.comm.tree.tree_group import TreeGroup
    from reknit.engine.background.messages import Join

    Door: TypeAlias = PrivateSocket
    Side: TypeAlias = TreeGroup
    Jobs = queue.SimpleQueue[Callable[[], None] | None]


def side_group(group: comm.Group, name: str, options: CommOptions, timeout_s: float) -> comm.Group:
    """Form a second group of the same ranks, for the rounds of another thread; all ranks call this.

    Raises `CommError`, on all ranks or on none.
    """
    if group.size == 1:
        return comm.SoloGroup()
    side: TreeGroup | None = None
    try:
        with comm.turn(group, name, timeout_s) as turn:
            side = listening(group, name, options)
            address = messages.ListenAddress(side.address, side.above)
            place = turn.give(places(turn.gather(address)), messages.TreeAddress)
        # The loss of a rank before it is connected would show only at the deadline of a round.
        with comm.turn(group, name, timeout_s) as turn:
            side.connect_parent(place.above)
            turn.arrive()
    except BaseException:
        if side is not None:
            side.close()
        raise
    return side


def listening(group: comm.Group, name: str, options: CommOptions) -> TreeGroup:
    """Return the place of this rank in a second group of the same ranks, which it has not joined yet."""
    from reknit.comm.tree.tree_group import TreeGroup  # a job of one rank does not need it

    here, topology, generation = where_of(group, options), group.topology, group.generation
    return TreeGroup(group.rank, topology, job=name, generation=generation, options=here)


def opened_door(join: Join, num_below: int) -> PrivateSocket:
    """Return the socket of an agent's server, and put its address into the message to the agent."""
    from reknit.comm.meeting.addresses import PrivateSocket  # as above
    from reknit.comm.tree.over_sockets import most_strangers

    door = PrivateSocket.listen(most_strangers(num_below))
    join.door = door.address
    return door


def joining(join: Join, door: PrivateSocket | int | None) -> TreeGroup:
    """Return the place of an agent among the agents, before it joins them; `door` is that of `join`."""
    from reknit.comm.meeting.addresses import PrivateSocket  # as above
    from reknit.comm.tree.tree_group import TreeGroup

    assert join.generation is not None
    return TreeGroup(
        join.rank,
        comm.Topology(join.hosts, join.fan_out),
        job=join.job,
        generation=join.generation,
        options=CommOptions(**join.comm),
        door=PrivateSocket(join.door, door) if isinstance(door, int) else door,
    )


def first_owners(requests: Sequence[messages.FirstClaims]) -> list[messages.FirstOwners]:
    """Return the owners of the shards that each rank claims, as the agents will find them later."""
    claimed = [request.shards for request in requests if request.shards is not None]
    if len(claimed) < len(requests) or not any(shards.keys for shards in claimed):
        return [messages.FirstOwners(None)] * len(requests)
    from reknit.engine.saving.coordinator import (
        Coordinator,  # for a state without claims, only agents need it
    )
    from reknit.engine.saving.packing import claims

    of_ranks = [
        claims(rank, messages.RankClaims("", None, b"", shards, [])) for rank, shards in enumerate(claimed)
    ]
    return [messages.FirstOwners(answer.shard_owners) for answer in Coordinator().assign(None, of_ranks)]


def is_private(above: str) -> bool:
    """Return whether the agents of a rank and of the one above it, if any, meet at a socket of their host."""
    return not above or above.startswith(f"{UNIX}:")


def where_of(group: comm.Group, options: CommOptions) -> CommOptions:
    """Return options that make a server listen at the host of the server of `group`, if this rank has one."""
    host = getattr(group, "host", None)
    if host is None or options.bind is not None or options.interface is not None:
        return options
    return dataclasses.replace(options, bind=host)


def places(ranks: Sequence[messages.ListenAddress] | None) -> list[messages.TreeAddress] | None:
    """Return for each rank the address of the rank above it, and the seed and number that all share.

    Only rank 0 has the addresses of all; other ranks have None, and get None.
    """
    if ranks is None:
        return None
    seed, number = secrets.token_hex(16), max(rank.number for rank in ranks)
    above = [None if rank.above is None else ranks[rank.above] for rank in ranks]
    return [messages.TreeAddress(a.address if a else "", seed, number, a.side if a else "") for a in above]


_MOST = 8
"""The number of lanes of an agent; more stores than lanes share them."""


class PromotionLane:
    """Promotions to one store, one after another, in the order of their saves.

    Its `group` is a second group of the same agents, for rounds that wait for a slow store.
    """

    def __init__(self) -> None:
        """Start the thread.  Raises `ShortageError`."""
        self.group: comm.Group = comm.SoloGroup()
        self.jobs: Jobs = queue.SimpleQueue()
        self._thread: threading.Thread = start_thread("reknit-agent-promote", lambda: work(self.jobs))

    def end(self) -> None:
        """Finish all promotions, then end the thread."""
        self.jobs.put(None)
        self._thread.join()
        self.group.close()


class Lanes:
    """The lanes of an agent.  The root decides, so that all agents use them in the same order."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lanes: dict[int, PromotionLane | BaseException] = {}

    def agree(self, urls: Sequence[str], group: comm.Group, timeout_s: float) -> list[int]:
        """Return the number of the lane for each URL of a checkpoint, by the decision of the root.

        All ranks pass equally many URLs, which may differ between ranks.  Raises `CommError`.
        """
        numbers: list[int] = []
        with comm.turn(group, "lanes", timeout_s) as turn:
            if turn.gather(b"") is not None:
                numbers = [self._numbers.setdefault(_store(url), len(self._numbers) % _MOST) for url in urls]
            return turn.give_all(numbers, list[int])

    def lane(self, number: int, group: comm.Group, options: CommOptions, timeout_s: float) -> PromotionLane:
        """Return a lane; all agents together form a new one.

        Raises `CommError` and `ShortageError`.  An error is raised again by every later call, since the
        agents would not all enter another round.
        """
        if number not in self._lanes:
            try:
                self._lanes[number] = _formed(f"promoters {number}", group, options, timeout_s)
            except BaseException as error:
                self._lanes[number] = error
        lane = self._lanes[number]
        if isinstance(lane, BaseException):
            raise lane
        return lane

    def __len__(self) -> int:
        return max(1, len(self._lanes))

    def end(self) -> None:
        """Finish all promotions."""
        for lane in self._lanes.values():
            if isinstance(lane, PromotionLane):
                lane.end()


def work(jobs: Jobs) -> None:
    """Do jobs, one after another."""
    while (job := jobs.get()) is not None:
        job()


def _formed(name: str, group: comm.Group, options: CommOptions, timeout_s: float) -> PromotionLane:
    try:
        lane = PromotionLane()
    except BaseException as error:
        comm.fail(group, name, error, timeout_s)
    try:
        lane.group = side_group(group, name, options, timeout_s)
    except BaseException:
        lane.end()
        raise
    return lane


def _store(url: str) -> str:
    """Return the folder of a checkpoint, which has all checkpoints of its run."""
    return url.partition("?")[0].rpartition("/")[0]
