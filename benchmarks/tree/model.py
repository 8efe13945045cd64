"""The length of a round on thousands of ranks: the real machines of all ranks, in simulated time.

Every rank runs the `RoundMachine` of a real job.  A rank handles one message after another, each of which
costs it the same time, and a message travels for the same time between any two ranks.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from reknit.comm.group import Call
from reknit.comm.tree.machine import Decide, RoundDone, RoundMachine, SendOutcome, SendReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Topology
    from reknit.comm.rank_messages import Outcome, Report
    from reknit.comm.tree.machine import Effect

MAX_NBYTES = 1 << 30
LONGEST_S = 3600.0


class Held(NamedTuple):
    """A round: the time until all ranks have their answers, and the messages of the busiest rank."""

    seconds: float
    most_messages: int
    height: int


class _Event(NamedTuple):
    at: float
    number: int
    rank: int
    content: Report | Outcome


class Model:
    """The ranks of a job; `message_s` is the time that a rank takes for a message, `travel_s` its way."""

    def __init__(self, topology: Topology, *, message_s: float, travel_s: float) -> None:
        self._message_s, self._travel_s, self._topology = message_s, travel_s, topology
        self._machines = [
            RoundMachine(rank, topology, job="model", generation=1, max_nbytes=MAX_NBYTES)
            for rank in range(topology.size)
        ]
        self._free_at = [0.0] * topology.size
        self._messages = [0] * topology.size
        self._done: dict[int, float] = {}
        self._events: list[_Event] = []
        self._sent = 0

    def round(self) -> Held:
        """Hold one round, which all ranks enter at once."""
        call = Call("barrier", b"", LONGEST_S)
        for rank, machine in enumerate(self._machines):
            self._carry_out(rank, machine.enter(call, 0.0))
        while self._events:
            event = heapq.heappop(self._events)
            machine = self._machines[event.rank]
            now = self._busy(event.rank, event.at)
            if event.content.__class__.__name__ == "Report":
                self._carry_out(event.rank, machine.receive_report(event.content, now))  # type: ignore[arg-type]
            else:
                self._carry_out(event.rank, machine.receive_outcome(event.content, now))  # type: ignore[arg-type]
        if len(self._done) != self._topology.size:
            raise RuntimeError(f"{len(self._done)} of {self._topology.size} ranks have ended the round")
        return Held(max(self._done.values()), max(self._messages), self._topology.height)

    def _busy(self, rank: int, since: float) -> float:
        """Let a rank handle a message, and return the time at which it is free again."""
        self._messages[rank] += 1
        self._free_at[rank] = max(self._free_at[rank], since) + self._message_s
        return self._free_at[rank]

    def _carry_out(self, rank: int, effects: Sequence[Effect]) -> None:
        machine = self._machines[rank]
        for effect in effects:
            if isinstance(effect, SendReport):
                parent = self._topology.parent(rank)
                assert parent is not None
                self._send(rank, parent, effect.report)
            elif isinstance(effect, SendOutcome):
                self._send(rank, effect.child, effect.outcome)
            elif isinstance(effect, Decide):
                answers = [b""] * len(effect.requests)
                self._carry_out(rank, machine.decided(effect.number, answers, self._free_at[rank]))
            elif isinstance(effect, RoundDone):
                if effect.outcome.error is not None:
                    raise RuntimeError(f"the round failed on rank {rank}: {effect.outcome.error}")
                self._done[rank] = self._free_at[rank]

    def _send(self, rank: int, to: int, content: Report | Outcome) -> None:
        at = self._busy(rank, 0.0) + self._travel_s
        self._sent += 1
        heapq.heappush(self._events, _Event(at, self._sent, to, content))


def star(size: int, *, message_s: float, travel_s: float) -> Held:
    """Return the round of a star, in which rank 0 handles a report and an answer for each other rank.

    The model has the same result, but takes minutes for ten thousand ranks below one.
    """
    return Held(2 * size * message_s + 2 * travel_s, 2 * (size - 1), 1)
