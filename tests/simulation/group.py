"""A simulated rank's group: the real `RoundMachine`, driven by virtual messages and virtual time."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

from msgspec import structs

from reknit.comm import round_errors
from reknit.comm.rank_messages import Outcome, Report, decode, encode
from reknit.comm.tree.machine import Decide, Notify, RoundDone, RoundMachine, SendOutcome, SendReport, Warn
from reknit.errors import from_wire
from tests.simulation.network import Broken, Left, Message, ending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.comm.group import Call, Topology
    from reknit.comm.tree.machine import Effect
    from reknit.errors import ReknitError
    from tests.simulation.network import Network
    from tests.simulation.process import Process


JOB = "simulated"
MAX_NBYTES = 1 << 30


class SimGroup:
    """The group of one rank of one incarnation (`run`) of a job, as `comm.group.Group`."""

    def __init__(
        self, process: Process, network: Network, topology: Topology, rank: int, *, run: int, generation: int
    ) -> None:
        self.process, self.rank, self.run, self.generation = process, rank, run, generation
        self.topology, self.size, self.parent = topology, topology.size, topology.parent(rank)
        children = topology.children(rank)
        self.neighbours = (*(() if self.parent is None else (self.parent,)), *children)
        self.on_exchange: Callable[[str, float, float], None] = lambda name, timeout_s, took_s: None
        self._network = network
        self._machine = RoundMachine(rank, topology, job=JOB, generation=generation, max_nbytes=MAX_NBYTES)
        self._timer_at = inf
        self._call: Call | None = None
        self._took_s = 0.0
        self._asked: Decide | None = None
        self._done: RoundDone | None = None
        self._waits_for: int | None = None
        network.join(self)

    @property
    def broken(self) -> bool:
        """Whether the group has noticed that it is broken."""
        return self._machine.broken is not None

    def gather(self, call: Call) -> list[bytes] | None:
        """Enter a round, as `Group.gather` says."""
        self._asked = self._done = None
        self._took_s = 0.0
        self._call = call
        self.process.act(f"enter {call.name}", lambda: self._enter(structs.replace(call, opens=False)))
        if self.rank > 0:
            return None
        if (asked := self._wait()) is None:
            raise from_wire(self._outcome().error or {})  # no round has an answer before a decision
        return asked.requests

    def give(self, answers: Sequence[bytes] | None) -> bytes:
        """End the round, as `Group.give` says."""
        if answers is not None:
            asked, self._asked = self._asked, None
            assert asked is not None
            self.process.act(
                "decided", lambda: self._do(self._machine.decided(asked.number, answers, self._now))
            )
        self._wait()
        outcome = self._outcome()
        if outcome.error is not None:
            raise from_wire(outcome.error)
        return outcome.answers.payloads(1)[0]

    def leave(self, call: Call, error: BaseException) -> None:
        """End the round of `call`, as `Group.leave` says."""
        if self._call is call:
            self._call = None
            self.process.act(f"leave {call.name}", lambda: self._do(self._machine.leave(error, self._now)))

    def _wait(self) -> Decide | None:
        """Wait until this rank has to decide, or the round is over; return its decision to make."""
        process = self.process
        began, stopped_s = process.schedule.moment, process.stopped_s
        while self._done is None and self._asked is None:
            process.wait()
        self._took_s += process.schedule.moment - began - (process.stopped_s - stopped_s)
        return self._asked

    def _outcome(self) -> Outcome:
        """Return the outcome of a round that is over."""
        assert self._call is not None
        assert self._done is not None
        call, self._call, outcome = self._call, None, self._done.outcome
        self.on_exchange(call.name, call.timeout_s, self._took_s)
        return outcome

    def close(self) -> None:
        """Leave the group."""
        self.process.act("close", lambda: self._break_off(round_errors.closed(self.rank)))

    # Inputs of this rank from outside.

    def receive(self, sender: SimGroup, message: Message) -> None:
        """Receive a message."""
        copy = " again" if message.copy else ""
        self.process.later(
            f"receives{copy} from {sender.process.name}: {message.label}",
            partial(self._take, sender, message),
        )

    def lose(self, rank: int) -> None:
        """Notice that the connection to a rank is broken."""
        self.process.later(f"loses rank {rank}", lambda: self._break_off(round_errors.disconnected(rank)))

    def _take(self, sender: SimGroup, message: Message) -> None:
        machine, content, now = self._machine, message.content, self._now
        if isinstance(content, Report):
            self._do(machine.receive_report(decode(encode(content), Report, MAX_NBYTES), now))
        elif isinstance(content, Outcome):
            if content.number == self._waits_for:
                self._waits_for = None
            self._do(machine.receive_outcome(decode(encode(content), Outcome, MAX_NBYTES), now))
        elif sender.run != self.run:
            return  # these belong to connections, which strangers lack
        elif isinstance(content, Left):
            self._do(machine.child_left(sender.rank, content.number, now))
        else:
            self._do(machine.break_off(round_errors.copied(content.error), now, origin=sender.rank))

    # Calls of this rank to its machine, always within an action.

    @property
    def _now(self) -> float:
        return self.process.schedule.moment

    def _enter(self, call: Call) -> None:
        self._do(self._machine.enter(call, self._now))

    def _break_off(self, error: ReknitError) -> None:
        self._do(self._machine.break_off(error, self._now))

    def _tick(self) -> None:
        self._do(self._machine.tick(self._now))

    def _wind(self) -> None:
        """Set the timer to the next moment at which the machine acts."""
        due = self._machine.next_at
        if due < self._timer_at:
            self._timer_at = due
            self.process.schedule.at(due, self._ring)

    def _ring(self) -> None:
        self._timer_at = inf
        if self._machine.next_at <= self._now:
            self.process.later("timer", self._tick)
        else:
            self._wind()

    def _do(self, effects: Sequence[Effect]) -> None:
        """Carry out the effects of an input of the machine, each as a step of its own."""
        for effect in reversed(effects):
            self.process.next(_label(effect), partial(self._carry_out, effect))
        self._wind()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, SendReport):
            assert self.parent is not None
            self._waits_for = effect.report.number
            self._network.send(self, self.parent, effect.report)
        elif isinstance(effect, SendOutcome):
            self._network.send(self, effect.child, effect.outcome)
        elif isinstance(effect, Notify):
            self._network.send(self, effect.rank, Broken(effect.error))
        elif isinstance(effect, Decide):
            self._asked = effect
            self.process.wake()
        elif isinstance(effect, RoundDone):
            self._end(effect)
        # A refused report is a copy, or comes too late, so its sender gets no answer.

    def _end(self, done: RoundDone) -> None:
        if self._waits_for == done.number and self.parent is not None:
            # The call that carried the report ends before its answer.
            self._waits_for = None
            self._network.send(self, self.parent, Left(done.number))
        self._done = done
        self.process.wake()


def _label(effect: Effect) -> str:
    """Return an effect as the trace shows it."""
    if isinstance(effect, SendReport):
        return f"sends {Message(effect.report).label}"
    if isinstance(effect, SendOutcome):
        return f"sends rank {effect.child} {Message(effect.outcome).label}"
    if isinstance(effect, Notify):
        return f"notifies rank {effect.rank} of {Message(Broken(effect.error)).label}"
    if isinstance(effect, RoundDone):
        return f"done with {effect.outcome.label}: {ending(effect.outcome)}"
    if isinstance(effect, Warn):
        return f"warns: {effect.text}"
    return f"decides round {effect.number}" if isinstance(effect, Decide) else f"refuses: {effect.error}"
