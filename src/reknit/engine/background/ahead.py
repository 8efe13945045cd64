"""What a rank makes ready for a background save on its own; beside the start of its agent, if that is new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from reknit.engine.background.agents import Plan
from reknit.engine.background.snapshot import Snapshot
from reknit.engine.memory.arena import image_nbytes
from reknit.engine.memory.sources import Sources
from reknit.engine.saving.claims import encode_holdings
from reknit.engine.saving.file_layout import layout_digest, outline
from reknit.errors import DeadlineError, SkippedError
from reknit.format import paths
from reknit.monitor.phase import Stopwatch, monotonic
from reknit.types.lazy_property import lazy_property

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.background.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Arenas, Lease
    from reknit.engine.saving.claims import EncodedHoldings
    from reknit.engine.saving.job import SaveJob
    from reknit.monitor.phase import Recorder


_MOST_NBYTES = 2 << 30
"""Most that is copied while an agent starts, which takes about as long."""

Until = Literal["collect", "arena", "copy"]
"""The last thing that is done ahead."""


class Ahead:
    """The job of a save and what it holds; its plan and its memory, once they are there."""

    job: SaveJob
    encoded: EncodedHoldings
    key: bytes
    """The `layout_digest` of what is held."""

    def __init__(self, arenas: Arenas) -> None:
        """Use `go`."""
        self.arenas = arenas
        self.begun = monotonic()
        self.plan: Plan | None = None
        self.lease: Lease | None = None
        self.copied = False
        """Whether the arena has all of the plan's files, but with headers of another write id."""
        self._waited_s = 0.0
        self.recorder: Recorder | None = None

    def go(self, make: Callable[[], SaveJob], rank: int, until: Until) -> BaseException | None:
        """Collect what the job of `make` holds, plan it and get its arena, and copy it there.

        All of this needs no other rank, unless there are shards of which no framework knows who holds them;
        those are only collected.  What is staged lazily is not copied yet, nor what takes longer than an
        agent needs to start: it is written while the rest is staged.  What goes wrong is returned, for the
        other ranks hear of it by the agents, which may not be there yet.
        """
        try:
            self.job = job = make()
            self.recorder = job.recorder
            job.storage.close()  # the agent opens its own
            with job.recorder.phase("collect"):
                self.encoded = encode_holdings(job.holdings(), job.options)
                self.key = layout_digest(self.encoded.holdings, job.options.max_file_nbytes)
            if until != "collect" and not self.encoded.guessed:
                plan = self.plan_alone(rank)
                lease = self.acquire(nbytes) if (nbytes := plan_nbytes(plan)) else None
                if until == "copy" and lease is not None:
                    self._copy(plan, lease)
        except BaseException as error:  # Ctrl-C too
            return error
        return None

    def plan_alone(self, rank: int) -> Plan:
        """Return the plan of holdings that all have their replicas."""
        if self.plan is None:
            with self.job.recorder.phase("plan"):
                self.plan = Plan(outline(self.encoded.holdings, rank, self.job.options.max_file_nbytes))
        return self.plan

    @lazy_property
    def sources(self) -> Sources:
        """The memory of what is held."""
        return Sources(shard.memory for shard in self.encoded.holdings.shards)

    def _copy(self, plan: Plan, lease: Lease) -> None:
        images = plan.outline.images(paths.new_write_id(), self.sources)
        snapshot = Snapshot(images, lease, None, self.job.options)
        nbytes = sum(image.nbytes for image in images)
        if snapshot.streamed or self.job.options.stage == "lazy" or nbytes > _MOST_NBYTES:
            return
        with self.job.recorder.phase("stage", nbytes=nbytes):
            snapshot.take()
        self.copied = True

    def acquire(self, nbytes: int) -> Lease:
        """Return an arena of so many bytes, waiting for one as the options say."""
        if self.lease is not None:
            return self.lease
        options, clock = self.job.options, Stopwatch()
        skip = options.when_busy == "skip"
        with self.job.recorder.phase("back_pressure"), clock.lap():
            self.lease = self.arenas.acquire(nbytes, 0.0 if skip else options.timeout_s)
            if self.lease is None and skip:
                raise SkippedError(
                    "earlier saves are still being written, and this one was skipped",
                    remedy="save less often, or wait for them with when_busy='wait'",
                )
            if self.lease is None:
                raise DeadlineError(f"earlier saves gave no host memory free within {options.timeout_s:g} s")
        self._waited_s = clock.seconds
        return self.lease

    def hand_over(self, save: TrainerSave) -> None:
        """Let a save have the arena, if there is one; the save gives it back."""
        if self.lease is not None:
            save.waited_s = self._waited_s
            save.take(self.arenas, self.lease)

    def release(self) -> None:
        """Give the arena back, if there is one."""
        if self.lease is not None:
            self.arenas.release(self.lease)


def plan_nbytes(plan: Plan) -> int:
    """Return how many bytes of an arena hold the files of a plan."""
    return image_nbytes([file.nbytes for file in plan.outline.files])
