"""The trainer's part in `prepare`: the work for which the first save of a layout would wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.engine import round_messages
from reknit.engine.background import agent_messages as say
from reknit.engine.background.trainer.begin_message import begin_message
from reknit.engine.memory.staging import Staging

if TYPE_CHECKING:
    from reknit.engine.background.trainer.agent_session import AgentSession
    from reknit.engine.background.trainer.stage_for_agent import PreparedSave
    from reknit.engine.background.trainer.trainer_save import TrainerSave


def warm_up(prepared: PreparedSave, session: AgentSession, save: TrainerSave) -> None:
    """Make the plan and the arena of a layout, with all ranks, without copying or writing.

    Every rank makes a new plan, so that the plans of all ranks fit each other after any earlier saves.
    """
    job, part = prepared.job, prepared.part
    if job.options.stage == "lazy":
        for barrier in part.encoded.holdings.barriers:
            barrier.stands()  # so that training steps pass it until the first save
    begin = begin_message(part, session, save, claimed=False)
    begin.claims.blobs, begin.claims.witnesses = [], round_messages.NO_WITNESSES  # assigned with each save
    begin.warm_up = True
    begin.promote_to = []
    save.begin(begin, job.recorder)
    if part.needs_assignment:
        plan = session.agree(part, save)
    else:
        plan = session.keep(part.layout, prepared.plan_alone())
    plan.assigned = True  # or all plans are dropped
    Staging(part.sources.on_devices)  # the stream of each device that will be copied from
    with job.recorder.phase("back_pressure"):
        arenas = prepared.arena.arenas
        lease = prepared.arena.lease or (arenas.acquire(plan.nbytes, 0.0) if plan.nbytes else None)
        if lease is not None:  # else saves under way hold all arenas
            try:
                lease.pin(part.sources.on_devices)
                session.share_arena(lease)
            finally:
                arenas.release(lease)
    save.staged()
    session.link.send(say.Ready(save.number))
