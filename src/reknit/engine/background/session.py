"""The agents of a group's ranks: started with or before the first save, and replaced when some are lost."""

from __future__ import annotations

import dataclasses
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from reknit.comm import group as comm
from reknit.engine import messages as round_messages
from reknit.engine.background import messages
from reknit.engine.background.lanes import (
    first_owners,
    is_private,
    joining,
    listening,
    opened_door,
    places,
    where_of,
)
from reknit.engine.background.link import AgentLink
from reknit.engine.background.messages import ProcessContext, process_context
from reknit.engine.background.trainer_save import TrainerSave
from reknit.engine.outcome import SaveOutcome
from reknit.engine.saving.layout import PLANS_KEPT, keep_latest
from reknit.errors import AgentError, ShortageError
from reknit.format import paths
from reknit.options import UNIX, SaveOptions
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group
    from reknit.engine.background.lanes import Side
    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.saving.layout import Outline
    from reknit.engine.saving.part import Chosen
    from reknit.errors import ReknitError
    from reknit.events.phase import Deadline


NO_CLAIMS = round_messages.FirstClaims(None)
FORM_ROUND = "agents"
"""The round in which the agents of a group find each other."""


@dataclass(slots=True)
class Plan:
    """An outline for holdings of one layout.

    It is `assigned` once the root has the claims of this rank under it, and `committed` once it has the
    chunks.  `chosen` are the shards of the layout that are compared, by `SaveOptions.check_replicas`.
    """

    outline: Outline
    assigned: bool = False
    committed: bool = False
    chosen: dict[str, Chosen] = field(default_factory=dict)


class AgentStart:
    """An agent that is being started, while this process continues.

    `link` raises an error of the start, inside a round, so that the other ranks receive it.
    """

    def __init__(self, group: comm.Group, options: SaveOptions, *, in_process: bool) -> None:
        """Start an agent only with `begin`, unless the others need the address that it will listen at."""
        self._link: AgentLink | None = None
        self.error: BaseException | None = None
        self._in_process, self._timeout_s = in_process, options.timeout_s
        where, topology = where_of(group, options.comm), group.topology
        self._children = topology.children(group.rank)
        self._wait_s = options.comm.connect_timeout_s
        self.listens = bool(self._children) and where.bind != UNIX
        self.join = messages.Join(
            job=FORM_ROUND,
            rank=group.rank,
            hosts=topology.hosts,
            fan_out=topology.fan_out,
            generation=group.given if isinstance(group, comm.SoloGroup) else group.generation,
            comm=dataclasses.asdict(where),
            low_priority=options.priority == "low",
        )
        if self.listens:
            self.begin()

    def begin(self) -> AgentStart:
        """Start the agent, unless it has been."""
        if self._link is not None or self.error is not None:
            return self
        join, door = self.join, None
        try:
            if self._children and not self.listens:
                door = opened_door(join, len(self._children))
            self._link = AgentLink(
                join.rank, in_process=self._in_process, send_timeout_s=self._timeout_s, door=door
            )
            self._link.send_to_starting(join, None if door is None else door.socket.fileno())
        except BaseException as error:  # Ctrl-C too: the other ranks would wait for this one
            self.error = error
        return self

    @property
    def is_there(self) -> bool:
        """Whether the agent was started, and has not ended since."""
        return self.error is None and self._link is not None and not self._link.broken

    def link(self) -> AgentLink:
        """Return the link to the agent, or raise the error of its start."""
        self.begin()
        if self.error is not None:
            raise self.error
        assert self._link is not None
        return self._link

    def address(self) -> str:
        """Return the address at which the agent listens, empty for one without agents below.

        Only an agent of several hosts finds it itself.  Raises the error of its start.
        """
        link = self.link()
        if self.listens:
            here = link.answer(self._wait_s)
            assert isinstance(here, messages.Listening)
            return here.address
        return self.join.door

    def stand_in(self, above: str, error: ReknitError) -> None:
        """Send the error of an agent that ended before it joined the others to them, in its place."""
        assert self._link is not None
        if len(self.join.hosts) > 1:
            with suppress(Exception):  # without it the others wait for the time to connect
                joining(self.join, self._link.door).fail(above, error)

    def give_up(self) -> None:
        """End an agent that is not needed."""
        if self._link is not None:
            self._link.end()


class AgentSession:
    """The agent of this rank, its saves, and the plans on which the agents of all ranks have agreed."""

    def __init__(
        self, link: AgentLink, size: int, place: round_messages.TreeAddress, owners: bytes | None
    ) -> None:
        """Use `form`."""
        self.link = link
        self.size = size
        self.first = place.number
        """Number of the first save in which all ranks can take part."""
        self.arenas: set[int] = set()
        """Numbers of the arenas that the agent has."""
        self.owners = owners
        """The owners of the shards that this rank claimed when the agents started, if all ranks did so."""
        self._seed = place.seed
        self.saves: dict[int, TrainerSave] = {}
        self._plans: dict[bytes, Plan] = {}
        link.deliver, link.lost = self._receive, self._lose

    @classmethod
    def form(
        cls,
        group: comm.Group,
        options: SaveOptions,
        number: Callable[[], int],
        starting: AgentStart,
        side: Callable[[], Side] | None = None,
        *,
        claims: Callable[[], round_messages.FirstClaims] | None = None,
    ) -> AgentSession:
        """Let the agent of this rank join the agents of all other ranks; all ranks call this.

        The trainers exchange the addresses of the agents in their group; afterwards trainers and agents are
        two independent groups.  `number` is the number of the next save of this rank.  With `side`, which
        listens, the trainers form a second group in the same rounds.

        A caller with `claims` on a single host does not wait until the agents have joined each other, and
        also receives the owners of these claims.  An agent reads its messages once it runs.  Raises
        `AgentError` and `CommError`.
        """
        above, wait_s = group.topology.parent(group.rank), 2 * options.comm.connect_timeout_s
        try:
            with comm.turn(group, FORM_ROUND, options.timeout_s, opens=True) as turn:
                link, address = starting.link(), starting.address()
                trainers = None if side is None else side()
                own = "" if trainers is None else trainers.address
                here = round_messages.ListenAddress(address, above, number(), own)
                place = turn.give(places(turn.gather(here)), round_messages.TreeAddress)
            with comm.turn(group, FORM_ROUND, options.timeout_s) as turn:
                link.unjoined = partial(starting.stand_in, place.above)
                link.send_to_starting(messages.ConnectParent(place.above))
                if trainers is not None:
                    trainers.connect_parent(place.side)
                if claims is None or starting.listens or not is_private(place.above):
                    link.answer(wait_s)
                requests = turn.gather(NO_CLAIMS if claims is None else claims())
                answers = None if requests is None else first_owners(requests)
                owners = turn.give(answers, round_messages.FirstOwners)
        except BaseException:  # Ctrl-C too: an unused agent must not stay
            starting.give_up()
            raise
        return cls(link, group.size, place, owners.shards)

    def new_save(self, number: int, pending: SaveOutcome) -> TrainerSave:
        """Add a save and return it; every rank adds every number from `first` on."""
        pending.ranks = self.size
        save = TrainerSave(number, paths.numbered_write_id(self._seed, number), pending, self.link)
        self.saves[number] = save
        return save

    def new_context(self, save: TrainerSave, timeout_s: float) -> ProcessContext | None:
        """Return the process context of a save if its agent has another one.

        The agent sets them when all earlier saves are committed.  Until then it receives no message, so the
        earlier saves are staged first.  Raises `AgentError` for a context that cannot be sent.
        """
        self.link.require_same_identity()
        if self.link.in_process or (now := process_context()) == self.link.context:
            return None
        for other in list(self.saves.values()):
            if other is not save:
                other.pending.wait_staged(timeout_s)
        return now

    def plan(self, save: TrainerSave, key: bytes) -> Plan | None:
        """Return the plan for the layout `key` of a save, if any, and mark it as used last."""
        save.layout = key
        plan = self._plans.get(key)
        return plan and keep_latest(self._plans, key, plan, PLANS_KEPT)

    def keep(self, key: bytes, plan: Plan) -> Plan:
        """Keep a new plan, and return it; the least recently used plan makes room."""
        return keep_latest(self._plans, key, plan, PLANS_KEPT)

    def share_arena(self, lease: Lease) -> None:
        """Share an arena with the agent."""
        if dropped := tuple(number for number in lease.dropped if number in self.arenas):
            self.link.send(messages.DropArenas(dropped))
            self.arenas.difference_update(dropped)
        if lease.number not in self.arenas:
            self.link.send(messages.GiveArena(lease.number, lease.arena.nbytes), lease.arena.fd)
            self.arenas.add(lease.number)

    def _receive(self, message: Any) -> None:
        if isinstance(message, messages.Events):
            if (recorded := self.saves.get(message.number)) is not None:  # else it is over
                recorded.receive(message)
            return
        save = self.saves[message.number]
        if isinstance(message, messages.Promoted):
            if all(each.done() for at, each in enumerate(save.pending.promotions) if at != message.target):
                del self.saves[message.number]
        elif isinstance(message, messages.Assigned):
            if (plan := self._plans.get(save.layout)) is not None:
                plan.assigned = True
        elif isinstance(message, messages.SaveDone):
            if message.error is not None or not save.promotes:
                del self.saves[message.number]
            plan = self._plans.get(save.layout)
            if message.error is not None:
                # The plans may be wrong; with the next save all ranks make new ones.
                self._plans.clear()
            elif plan is not None:
                plan.committed = True
        save.receive(message)

    def _lose(self, error: ReknitError) -> None:
        for save in list(self.saves.values()):
            save.lose(error)
        self.saves.clear()


logger = logging.getLogger("reknit")

_NEW_AGENTS_S = 30.0
"""Seconds for which a save waits for new agents in place of lost ones."""


class AgentSupervisor:
    """Numbers the saves of this rank in one group, and finds the agents for each.

    All ranks count the same saves, so a number names one save of the group.
    """

    def __init__(self, *, in_process: bool) -> None:
        """Start nothing yet; with `in_process` the agents are threads of the trainers."""
        self.session: AgentSession | None = None
        self.failure: Exception | None = None
        """The error that kept lost agents from being replaced."""
        self.count = 0
        self._in_process = in_process
        self._options = SaveOptions()
        self._side: Group | None = None
        self._early: AgentStart | None = None
        self._replacing: AgentSession | None = None
        self._settled = threading.Event()
        self._settled.set()
        self._waiting: set[int] = set()
        self._given_up: list[int] = []
        self._lock = threading.Condition()

    def next_number(self, options: SaveOptions) -> int:
        """Return the number of the next save, which has these options."""
        with self._lock:
            number, self.count = self.count, self.count + 1
            self._waiting.add(number)
            self._options = options
            return number

    def start_early(self, group: Group, options: SaveOptions) -> None:
        """Start an agent for this rank, unless it has one, for `join_early` or the next save.

        An error is dropped, since these start an agent again.  Only Ctrl-C is raised.
        """
        if self.session is not None or self._early is not None:
            return
        self._options = options
        early = AgentStart(group, options, in_process=self._in_process).begin()
        if early.error is None:
            self._early = early
            return
        early.give_up()
        if not isinstance(early.error, Exception):
            raise early.error

    def join_early(self, group: Group, options: SaveOptions) -> None:
        """Join the agents of all ranks before there is a save; all ranks call this after `start_early`."""
        if self.session is None:
            self._options = options
        starting = self.start(group)
        if starting is not None:
            self._join(group, starting, self._first_waiting, lambda: NO_CLAIMS)

    def start(self, group: Group) -> AgentStart | None:
        """Return the agent that starts for this rank, or None if it has joined the others already."""
        early, self._early = self._early, None
        if early is not None and early.is_there:
            return early
        if early is not None:
            early.give_up()
        return None if self.session else AgentStart(group, self._options, in_process=self._in_process)

    def session_for(
        self,
        number: int,
        group: Group,
        starting: AgentStart | None,
        claims: Callable[[], round_messages.FirstClaims],
    ) -> AgentSession:
        """Return the agents that work on a save; agents that are `starting` join each other first."""
        if starting is not None:
            self._join(group, starting, lambda: number, claims)
        session = self.session
        assert session is not None
        if session.link.broken and not session.link.ended_on_purpose:
            self.replace(session)
            with self._lock:
                self._lock.wait_for(
                    lambda: self.session is not session or self.failure is not None, _NEW_AGENTS_S
                )
                session = self.session or session
        if session.link.broken:
            raise self.failure or AgentError(
                "the agents of other ranks have ended"
                if session.link.ended_on_purpose
                else f"an agent was lost, and no new ones were there within {_NEW_AGENTS_S:g} s",
                rank=session.link.rank,
                remedy="let every rank call reknit.close() and save again",
            )
        if number < session.first:
            raise AgentError(
                "this save began while agents were lost, and other ranks have given it up",
                rank=session.link.rank,
                remedy="the next save is well",
            )
        return session

    def _join(
        self,
        group: Group,
        starting: AgentStart,
        number: Callable[[], int],
        claims: Callable[[], round_messages.FirstClaims],
    ) -> None:
        """Join the agents of all ranks; `number` is the number of the next save of this rank."""
        new: list[Side] = []

        def side() -> Side:
            new.append(listening(group, "trainers", self._options.comm))
            return new[0]

        needed = None if self._side is not None or group.size == 1 else side
        try:
            session = AgentSession.form(group, self._options, number, starting, needed, claims=claims)
        except BaseException:
            for trainers in new:
                trainers.close()
            raise
        self._side = self._side or (new[0] if new else comm.SoloGroup())
        self._install(session)

    def begun(self, number: int) -> None:
        """Record that the agents have a save, so that new agents need not wait for it."""
        with self._lock:
            self._waiting.discard(number)

    def give_up(self, number: int) -> None:
        """Record that a save did not begin, and report it to the agents, now or once there are any."""
        with self._lock:
            self._waiting.discard(number)
            self._given_up.append(number)
            if self.session is not None and not self.session.link.broken:
                self._report_given_up(self.session)

    def replace(self, lost: AgentSession) -> None:
        """Start new agents in place of lost ones, in a thread, together with all other ranks.

        Every rank does so as soon as it notices the loss, and not at its next save.  Otherwise two ranks
        could wait for each other, if one notices the loss just before a save and the other just after.
        """

        def form() -> None:
            assert self._side is not None
            lost.link.quit()
            try:
                starting = AgentStart(self._side, self._options, in_process=self._in_process)
                session = AgentSession.form(self._side, self._options, self._first_waiting, starting)
            except Exception as error:  # also a bug: saves wait for the outcome
                if self.session is lost:
                    self._fail(error)
            else:
                self._install_instead(session, lost)
            finally:
                if self._replacing is lost:  # else those are lost, too, and the next thread has begun
                    self._settled.set()

        with self._lock:
            if self._replacing is lost or self.session is not lost:
                return
            self._replacing = lost
            self._settled.clear()
        try:
            start_thread("reknit-forms-agents", form)
        except ShortageError as error:  # the thread that receives from the agent must go on
            self._settled.set()
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Raise an error in the saves that wait for new agents."""
        logger.error("agents were lost, and new ones could not be started: %s", error)
        with self._lock:
            self.failure = error
            self._lock.notify_all()

    def close(self, deadline: Deadline, all_ended: Callable[[], bool]) -> None:
        """Ask the agents to end, and wait for their end if all saves have ended."""
        if self._side is not None:
            self._side.close()
        self._settled.wait(deadline.remaining())  # no agents may replace lost ones after this
        early, self._early = self._early, None
        if early is not None:
            early.give_up()
        with self._lock:
            session, self.session = self.session, None
        if session is not None:
            session.link.quit()
            if all_ended():
                session.link.ended(deadline.remaining())

    def _report_given_up(self, session: AgentSession) -> None:
        """Report the saves that this rank gave up to all ranks; called with the lock held."""
        for number in self._given_up:
            if number >= session.first:
                error = AgentError("this rank gave the save up when agents were lost", rank=session.link.rank)
                ended = SaveOutcome("")
                ended.end(error)  # the user already has the error
                session.new_save(number, ended).abandon(error, self._options.timeout_s)
        self._given_up.clear()

    def _first_waiting(self) -> int:
        """Return the number of the first save in which new agents can take part."""
        with self._lock:
            return min(self._waiting, default=self.count)

    def _install_instead(self, session: AgentSession, lost: AgentSession) -> None:
        """Use new agents in place of lost ones, or end them if `close` has not waited for them."""
        if self.session is lost:  # in the log before a waiting save continues, and without the lock
            logger.warning("agents were lost; new ones take their place from save %d on", session.first)
        with self._lock:
            if wanted := self.session is lost:
                self._install(session)
        if not wanted:
            session.link.quit()

    def _install(self, session: AgentSession) -> None:
        """Use new agents for all later saves, and report to them the saves that this rank gave up."""
        session.link.failed = lambda: self.replace(session)
        with self._lock:
            self._report_given_up(session)
            self.session = session
            self._lock.notify_all()
        if session.link.broken and not session.link.ended_on_purpose:
            self.replace(session)  # lost already, before `failed` was set
