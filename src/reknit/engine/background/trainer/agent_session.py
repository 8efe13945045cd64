"""The agents of a group's ranks, as one rank sees them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reknit.comm import group as comm
from reknit.engine import round_messages
from reknit.engine.background import agent_messages as say
from reknit.engine.background.side_group import places, where_of
from reknit.engine.background.trainer.agent_link import AgentLink
from reknit.engine.background.trainer.trainer_save import TrainerSave
from reknit.engine.memory.arena import image_nbytes
from reknit.engine.saving.plan_cache import keep_latest
from reknit.engine.saving.save_coordinator import PLANS_KEPT
from reknit.format import paths
from reknit.processes.circumstances import Circumstances, here

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.memory.arena_pool import Lease
    from reknit.engine.outcome import SaveOutcome
    from reknit.engine.saving.compared_copies import Chosen
    from reknit.engine.saving.file_layout import Outline
    from reknit.engine.saving.rank_part import RankPart
    from reknit.errors import ReknitError
    from reknit.options import SaveOptions

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

    @property
    def nbytes(self) -> int:
        """Size of the arena that holds the files."""
        return image_nbytes([file.nbytes for file in self.outline.files])


class AgentStart:
    """An agent that is being started, while this process continues.

    `link` raises an error of the start, inside a round, so that the other ranks receive it.
    """

    def __init__(self, group: comm.Group, options: SaveOptions, *, in_process: bool) -> None:
        """Start an agent for this rank."""
        self._link: AgentLink | None = None
        self.error: BaseException | None = None
        settings, low = dataclasses.asdict(where_of(group, options.comm)), options.priority == "low"
        hosts, fan_out = group.topology.hosts, group.topology.fan_out
        generation = group.given if isinstance(group, comm.SoloGroup) else group.generation
        try:
            self._link = AgentLink(group.rank, in_process=in_process, send_timeout_s=options.timeout_s)
            self._link.send(
                say.Join(
                    job=FORM_ROUND,
                    rank=group.rank,
                    hosts=hosts,
                    fan_out=fan_out,
                    generation=generation,
                    comm=settings,
                    low_priority=low,
                )
            )
        except BaseException as error:  # Ctrl-C too: the other ranks would wait for this one
            self.error = error

    @property
    def is_there(self) -> bool:
        """Whether the agent was started, and has not ended since."""
        return self.error is None and self._link is not None and not self._link.broken

    def link(self) -> AgentLink:
        """Return the link to the agent, or raise the error of its start."""
        if self.error is not None:
            raise self.error
        assert self._link is not None
        return self._link

    def give_up(self) -> None:
        """End an agent that is not needed."""
        if self._link is not None:
            self._link.end()


class AgentSession:
    """The agent of this rank, its saves, and the plans on which the agents of all ranks have agreed."""

    def __init__(self, link: AgentLink, size: int, place: round_messages.TreeAddress) -> None:
        """Use `form`."""
        self.link = link
        self.size = size
        self.first = place.number
        """Number of the first save in which all ranks can take part."""
        self.arenas: set[int] = set()
        """Numbers of the arenas that the agent has."""
        self._seed = place.seed
        self.saves: dict[int, TrainerSave] = {}
        self._plans: dict[bytes, Plan] = {}
        link.deliver, link.lost = self._receive, self._lose

    @classmethod
    def form(
        cls, group: comm.Group, options: SaveOptions, number: Callable[[], int], starting: AgentStart
    ) -> AgentSession:
        """Join the agent of this rank with the agents of all other ranks; all ranks call this.

        The trainers exchange the addresses of the agents in their group; afterwards trainers and agents are
        two independent groups.  `number` is the number of the next save of this rank.  Raises `AgentError`
        and `CommError`.
        """
        connect_s = options.comm.connect_timeout_s
        try:
            with comm.turn(group, FORM_ROUND, options.timeout_s, opens=True) as turn:
                link = starting.link()
                here = link.answer(connect_s)
                assert isinstance(here, say.Listening)
                address = round_messages.ListenAddress(here.address, here.above, number())
                place = turn.give(places(turn.gather(address)), round_messages.TreeAddress)
            with comm.turn(group, FORM_ROUND, options.timeout_s) as turn:
                link.ask(say.ConnectParent(place.above), 2 * connect_s)
                turn.arrive()
        except BaseException:  # Ctrl-C too: an unused agent must not stay
            starting.give_up()
            raise
        return cls(link, group.size, place)

    def new_save(self, number: int, pending: SaveOutcome) -> TrainerSave:
        """Add a save and return it; every rank adds every number from `first` on."""
        pending.ranks = self.size
        save = TrainerSave(number, paths.numbered_write_id(self._seed, number), pending, self.link)
        self.saves[number] = save
        return save

    def new_circumstances(self, save: TrainerSave, timeout_s: float) -> Circumstances | None:
        """Return the circumstances of a save if its agent has others.

        The agent sets them when all earlier saves are committed.  Until then it receives no message, so the
        earlier saves are staged first.  Raises `AgentError` for circumstances that cannot be sent.
        """
        self.link.require_same_identity()
        if self.link.in_process or (now := here()) == self.link.circumstances:
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

    def agree(self, part: RankPart, save: TrainerSave) -> Plan:
        """Return the plan for a new layout, once all ranks have begun this save."""
        job = part.job
        with job.recorder.phase("assign"):
            owners = save.owners(job.options.timeout_s)
        with job.recorder.phase("plan"):
            plan = Plan(part.outline(owners), assigned=True)
        return self.keep(part.layout, plan)

    def share_arena(self, lease: Lease) -> None:
        """Share an arena with the agent."""
        if dropped := tuple(number for number in lease.dropped if number in self.arenas):
            self.link.send(say.DropArenas(dropped))
            self.arenas.difference_update(dropped)
        if lease.number not in self.arenas:
            self.link.send(say.GiveArena(lease.number, lease.arena.nbytes), lease.arena.fd)
            self.arenas.add(lease.number)

    def _receive(self, message: Any) -> None:
        if isinstance(message, say.Events):
            if (recorded := self.saves.get(message.number)) is not None:  # else it is over
                recorded.receive(message)
            return
        save = self.saves[message.number]
        if isinstance(message, say.Promoted):
            if all(each.done() for at, each in enumerate(save.pending.promotions) if at != message.target):
                del self.saves[message.number]
        elif isinstance(message, say.Assigned):
            if (plan := self._plans.get(save.layout)) is not None:
                plan.assigned = True
        elif isinstance(message, say.SaveDone):
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
