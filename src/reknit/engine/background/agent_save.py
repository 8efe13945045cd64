"""The save story of an agent, in two threads: one writes, one commits; the trainer may die at any moment.

The state that the saves of an agent share, and the warm-ups among them.

An agent imports this module, and with it the code that writes and commits, when its first save begins.
Earlier imports would delay the join of the agents, for which trainers wait.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.engine import messages as round_messages
from reknit.engine.background import messages as circumstances
from reknit.engine.background import messages as say
from reknit.engine.background.promotions import AgentPromotions, agent_job
from reknit.engine.memory.workers import SPAN_NBYTES, lay_out
from reknit.engine.memory.write import Tuner, discard, write_files
from reknit.engine.reports import SaveTotals
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.here import ASSIGN, assign, assign_turn, commit_turn
from reknit.engine.saving.reuse import Committed, Reuse
from reknit.engine.stored.promote import close_quietly
from reknit.environment import cores_per_rank
from reknit.errors import DeadlineError, typed
from reknit.events.phase import Deadline, now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.background.messages import Circumstances
    from reknit.engine.memory.workers import Arena
    from reknit.engine.memory.write import Written
    from reknit.engine.saving.here import CommitTurn
    from reknit.engine.saving.task import SaveJob
    from reknit.errors import ReknitError
    from reknit.options import SaveOptions
    from reknit.processes.channel import Channel
    from reknit.processes.shared_memory import SharedMemory


class ArenaImage:
    """The files of a save in an arena, with the spans that are still to be filled, and to be written."""

    def __init__(self, planned: say.Planned, arena: SharedMemory) -> None:
        self.planned = planned
        self._arena = arena
        self._spans = lay_out([nbytes for _, _, nbytes in planned.files], planned.ring)
        self._number = {(span.file, span.start): k for k, span in enumerate(self._spans)}
        self.is_ring = any(span.after >= 0 for span in self._spans)
        self.to_fill = set(range(len(self._spans)))
        self.to_write = [span.nbytes for span in self._spans]

    def span(self, file: int, start: int) -> int:
        """Return the number of the span that holds byte `start` of a file."""
        return self._number[file, start // SPAN_NBYTES * SPAN_NBYTES]

    def view(self, span: int, start: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the bytes in the arena of the span's file from `start` on."""
        low = self._spans[span].at + start - self._spans[span].start
        return self._arena.bytes[low : low + nbytes]


class ReceivedSave:
    """A save, shared by the thread that receives from the trainer and the threads that write and commit.

    Once `error` is set, threads no longer wait for the trainer, and all ranks receive the error in the next
    round.
    """

    def __init__(self, begin: say.Begin, job: SaveJob, channel: Channel) -> None:
        self.begin, self.job = begin, job
        self.number = begin.number
        self.since = now()
        self.error: ReknitError | None = None
        self.image: ArenaImage | None = None
        self._channel = channel
        self._changed = threading.Condition()
        self._staged = False

    @property
    def url(self) -> str:
        """The URL of the checkpoint."""
        return self.begin.url

    @property
    def staged(self) -> bool:
        """Whether the save no longer needs the trainer."""
        with self._changed:
            return self._staged

    def plan(self, planned: say.Planned, arena: SharedMemory) -> None:
        """Take the files of the save, and the arena that will hold them."""
        with self._changed:
            self.image = ArenaImage(planned, arena)
            self._staged = not self.image.to_fill
            self._changed.notify_all()

    def fill(self, span: int) -> None:
        """Record that a span holds its bytes."""
        with self._changed:
            if self.image is not None:
                self.image.to_fill.discard(span)
                self._staged = not self.image.to_fill
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Fail the save, unless it has failed, and wake the threads that wait for the trainer."""
        with self._changed:
            self.error = self.error or typed(error)
            self._changed.notify_all()

    def fetch(self, file: int, start: int, nbytes: int, _: Arena) -> NDArray[np.uint8]:
        """Return a piece of a file from the arena, as soon as the trainer has filled it."""
        image = self.image
        assert image is not None
        span = image.span(file, start)
        with self._changed:
            self._changed.wait_for(lambda: span not in image.to_fill or self.error is not None)
            if self.error is not None:
                raise self.error
        return image.view(span, start, nbytes)

    def free(self, file: int, start: int, nbytes: int) -> None:
        """Report a span to the trainer when all of it is written, so that its place can be filled again."""
        image = self.image
        assert image is not None
        span = image.span(file, start)
        with self._changed:
            image.to_write[span] -= nbytes
            free = image.to_write[span] == 0
        if free:
            self._channel.try_send(say.Freed(self.number, span))


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


ROUND = "prepare"
"""The round that ends when all ranks are ready, or with the error of a rank."""


class WarmUp(AgentSave):
    """A save that ends after the assignment, and writes nothing.

    It is numbered like a save and fails like one, so that the loss of an agent is an error on all ranks.  The
    root keeps the layouts of the ranks for later saves.
    """

    def make_ready(self) -> None:
        """Record that the trainer has done its part."""
        with self._changed:
            self._staged = True
            self._changed.notify_all()

    @property
    def places(self) -> list[str]:
        """No places, as a warm-up makes no checkpoint."""
        return []

    def write(self, tuner: Tuner, before: AgentSave | None) -> None:
        """Write nothing."""
        with self._changed:
            self._written = []
            self._changed.notify_all()

    def _hold_rounds(self, coordinator: Coordinator) -> tuple[list[Written], SaveTotals]:
        """Assign the work as in a save, and wait until all ranks are ready."""
        self._assign(coordinator)
        group, timeout_s = self.job.group, self.job.options.timeout_s
        with comm.turn(group, ROUND, timeout_s, merge=b"".join, subject=f"save {self.number}") as turn:
            self.wait_ready()
            turn.arrive()
        return [], SaveTotals(0, 0, 0, 0, ())

    def wait_ready(self) -> None:
        """Wait until the trainer has done its part.  Raises the error of the save."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged or self.error is not None)
            if self.error is not None:
                raise self.error


class ContextSwitch:
    """The circumstances of an agent's process, which are set to those of each save that begins."""

    def __init__(self) -> None:
        self._current: Circumstances | None = None
        self._due: Circumstances | None = None

    def adapt(self, due: Circumstances | None, earlier: Sequence[AgentSave], timeout_s: float) -> None:
        """Set the circumstances of a save that begins; None keeps those of the save before.

        `earlier` are the saves under way.  They are committed first, and another umask also waits for
        their promotions.  If the umask stays, promotions go on, since their stores are open.  Raises
        `DeadlineError`; then the next save tries again.
        """
        self._due = due or self._due
        if self._due is None:
            return
        promoted = self._current is not None and self._current.umask != self._due.umask
        deadline = Deadline(timeout_s)
        for save in earlier:
            if not save.wait(deadline.remaining(), promoted=promoted):
                changed = "umask" if promoted else "environment"
                raise DeadlineError(
                    f"the {changed} has changed, and save {save.number} to {save.url}, which needs the old "
                    f"one, was not over within {timeout_s:g} s",
                    remedy="change it when no save or promotion is under way, or raise timeout_s",
                )
        for save in earlier:
            # While this process has the circumstances that these stores need.
            for store in save.promotions.stores if save.promotes else ():
                store.open_ahead()
        circumstances.take(self._due, self._current)
        self._current, self._due = self._due, None


class AgentState:
    """Makes the saves of one agent, with the state that they share."""

    def __init__(self, channel: Channel) -> None:
        self.coordinator = Coordinator()
        self._channel = channel
        self._committed = Committed()
        self._adapting = ContextSwitch()
        self._tuners: dict[tuple[str, int | None, int | None], Tuner] = {}

    def save(
        self, begin: say.Begin, options: SaveOptions, group: comm.Group, earlier: Sequence[AgentSave]
    ) -> AgentSave:
        """Return a save that the trainer has begun after the `earlier` saves.  Raises `ReknitError`."""
        self._adapting.adapt(begin.circumstances, earlier, options.timeout_s)
        job = agent_job(begin, options, group, self._channel.try_send)
        return (WarmUp if begin.warm_up else AgentSave)(begin, job, self._channel, self._committed)

    def tuner(self, url: str, options: SaveOptions) -> Tuner:
        """Return the tuner for stores of this kind, with its earlier measurements."""
        scheme, colon, _ = url.partition("://")
        key = (scheme if colon else "", options.threads, options.piece_nbytes)
        if key not in self._tuners:
            self._tuners[key] = Tuner(threads=options.threads, piece_nbytes=options.piece_nbytes)
        return self._tuners[key]


def refuse(number: int, error: ReknitError, group: comm.Group, timeout_s: float) -> None:
    """Raise, on all ranks, the error that kept a save from beginning here."""
    comm.fail(group, ASSIGN, error, timeout_s, subject=f"save {number}")
