"""Machines of a whole tree in one thread, with messages that a test delays, drops and repeats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from reknit.comm import round_errors
from reknit.comm.group import Call
from reknit.comm.tree.machine import (
    Decide,
    Notify,
    Refuse,
    RoundDone,
    RoundMachine,
    SendOutcome,
    SendReport,
    Warn,
)
from reknit.errors import ReknitError, from_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.comm.group import Topology
    from reknit.comm.tree.machine import Effect

MAX_NBYTES = 1 << 20


class Delivery(NamedTuple):
    """A message under way: its effect on the machine of `rank` once it arrives."""

    rank: int
    effect: SendReport | SendOutcome | Notify | Decide
    origin: int


class Loop:
    """The machines of a tree, the messages between them, and how each rank's rounds ended."""

    def __init__(
        self, topology: Topology, decide: Callable[[list[bytes]], Sequence[bytes]] | None = None
    ) -> None:
        self.topology = topology
        self.machines = [
            RoundMachine(rank, topology, job="job", generation=7, max_nbytes=MAX_NBYTES)
            for rank in range(topology.size)
        ]
        self.decide = decide or (lambda requests: requests)
        self.now = 0.0
        self.under_way: list[Delivery] = []
        self.arrived: list[Delivery] = []
        self.decisions: list[list[bytes]] = []
        self.endings: dict[int, list[bytes | ReknitError]] = {rank: [] for rank in range(topology.size)}
        self.ended_at: dict[int, float] = {}
        self.refused: list[ReknitError] = []
        self.notices: list[tuple[float, str]] = []
        self.dead: set[int] = set()

    def enter(self, rank: int, call: Call) -> None:
        """Let a rank begin its next round."""
        self.carry_out(rank, self.machines[rank].enter(call, self.now))

    def enter_all(
        self, name: str = "plan", *, but: Iterable[int] = (), timeout_s: float = 30.0, opens: bool = False
    ) -> None:
        """Let all ranks begin a round, each with its number as the request."""
        for rank in range(self.topology.size):
            if rank not in but and rank not in self.dead:
                self.enter(rank, Call(name, b"%d" % rank, timeout_s, opens=opens))

    def carry_out(self, rank: int, effects: list[Effect]) -> None:
        """Send the messages of a machine on their way, and note the ends of its rounds."""
        for effect in effects:
            if isinstance(effect, SendReport):
                above = self.topology.parent(rank)
                assert above is not None
                self.under_way.append(Delivery(above, effect, rank))
            elif isinstance(effect, SendOutcome):
                self.under_way.append(Delivery(effect.child, effect, rank))
            elif isinstance(effect, Notify):
                self.under_way.append(Delivery(effect.rank, effect, rank))
            elif isinstance(effect, Decide):
                self.under_way.append(Delivery(rank, effect, rank))
            elif isinstance(effect, Refuse):
                self.refused.append(effect.error)
            elif isinstance(effect, Warn):
                self.notices.append((self.now, effect.text))
            else:
                assert isinstance(effect, RoundDone)
                self.endings[rank].append(_ending(effect))
                self.ended_at[rank] = self.now

    def deliver(self, delivery: Delivery) -> None:
        """Let a message arrive; dead ranks receive nothing."""
        rank, effect, origin = delivery
        if rank in self.dead:
            return
        self.arrived.append(delivery)
        machine = self.machines[rank]
        if isinstance(effect, SendReport):
            effects = machine.receive_report(effect.report, self.now)
        elif isinstance(effect, SendOutcome):
            effects = machine.receive_outcome(effect.outcome, self.now)
        elif isinstance(effect, Notify):
            effects = machine.break_off(effect.error, self.now, origin)
        else:
            self.decisions.append(effect.requests)
            effects = machine.decided(effect.number, self.decide(effect.requests), self.now)
        self.carry_out(rank, effects)

    def step(self, pick: int = 0) -> bool:
        """Let the message at `pick` arrive, or else the next deadline pass; False without one."""
        if self.under_way:
            self.deliver(self.under_way.pop(pick % len(self.under_way)))
            return True
        alive = [machine for machine in self.machines if machine.rank not in self.dead]
        due = min((machine.next_at for machine in alive), default=math.inf)
        if due == math.inf:
            return False
        self.now = max(self.now, due)
        for machine in alive:
            if machine.next_at <= self.now:
                self.carry_out(machine.rank, machine.tick(self.now))
        return True

    def run(self, picks: Iterable[int] = ()) -> None:
        """Deliver all messages in the order of `picks`, and let all deadlines pass."""
        for pick in picks:
            self.step(pick)
        while self.step():
            pass

    def kill(self, rank: int) -> None:
        """End a rank without a message; its neighbours notice later, as its connections break."""
        self.dead.add(rank)
        around = [self.topology.parent(rank), *self.topology.children(rank)]
        for other in around:
            if other is not None:
                self.under_way.append(Delivery(other, Notify(other, round_errors.disconnected(rank)), rank))


def _ending(done: RoundDone) -> bytes | ReknitError:
    if done.outcome.error is not None:
        return from_wire(done.outcome.error)
    return done.outcome.answers.payloads(1)[0]
