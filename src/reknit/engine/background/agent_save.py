"""The save story of an agent, in two threads: one writes, one commits; the trainer may die at any moment."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.engine import round_messages
from reknit.engine.background import agent_messages as say
from reknit.engine.background.agent_promotions import AgentPromotions
from reknit.engine.background.received_save import ReceivedSave
from reknit.engine.saving.reuse import Reuse
from reknit.engine.saving.save_rounds import assign, assign_turn, commit_turn
from reknit.engine.saving.write import write_files
from reknit.engine.small_files import discard
from reknit.engine.stored.promote import close_quietly
from reknit.environment import cores_per_rank
from reknit.errors import typed

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.engine.call_reports import SaveTotals
    from reknit.engine.memory.tuning import Tuner
    from reknit.engine.saving.reuse import Committed
    from reknit.engine.saving.save_coordinator import Coordinator
    from reknit.engine.saving.save_job import SaveJob
    from reknit.engine.saving.save_rounds import CommitTurn
    from reknit.engine.small_files import Written
    from reknit.processes.channel import Channel

_CORES_FOR_BOTH = cores_per_rank() >= 2
"""Whether a core is free for digests while the trainer copies, for which training waits."""


class AgentSave(ReceivedSave):
    """A save under way in an agent."""

    def __init__(self, begin: say.Begin, job: SaveJob, channel: Channel, committed: Committed) -> None:
        super().__init__(begin, job, channel)
        self.promotions = AgentPromotions(begin, job, self._end_promotion)
        self.note_end: Callable[[], None] = lambda: None
        """Called before the trainer receives the end of the save, or of one of its promotions."""
        self._committed = committed
        self._reuse: Reuse | None = None
        self._written: list[Written] | None = None
        # A save that commits to this path removes the files of other saves without a marker.
        # This does not matter without `overwrite`: then the save fails anyway if another has committed.
        # In the first save to a folder, the assignment also has the files that may be taken over.
        self._may_write = not begin.overwrite and committed.beside(job.storage) is not None
        self.over = threading.Event()
        """Set when the save and all its promotions have ended."""

    @property
    def promotes(self) -> bool:
        """Whether the checkpoint is committed, and is to be promoted."""
        return self.promotions.written is not None

    @property
    def places(self) -> list[str]:
        """The URLs that the agent works on: the checkpoint, and the remaining targets of promotions."""
        return [self.url, *(self.promotions.targets[number] for number in sorted(self.promotions.left))]

    def wait(self, timeout_s: float, *, promoted: bool) -> bool:
        """Wait until the save has ended, with its promotions if `promoted`; return whether it has."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.over.is_set() or (self.promotes and not promoted), timeout_s
            )

    def write(self, tuner: Tuner, before: AgentSave | None) -> None:
        """Write the data files while their spans are filled, after the save `before` this one has ended.

        The commit round raises its errors.
        """
        written: list[Written] = []
        job, write_id = self.job, self.begin.claims.write_id
        try:
            if before is not None:
                before.over.wait()
            with self._changed:
                self._changed.wait_for(
                    lambda: (self.image is not None and self._may_write) or self.error is not None
                )
                image, error = self.image, self.error
            if error is None and image is not None:
                reuse = self._reuse = Reuse(job, self._committed, write_id, image.planned.files)
                written += write_files(
                    job.storage,
                    reuse.files,
                    self.fetch,
                    tuner=tuner,
                    recorder=job.recorder,
                    written=self.free if image.is_ring else None,
                    failed=self.fail,
                    busy=None if image.is_ring or _CORES_FOR_BOTH else lambda: not self.staged,
                    # The bytes in a ring are overwritten once they were compared.
                    earlier=None if image.is_ring else reuse,
                )
        except BaseException as error:  # also a bug: the other ranks wait for this one's receipt
            self.fail(error)
        finally:
            self._channel.try_send(say.ArenaFree(self.number))
            with self._changed:
                self._written = written
                self._changed.notify_all()

    def commit(self, coordinator: Coordinator) -> None:
        """Hold the rounds of this save with all ranks, and report its end to the trainer."""
        try:
            written, totals = self._hold_rounds(coordinator)
        except BaseException as error:  # Ctrl-C cannot come here, and a bug must reach the trainer too
            self.fail(error)
            coordinator.give_up()
            self._discard()
            done = say.SaveDone(self.number, typed(error).to_wire())
        else:
            done = say.SaveDone(self.number, None, totals)
            if self.promotions.targets:
                self._keep_for_promotion(written)
        self.job.recorder.flush()
        done.records = [record.as_dict() for record in self.job.recorder.records]
        self._end(done, last=not self.promotes)

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

    def _assign(self, coordinator: Coordinator) -> round_messages.Assignment:
        """Hold the round that assigns the work of all ranks, and send the trainer its part."""
        begin = self.begin
        # Not the write id, which a rank lacks if its trainer did not begin this save.
        with assign_turn(self.job, subject=f"save {self.number}") as turn:
            if self.error is not None:
                raise self.error
            committed = None if begin.warm_up else self._committed
            assigned = assign(turn, coordinator, self.job, begin.claims, committed)
        self._channel.try_send(say.Assigned(self.number, assigned.shard_owners))
        return assigned

    def _wait_written(self, commit: CommitTurn) -> None:
        """Wait until the data files of this rank are written, and pass them to the commit round."""
        with self._changed:
            self._changed.wait_for(lambda: self._written is not None)
            assert self._written is not None
            mine, self._written = self._written, []
            commit.written += mine
            if self.error is not None:
                raise self.error

    def _discard(self) -> None:
        """Delete the files that this rank wrote without reaching the commit round."""
        with self._changed:
            self._changed.wait_for(lambda: self._written is not None)
            written = self._written or []
        for file in written:
            with suppress(Exception):  # a foreign store may raise any error; a file that stays is only litter
                discard(self.job.storage, file.path)

    def _keep_for_promotion(self, written: list[Written]) -> None:
        """Drop all memory that a promotion does not need: many may wait for a slow store."""
        with self._changed:
            self.promotions.written = written
            self.image = None
            self._changed.notify_all()
        claimed = self.begin.claims
        self.begin.claims = round_messages.RankClaims(claimed.write_id, claimed.step, claimed.plan, None, [])

    def _end_promotion(self, end: say.Promoted) -> bool:
        with self._changed:
            self.promotions.left.discard(end.target)
            last = not self.promotions.left
        return self._end(end, last=last)

    def _end(self, end: say.SaveDone | say.Promoted, *, last: bool) -> bool:
        """Send an end to the trainer; return whether it was sent.  The last end lets the next save write."""
        if last:
            with self._changed:
                self.over.set()
                self._changed.notify_all()
        self.note_end()
        is_sent = self._channel.try_send(end)
        if last:
            close_quietly(self.job.storage)
        return is_sent
