"""The lanes in which an agent promotes: one for each store, so that a slow one delays no other."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.engine.background.side_group import side_group
from reknit.system import start_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from reknit.options import CommOptions

    Jobs = queue.SimpleQueue[Callable[[], None] | None]

_MOST = 8
"""Lanes of an agent; stores beyond that share them."""


class PromotionLane:
    """Promotions to one store, one after another, in the order of their saves.

    Its `group` has the same agents once more, for rounds that take as long as a slow store.
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
    """The lanes of an agent.  All agents come to the same ones in the same order, as the root says."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._lanes: dict[int, PromotionLane | BaseException] = {}

    def agree(self, urls: Sequence[str], group: comm.Group, timeout_s: float) -> list[int]:
        """Return the numbers of the lanes for checkpoints at some places: those of the root for its own.

        There are as many on all ranks.  The ranks' names of a store may differ, and so may the checkpoints
        that have one store in common.  Raises `CommError`.
        """

        def decide(requests: list[bytes]) -> list[bytes]:
            mine = [self._numbers.setdefault(_store(url), len(self._numbers) % _MOST) for url in urls]
            return [bytes(mine)] * len(requests)

        with comm.turn(group, "lanes", timeout_s) as turn:
            return list(turn.exchange(b"", decide))

    def lane(self, number: int, group: comm.Group, options: CommOptions, timeout_s: float) -> PromotionLane:
        """Return a lane, made with all agents where it is new.

        Raises `CommError`, `ShortageError`, and then for ever: none of them would come to another round.
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
    """Return the folder of a checkpoint, in which the others of a run are, too."""
    return url.partition("?")[0].rpartition("/")[0]
