"""The lanes in which an agent promotes: one per store, so that a slow store does not delay others."""

from __future__ import annotations

import dataclasses
import queue
import secrets
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.engine import messages
from reknit.system import start_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from reknit.options import CommOptions

    Jobs = queue.SimpleQueue[Callable[[], None] | None]


def side_group(group: comm.Group, name: str, options: CommOptions, timeout_s: float) -> comm.Group:
    """Form a second group of the same ranks, for the rounds of another thread; all ranks call this.

    Raises `CommError`, on all ranks or on none.
    """
    if group.size == 1:
        return comm.SoloGroup()
    from reknit.comm.tree.tree_group import TreeGroup  # a job of one rank does not need it

    side: TreeGroup | None = None
    try:
        with comm.turn(group, name, timeout_s) as turn:
            here, topology, generation = where_of(group, options), group.topology, group.generation
            side = TreeGroup(group.rank, topology, job=name, generation=generation, options=here)
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
    above = ["" if rank.above is None else ranks[rank.above].address for rank in ranks]
    return [messages.TreeAddress(address, seed, number) for address in above]


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
