"""One save as an agent carries it out; the trainer may die at any moment."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reknit.engine import messages
from reknit.engine.background import messages as say
from reknit.engine.background.agent_job import ArenaImage, TargetStore
from reknit.engine.saving.reuse import Reuse
from reknit.engine.saving.rounds import assign, assign_turn, commit_turn
from reknit.engine.saving.write import write_files
from reknit.engine.small_files import discard
from reknit.engine.stored.promote import close_quietly, promote_saved
from reknit.environment import cores_per_rank
from reknit.errors import ReknitError, typed
from reknit.monitor.phase import now
from reknit.options import LEAST_INFLIGHT_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from reknit.comm import group as comm
    from reknit.engine.memory.arena import Arena
    from reknit.engine.memory.tuning import Tuner
    from reknit.engine.report import SaveTotals
    from reknit.engine.saving.coordinator import Coordinator
    from reknit.engine.saving.job import SaveJob
    from reknit.engine.saving.reuse import Committed
    from reknit.engine.saving.rounds import CommitTurn
    from reknit.engine.small_files import Written
    from reknit.monitor.records import PhaseRecord
    from reknit.processes.channel import Channel
    from reknit.processes.shared_memory import SharedMemory

logger = logging.getLogger("reknit")

_CORES_FOR_BOTH = cores_per_rank() >= 2
"""Whether digests need not wait until the trainer, which training waits for, has copied."""


class AgentSave:
    """A save under way, between the thread that hears the trainer and those that write and commit.

    `error` is what makes it fail; once it is set nobody waits for the trainer any more, and all ranks hear of
    it in the next round.
    """

    def __init__(self, begin: say.Begin, job: SaveJob, channel: Channel, committed: Committed) -> None:
        self.begin, self.job = begin, job
        self._committed = committed
        self._reuse: Reuse | None = None
        self.number = begin.number
        self.since = now()
        self.error: ReknitError | None = None
        self._channel = channel
        self._changed = threading.Condition()
        self.image: ArenaImage | None = None
        self._written: list[Written] | None = None
        # Whoever has committed to this path clears away the files of others, unless a marker tells of them.
        # A save that may not overwrite need not fear that: it fails anyway where somebody has committed.
        self._may_write = not begin.overwrite
        self._over = threading.Event()
        self._promotable: list[Written] | None = None
        self.targets = [url for url, *_ in begin.promote_to]
        """Where the checkpoint is to be promoted to."""
        self.stores = [TargetStore(place, job.options) for place in begin.promote_to]
        self.to_promote = set(range(len(self.targets)))
        """Numbers of the targets to which it still is."""
        self.note_end: Callable[[], None] = lambda: None
        """Called before the trainer can know that the save, or one of its promotions, has ended."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of the save, nor of its promotions, is left to do."""
        return self._over.is_set()

    @property
    def promotes(self) -> bool:
        """Whether the checkpoint is committed, and is to be promoted."""
        return self._promotable is not None

    @property
    def url(self) -> str:
        """Where the save goes."""
        return self.begin.url

    @property
    def places(self) -> list[str]:
        """Where an agent is at work: the place of the save, and those to which it is still promoted."""
        return [self.url, *(self.targets[number] for number in sorted(self.to_promote))]

    # Called by the thread that hears the trainer.

    def plan(self, planned: say.Planned, arena: SharedMemory) -> None:
        """Take the files of the save, and the arena that will hold them."""
        with self._changed:
            self.image = ArenaImage(planned, arena)
            self._changed.notify_all()

    def fill(self, span: int) -> None:
        """Note that a span holds its bytes."""
        with self._changed:
            if self.image is not None:
                self.image.to_fill.discard(span)
            self._changed.notify_all()

    def fail(self, error: ReknitError) -> None:
        """Let the save fail, unless it failed before."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    @property
    def staged(self) -> bool:
        """Whether the trainer is needed no more."""
        with self._changed:
            return self.promotes or (self.image is not None and not self.image.to_fill)

    def wait(self, timeout_s: float, *, promoted: bool) -> bool:
        """Wait until the save is committed, and `promoted` if asked for, or has failed; tell which."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over or (self.promotes and not promoted), timeout_s)

    # Called by the thread that writes.

    def write(self, tuner: Tuner, before: AgentSave | None) -> None:
        """Write the data files while their spans are filled, when the save `before` this one is over.

        The round to commit tells what goes wrong.
        """
        written: list[Written] = []
        job, write_id = self.job, self.begin.claims.write_id
        try:
            if before is not None:
                before._over.wait()
            with self._changed:
                self._changed.wait_for(
                    lambda: (self.image is not None and self._may_write) or self.error is not None
                )
                image, error = self.image, self.error
            if error is None and image is not None:
                # What a ring holds is gone once it was compared.
                frozen = () if image.is_ring else image.planned.frozen
                reuse = Reuse(job, self._committed, write_id, image.planned.files, frozen)
                self._reuse = reuse
                if frozen and not _CORES_FOR_BOTH:
                    with self._changed:
                        self._changed.wait_for(lambda: self.staged or self.error is not None)
                written += write_files(
                    job.storage,
                    reuse.files,
                    self._fetch,
                    tuner=tuner,
                    recorder=job.recorder,
                    written=self._free if image.is_ring else None,
                    failed=self._fail,
                    busy=None if image.is_ring or _CORES_FOR_BOTH else lambda: not self.staged,
                    take_over=partial(reuse.take_over, self._fetch, "wait", stop=self._fail),
                )
        except BaseException as error:  # whatever it is, the other ranks wait for this one's receipt
            self.fail(typed(error))
        finally:
            self._channel.tell(say.ArenaFree(self.number))
            with self._changed:
                self._written = written
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Let those that wait for the trainer know that one of them met an error."""
        self.fail(typed(error))

    def _fetch(self, file: int, start: int, nbytes: int, _: Arena) -> NDArray[np.uint8]:
        """Return a piece of a file from the arena, as soon as it is there."""
        image = self.image
        assert image is not None
        span = image.span(file, start)
        with self._changed:
            self._changed.wait_for(lambda: span not in image.to_fill or self.error is not None)
            if self.error is not None:
                raise self.error
        return image.view(span, start, nbytes)

    def _free(self, file: int, start: int, nbytes: int) -> None:
        """Tell the trainer when all of a span is written, so that another can take its place."""
        image = self.image
        assert image is not None
        span = image.span(file, start)
        with self._changed:
            image.to_write[span] -= nbytes
            free = image.to_write[span] == 0
        if free:
            self._channel.tell(say.Freed(self.number, span))

    # Called by the thread that commits.

    def commit(self, coordinator: Coordinator) -> None:
        """Go with all ranks through the rounds of this save, and tell the trainer how it ended."""
        try:
            written, totals = self._hold_rounds(coordinator)
        except BaseException as error:  # Ctrl-C cannot come here, and a bug must reach the trainer too
            self.fail(typed(error))
            coordinator.give_up()
            self._discard()
            self.job.recorder.flush()
            records = _plain(self.job.recorder.records)
            self._tell_end(say.SaveDone(self.number, typed(error).to_wire(), records=records), last=True)
            return
        if self.targets:
            self._keep_for_promotion(written)
        self.job.recorder.flush()
        done = say.SaveDone(self.number, None, totals, _plain(self.job.recorder.records))
        self._tell_end(done, last=not self.promotes)

    def _hold_rounds(self, coordinator: Coordinator) -> tuple[list[Written], SaveTotals]:
        """Assign, and commit; return the files that this rank wrote, and the figures of the save."""
        assigned = self._assign(coordinator)
        with self._changed:
            self._may_write = True
            self._changed.notify_all()
        with commit_turn(self.job, coordinator, self.begin.claims, assigned) as commit:
            self._wait_written(commit)
            assert self.image is not None
            planned = self.image.planned
            commit.commit(planned.items, planned.columns)
        assert self._reuse is not None
        self._reuse.remember(commit.written)
        return commit.written, commit.totals(self._reuse.nbytes)

    def _keep_for_promotion(self, written: list[Written]) -> None:
        """Keep what a promotion needs, and nothing else: many may wait for a slow store."""
        with self._changed:
            self._promotable = written
            self.image = None
            self._changed.notify_all()
        claimed = self.begin.claims
        self.begin.claims = messages.RankClaims(claimed.write_id, claimed.step, claimed.plan, None, [])

    def _assign(self, coordinator: Coordinator) -> messages.Assignment:
        """Hold the round in which all ranks' work is assigned, and tell the trainer of its part."""
        begin = self.begin
        # Not the write id: a rank whose trainer never came to begin this save does not know it.
        with assign_turn(self.job, subject=f"save {self.number}") as turn:
            if self.error is not None:
                raise self.error
            assigned = assign(turn, coordinator, self.job, begin.claims, begin=not begin.warm_up)
        self._channel.tell(say.Assigned(self.number, assigned.shard_owners))
        return assigned

    def _wait_written(self, commit: CommitTurn) -> None:
        """Wait until the data files of this rank are written, and hand them over to the round to commit."""
        with self._changed:
            self._changed.wait_for(lambda: self._written is not None)
            assert self._written is not None
            mine, self._written = self._written, []
            commit.written += mine
            if self.error is not None:
                raise self.error

    def _discard(self) -> None:
        """Delete what was written for a round that this rank never came to."""
        with self._changed:
            self._changed.wait_for(lambda: self._written is not None)
            written = self._written or []
        for file in written:
            with suppress(Exception):  # a store of somebody else's; what stays is no part of anything
                discard(self.job.storage, file.path)

    def _tell_end(self, end: say.SaveDone | say.Promoted, *, last: bool) -> bool:
        """Tell the trainer what has ended; the last end lets a later save to the same place begin to write.

        By then nobody who looks at this process sees it at work on that.  Tells whether it was heard.
        """
        if last:
            with self._changed:
                self._over.set()
                self._changed.notify_all()
        self.note_end()
        heard = self._channel.tell(end)
        if last:
            close_quietly(self.job.storage)
        return heard

    # Called by the threads that promote, and by the one that commits.

    def promote(self, target: int, group: comm.Group, num_lanes: int) -> None:
        """Copy what this rank wrote to a store that lasts, with all ranks, and tell the trainer.

        Of the memory that a save may take the copy takes its part, as one of so many.
        """
        assert self._promotable is not None
        share = max(self.job.options.inflight_nbytes // num_lanes, LEAST_INFLIGHT_NBYTES)
        job = replace(self.job, options=replace(self.job.options, inflight_nbytes=share))
        to = self.stores[target].target()
        try:
            report = promote_saved(job, self.begin.claims.write_id, self._promotable, group, to)
        except BaseException as error:  # whatever it is, the trainer must hear of it
            self.not_promoted(target, error)
            return
        records = _plain(report.phases)
        job.recorder.flush()
        nbytes, files = report.nbytes, report.num_files
        self._tell_promoted(say.Promoted(self.number, target, None, report.path, nbytes, files, records))

    def not_promoted(self, target: int, error: BaseException) -> None:
        """Tell the trainer, or the log where that is gone, what kept the checkpoint from where it lasts."""
        failure = typed(error)
        failure.sign(rank=self.job.group.rank)
        if not self._tell_promoted(say.Promoted(self.number, target, failure.to_wire())):
            logger.error("promotion of %s to %s failed: %s", self.url, self.targets[target], failure)

    def _tell_promoted(self, end: say.Promoted) -> bool:
        with self._changed:
            self.to_promote.discard(end.target)
            last = not self.to_promote
        return self._tell_end(end, last=last)


def _plain(phases: Iterable[PhaseRecord]) -> list[dict[str, object]]:
    """Return phases as a message has them."""
    return [record.as_dict() for record in phases]
