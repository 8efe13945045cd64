"""The save story of a trainer that does not wait, in numbered steps; the agent's is `agent_save`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from reknit.engine.background import agent_messages as say
from reknit.engine.background.trainer.agent_session import Plan
from reknit.engine.background.trainer.begin_message import begin_message, lend_values
from reknit.engine.background.trainer.deferred import Deferred
from reknit.engine.background.trainer.snapshot import Snapshot
from reknit.engine.saving.root import check_manifest
from reknit.errors import typed
from reknit.monitor.phase import monotonic
from reknit.system import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group
    from reknit.engine.background.trainer.agent_session import AgentSession
    from reknit.engine.background.trainer.agent_supervisor import AgentSupervisor
    from reknit.engine.background.trainer.prepared_save import PreparedSave, Until
    from reknit.engine.background.trainer.trainer_save import TrainerSave
    from reknit.engine.outcome import SaveOutcome
    from reknit.engine.saving.rank_part import RankPart
    from reknit.engine.saving.save_job import SaveJob
    from reknit.options import SaveOptions

    Story = Callable[[PreparedSave, AgentSession, TrainerSave], None]

logger = logging.getLogger("reknit")


def begin_at_agent(
    story: Story,
    until: Until,
    pending: SaveOutcome,
    *,
    prepared: PreparedSave,
    supervisor: AgentSupervisor,
    wait_for_others: Callable[[AgentSession], None],
    group: Group,
    make: Callable[[], SaveJob],
    options: SaveOptions,
) -> None:
    """Find the agents of a save or warm-up, and run its `story` with them; `pending` receives an error.

    Every rank takes the next number, and ends it at its agent after every error, so that no other rank waits
    for this one.  Only Ctrl-C and exits of the process are raised.
    """
    save: TrainerSave | None = None
    wrong: BaseException | None = None
    number = supervisor.next_number(options)
    try:
        # An agent that is not there yet starts while this rank prepares as much of the save as it can alone.
        starting = supervisor.start(group)
        wrong = prepared.prepare(make, "collect" if starting is None else until)
        session = supervisor.session_for(number, group, starting)
        save = session.new_save(number, pending)
        save.begun, save.unrecorded = prepared.begun, prepared.recorder
        prepared.arena.hand_over(save)
        supervisor.begun(number)
        wait_for_others(session)
        pending.place = pending.path, session
        if wrong is not None:
            raise wrong
        story(prepared, session, save)
    except BaseException as caught:  # also a bug: the other ranks must receive it
        # The first error counts, except that Ctrl-C always does, since it concerns the whole process.
        first = caught if wrong is None or not isinstance(caught, Exception) else wrong
        error = typed(first) if isinstance(first, Exception) else first
        if save is not None:
            save.abandon(error, options.timeout_s)
        else:
            prepared.arena.release()
            supervisor.give_up(number)
        if pending.end(error) and pending.logged:
            _log_failure(pending, error)
        if not isinstance(error, Exception):
            pending.asked = True  # it is raised here, so the next save need not raise it
            raise error from (None if error is caught else caught)


def stage_for_agent(prepared: PreparedSave, session: AgentSession, save: TrainerSave) -> None:
    """Stage a save; after it the state may change, with ``stage="lazy"`` except memory behind barriers."""
    job, part = prepared.job, prepared.part
    recorder, check = job.recorder, job.options.check_replicas
    # 1 collect is done; the plan is known, or this rank makes it alone, or together with all ranks
    if job.group.rank == 0:
        check_manifest(job)
    plan = session.plan(save, part.layout)
    claimed = plan is not None and plan.assigned
    if plan is None and not part.needs_assignment:
        plan = session.keep(part.layout, prepared.plan_alone())
    chosen = part.compare(None if plan is None else plan.chosen.get(check))
    lend_values(session, save, part.encoded)
    save.begin(begin_message(part, session, save, claimed=claimed), recorder)
    # 2 plan; ranks wait for each other only for a new layout with shards that several ranks may hold
    plan = plan or agreed_plan(part, session, save)
    plan.chosen[check] = chosen
    with recorder.phase("plan"):
        images = plan.outline.images(save.write_id, part.sources)
    # 3 stage; the agent writes each span as soon as it is filled
    lease = prepared.arena.acquire(plan.nbytes, job)
    prepared.arena.hand_over(save)
    session.share_arena(lease)
    session.link.send(
        say.Planned(
            number=save.number,
            items=list(part.encoded.holdings.items),
            files=plan.outline.listed,
            frozen=plan.outline.frozen,
            columns=None if plan.committed else plan.outline.columns,
            arena=lease.number,
            ring=lease.nbytes,
        )
    )
    snapshot = Snapshot(images, lease, save, job.options)
    save.streamed = snapshot.streamed
    lazy = job.options.stage == "lazy" and not snapshot.streamed
    deferred = None
    if prepared.copied:
        snapshot.report_taken()
    else:
        with recorder.phase("stage", nbytes=sum(image.nbytes for image in images)):
            deferred = Deferred(part.encoded.holdings, images) if lazy else None
            if deferred:
                staging = snapshot.begin(deferred)
            else:
                snapshot.take()
    # 4 training goes on; `save` receives the outcome, which the user has as a `PendingSave`
    save.blocked_s = monotonic() - prepared.begun
    if deferred:
        start_thread("reknit-stages", lambda: _settle(job, save, lambda: snapshot.settle(deferred, staging)))
    else:
        save.staged()


def agreed_plan(part: RankPart, session: AgentSession, save: TrainerSave) -> Plan:
    """Return the plan for a new layout, once all ranks have begun this save."""
    job = part.job
    with job.recorder.phase("assign"):
        owners = save.owners(job.options.timeout_s)
    with job.recorder.phase("plan"):
        plan = Plan(part.outline(owners), assigned=True)
    return session.keep(part.layout, plan)


def _settle(job: SaveJob, save: TrainerSave, settle: Callable[[], None]) -> None:
    """Finish the copying of a lazily staged save."""
    try:
        settle()
    except BaseException as error:  # also a bug: all ranks must receive it
        save.abandon(error, job.options.timeout_s)
    else:
        save.staged()


def _log_failure(pending: SaveOutcome, error: BaseException) -> None:
    """Log that a save failed; the traceback comes with the outcome."""
    logger.error("save to %s failed: %s", pending.path, str(error) or type(error).__name__)
