"""A save up to its first message to the agent, which its rank prepares alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from reknit.engine.background.trainer.agent_session import Plan
from reknit.engine.background.trainer.save_arena import SaveArena
from reknit.engine.background.trainer.snapshot import Snapshot
from reknit.engine.saving.rank_part import RankPart
from reknit.format import paths
from reknit.monitor.phase import monotonic

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.memory.arena_pool import Arenas, Lease
    from reknit.engine.saving.save_job import SaveJob
    from reknit.monitor.phase import Recorder

_MOST_NBYTES = 2 << 30
"""Limit of the bytes copied while an agent starts, which takes about as long."""

Until = Literal["collect", "arena", "copy"]
"""The last step to take while an agent starts."""


class PreparedSave:
    """A save up to its first message, which this rank prepares alone while the agent starts."""

    job: SaveJob
    part: RankPart

    def __init__(self, arenas: Arenas) -> None:
        """Use `prepare`."""
        self.arena = SaveArena(arenas)
        self.begun = monotonic()
        self.plan: Plan | None = None
        self.copied = False
        """Whether the arena has all files of the plan, with headers of another write id."""
        self.recorder: Recorder | None = None

    def prepare(self, make: Callable[[], SaveJob], until: Until) -> BaseException | None:
        """Collect the holdings of the job of `make`, plan them, and copy them to an arena; return an error.

        This rank works alone, so holdings are only collected if a framework does not record the other
        holders of some shards.  A state that is staged lazily is not copied yet.  Neither is a state whose
        copy would take longer than the start of an agent, since its agent writes while it is staged.  An
        error is returned because the other ranks receive it through the agents, which may not run yet.
        """
        try:
            self.job = job = make()
            self.recorder = job.recorder
            job.storage.close()  # the agent opens its own
            self.part = RankPart(job)
            if until != "collect" and not self.part.needs_assignment:
                plan = self.plan_alone()
                lease = self.arena.acquire(plan.nbytes, job) if plan.nbytes else None
                if until == "copy" and lease is not None:
                    self._copy(plan, lease)
        except BaseException as error:  # Ctrl-C too
            return error
        return None

    def plan_alone(self) -> Plan:
        """Return the plan of holdings in which every shard lists its replicas."""
        if self.plan is None:
            with self.job.recorder.phase("plan"):
                self.plan = Plan(self.part.outline())
        return self.plan

    def _copy(self, plan: Plan, lease: Lease) -> None:
        images = plan.outline.images(paths.new_write_id(), self.part.sources)
        snapshot = Snapshot(images, lease, None, self.job.options)
        nbytes = sum(image.nbytes for image in images)
        if snapshot.streamed or self.job.options.stage == "lazy" or nbytes > _MOST_NBYTES:
            return
        with self.job.recorder.phase("stage", nbytes=nbytes):
            snapshot.take()
        self.copied = True
