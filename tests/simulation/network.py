"""A virtual network: messages are delayed, lost, duplicated or delivered to the wrong process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from reknit.comm.rank_messages import Outcome, Report
from tests.simulation.faults import Weather

if TYPE_CHECKING:
    from random import Random

    from reknit.errors import ReknitError
    from tests.simulation.clock import Schedule
    from tests.simulation.faults import Partition
    from tests.simulation.group import SimGroup
    from tests.simulation.process import Process

NOTICE_S = 0.2
"""The average time until a broken connection is noticed."""


class Left(NamedTuple):
    """The call that carried a report of a round ended before its answer."""

    number: int


class Broken(NamedTuple):
    """The notice that the group is broken."""

    error: ReknitError


Content = Report | Outcome | Left | Broken


class Message(NamedTuple):
    """A message of one rank to another; a copy goes to a stranger, or to a rank that has it already."""

    content: Content
    copy: bool = False

    @property
    def label(self) -> str:
        """Its text in the trace."""
        content = self.content
        if isinstance(content, Report):
            state = "whole" if content.whole else "an error" if content.error else "not whole"
            return f"report of {content.label}, {state}"
        if isinstance(content, Outcome):
            return f"end of {content.label}: {ending(content)}"
        if isinstance(content, Broken):
            return f"broken: {type(content.error).__name__}"
        return f"left round {content.number}"


def ending(outcome: Outcome) -> str:
    """Return the outcome of a round."""
    return "answers" if outcome.error is None else str(outcome.error["type"])


@dataclass(eq=False, slots=True)
class _Wall:
    """A partition: its ranks and the others receive nothing from each other."""

    ranks: frozenset[int]
    until_s: float
    kept: bool


class Network:
    """Carries messages between the ranks of each incarnation of a job."""

    def __init__(self, schedule: Schedule, random: Random, weather: Weather) -> None:
        self.weather = weather
        self._schedule = schedule
        self._random = random
        self._members: dict[tuple[int, int], SimGroup] = {}
        self._newest = 0
        self._cut: set[tuple[int, int]] = set()
        self._walls: list[_Wall] = []

    def join(self, group: SimGroup) -> None:
        """Connect a rank of an incarnation."""
        self._members[group.run, group.rank] = group
        self._newest = max(self._newest, group.run)
        group.process.on_death = partial(self._died, group)

    def send(self, sender: SimGroup, rank: int, content: Content) -> None:
        """Send a message to a rank of the sender's incarnation."""
        message = Message(content)
        weather, random = self.weather, self._random
        receiver = self._members[sender.run, rank]
        if self._link(sender, receiver) in self._cut or random.random() < weather.lost:
            self._schedule.note(sender.process.name, f"   lost: {message.label}")
            return
        wait_s = self._delay_s(weather.slow_s if random.random() < weather.slow else weather.delay_s)
        for wall in self._walls:
            if (sender.rank in wall.ranks) != (rank in wall.ranks) and self._schedule.moment < wall.until_s:
                if not wall.kept:
                    self._schedule.note(sender.process.name, f"   lost: {message.label}")
                    return
                wait_s += wall.until_s - self._schedule.moment
        self._schedule.after(wait_s, partial(receiver.receive, sender, message))
        again = message._replace(copy=True)
        while random.random() < weather.doubled:
            self._schedule.after(self._delay_s(weather.slow_s), partial(receiver.receive, sender, again))
        stranger = self._members.get((self._newest, rank))
        if stranger is not None and stranger is not receiver and random.random() < weather.strayed:
            self._schedule.after(self._delay_s(weather.slow_s), partial(stranger.receive, sender, again))

    def cut(self, process: Process, noticed_s: float | None) -> None:
        """Break the connection of a process to the rank above it."""
        group = next(group for group in self._members.values() if group.process is process)
        if group.parent is None:
            return
        above = self._members[group.run, group.parent]
        self._cut.add(self._link(group, above))
        self._schedule.note(process.name, f"LOSES its connection to rank {above.rank}")
        if noticed_s is not None:
            self._schedule.after(noticed_s, partial(group.lose, above.rank))
            self._schedule.after(noticed_s, partial(above.lose, group.rank))

    def part(self, partition: Partition) -> None:
        """Separate some ranks from the others, from now on for a while."""
        self._schedule.note("network", f"PARTS: {partition}")
        until_s = self._schedule.moment + partition.seconds
        self._walls.append(_Wall(frozenset(partition.ranks), until_s, partition.kept))

    def heal(self) -> None:
        """Stop losing, delaying and doubling messages."""
        self.weather = Weather()
        self._cut.clear()
        self._walls.clear()

    def _died(self, group: SimGroup, silent: bool) -> None:
        if not silent:
            for rank in group.neighbours:
                other = self._members[group.run, rank]
                self._schedule.after(self._delay_s(NOTICE_S), partial(other.lose, group.rank))

    def _delay_s(self, mean_s: float) -> float:
        return self._random.expovariate(1.0) * mean_s

    @staticmethod
    def _link(one: SimGroup, other: SimGroup) -> tuple[int, int]:
        """Return the name of the connection between two ranks: the lower end is enough."""
        return one.run, one.rank if one.parent == other.rank else other.rank
