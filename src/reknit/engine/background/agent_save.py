"""A save in an agent: one thread writes, one holds the rounds; the trainer may die at any moment.

Both take the steps of `saving.here.Here`, with files in an arena instead of live memory.  An agent imports
this module, and with it the code that writes and commits, when its first save begins.  Earlier imports would
delay the join of the agents, for which trainers wait.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

from reknit.comm import group as comm
from reknit.engine import messages as round_messages
from reknit.engine.background import messages
from reknit.engine.background.promotions import AgentPromotions, agent_task
from reknit.engine.memory.workers import SPAN_NBYTES, arena_spans
from reknit.engine.memory.write import ByteSource, Tuner
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.here import ASSIGN, EarlierSaves, Here
from reknit.engine.saving.packing import claims, merge_claims
from reknit.engine.stored.promote import close_quietly
from reknit.environment import cores_per_rank
from reknit.errors import DeadlineError, typed
from reknit.events.phase import Deadline, now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from reknit.engine.background.messages import ProcessContext
    from reknit.engine.memory.workers import Arena
    from reknit.engine.saving.task import SaveTask
    from reknit.errors import ReknitError
    from reknit.options import SaveOptions
    from reknit.processes.shared_memory import SharedMemory

_CORES_FOR_BOTH = cores_per_rank() >= 2
"""Whether a core is free for digests while the trainer copies, for which training waits."""


class ArenaFiles(ByteSource):
    """The files of a save in an arena, with the spans that are still to be filled, and to be written."""

    def __init__(self, save: AgentSave, planned: messages.Planned, arena: SharedMemory) -> None:
        self.plan, self.items = save.begin.claims.plan, planned.items
        self.listed, self.columns = planned.files, planned.columns
        self._save, self._arena = save, arena
        self._spans = arena_spans([nbytes for _, _, nbytes in planned.files], planned.ring)
        self._number = {(span.file, span.start): k for k, span in enumerate(self._spans)}
        self._is_ring = any(span.after >= 0 for span in self._spans)
        self.to_fill = set(range(len(self._spans)))
        self._to_write = [span.nbytes for span in self._spans]
        self._counting = threading.Lock()

    def source(self, write_id: str, timeout_s: float) -> AbstractContextManager[ArenaFiles]:
        """Return the files themselves, whose headers have the write id."""
        return nullcontext(self)

    @property
    def compares(self) -> bool:
        """Whether pieces may be compared: the bytes in a ring are overwritten once they were."""
        return not self._is_ring

    @property
    def busy(self) -> bool:
        """Whether the trainer copies, for which training waits, and no other core is free for digests."""
        return not (self._is_ring or _CORES_FOR_BOTH or self._save.staged)

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        """Return a piece in the arena, as soon as the trainer has filled it."""
        number = self._number[file, start // SPAN_NBYTES * SPAN_NBYTES]
        self._save.wait_until(lambda: number not in self.to_fill)
        low = self._spans[number].at + start - self._spans[number].start
        return self._arena.bytes[low : low + nbytes]

    def release(self, file: int, start: int, nbytes: int) -> None:
        """Report a span of a ring to the trainer when all of it is written, to be filled again."""
        if self._is_ring:
            number = self._number[file, start // SPAN_NBYTES * SPAN_NBYTES]
            with self._counting:
                self._to_write[number] -= nbytes
                is_written = self._to_write[number] == 0
            if is_written:
                self._save.send(messages.Freed(self._save.number, number))

    def fail(self, error: BaseException) -> None:
        """Fail the save, and wake the threads that wait for the trainer."""
        self._save.fail(error)


class AgentSave:
    """A save under way in an agent: one thread receives from the trainer, one writes, and one commits.

    Once `error` is set, threads no longer wait for the trainer, and all ranks receive the error in the next
    round.
    """

    def __init__(
        self,
        begin: messages.Begin,
        task: SaveTask,
        send: Callable[[messages.AgentMessage], bool],
        earlier: EarlierSaves,
        tuner: Tuner,
    ) -> None:
        self.begin, self.task, self.send = begin, task, send
        self.number = begin.number
        self.since = now()
        self.error: ReknitError | None = None
        self.files: ArenaFiles | None = None
        self._changed = threading.Condition()
        self._staged = False
        # Not the write id, which a rank lacks if its trainer did not begin this save.
        self.here = Here(task, earlier, subject=f"save {begin.number}", tuner=tuner)
        self.promotions = AgentPromotions(begin, task, self._end_promotion)
        self.note_end: Callable[[], None] = lambda: None
        """Called before the trainer receives the end of the save, or of one of its promotions."""
        self._is_written = False
        # A save that commits to this path removes the files of other saves without a marker.
        # This does not matter without `overwrite`: then the save fails anyway if another has committed.
        # In the first save to a folder, the assignment also has the files that may be taken over.
        self._may_write = not begin.overwrite and earlier.committed.beside(task.storage) is not None
        self.over = threading.Event()
        """Set when the save and all its promotions have ended."""

    @property
    def url(self) -> str:
        """The URL of the checkpoint."""
        return self.begin.url

    @property
    def staged(self) -> bool:
        """Whether the save no longer needs the trainer."""
        with self._changed:
            return self._staged

    def take_files(self, planned: messages.Planned, arena: SharedMemory) -> None:
        """Take the files of the save, and the arena that will hold them."""
        with self._changed:
            self.files = ArenaFiles(self, planned, arena)
            self._staged = not self.files.to_fill
            self._changed.notify_all()

    def note_filled(self, span: int) -> None:
        """Record that a span holds its bytes."""
        with self._changed:
            if self.files is not None:
                self.files.to_fill.discard(span)
                self._staged = not self.files.to_fill
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Fail the save, unless it has failed, and wake the threads that wait for the trainer."""
        with self._changed:
            self.error = self.error or typed(error)
            self._changed.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`.  Raises the error of the save."""
        with self._changed:
            self._changed.wait_for(lambda: ready() or self.error is not None)
            if self.error is not None:
                raise self.error

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

    def write(self, before: AgentSave | None) -> None:
        """Write the data files while their spans are filled, after the save `before` this one has ended.

        The commit round raises its errors.
        """
        try:
            if before is not None:
                before.over.wait()
            self.wait_until(lambda: self.files is not None and self._may_write)
            assert self.files is not None
            self.here.write(self.files, self.begin.claims.write_id)
        except BaseException as error:  # also a bug: the other ranks wait for this one's receipt
            self.fail(error)
        finally:
            self.send(messages.ArenaFree(self.number))
            with self._changed:
                self._is_written = True
                self._changed.notify_all()

    def commit(self) -> None:
        """Hold the rounds of this save with all ranks, and report its end to the trainer."""
        try:
            self._hold_rounds()
        except BaseException as error:  # Ctrl-C cannot come here, and a bug must reach the trainer too
            self.fail(error)
            with self._changed:  # the trainer drops the save with the next message
                self._changed.wait_for(lambda: self._is_written)
            done = messages.SaveDone(self.number, typed(error).to_wire())
        else:
            done = messages.SaveDone(self.number, None, self.here.totals)
            if self.promotions.targets:
                self._keep_for_promotion()
        self.task.recorder.flush()
        done.records = [record.as_dict() for record in self.task.recorder.records]
        self._end(done, last=not self.promotes)

    def _hold_rounds(self) -> None:
        """Take the steps of a writer in its rounds; the other thread writes."""
        with self.here.rounds():
            try:
                if self.error is not None:
                    raise self.error
                assigned = self.here.hold_assign(self.begin.claims)
                self.send(messages.Assigned(self.number, assigned.shard_owners))
                with self._changed:
                    self._may_write = True
                    self._changed.notify_all()
                self._wait_written()
                assert self.files is not None
                self.here.commit(self.files)
            except BaseException as error:
                self.fail(error)  # so that the other thread does not begin to write
                raise

    def _wait_written(self) -> None:
        """Wait until the data files of this rank are written.  Raises the error of the save."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_written)
            if self.error is not None:
                raise self.error

    def _keep_for_promotion(self) -> None:
        """Drop all memory that a promotion does not need: many may wait for a slow store."""
        with self._changed:
            self.promotions.written = self.here.written
            self.files = None
            self._changed.notify_all()
        claimed = self.begin.claims
        self.begin.claims = round_messages.RankClaims(claimed.write_id, claimed.step, claimed.plan, None, [])

    def _end_promotion(self, end: messages.Promoted) -> bool:
        with self._changed:
            self.promotions.left.discard(end.target)
            last = not self.promotions.left
        return self._end(end, last=last)

    def _end(self, end: messages.SaveDone | messages.Promoted, *, last: bool) -> bool:
        """Send an end to the trainer; return whether it was sent.  The last end lets the next save write."""
        if last:
            with self._changed:
                self.over.set()
                self._changed.notify_all()
        self.note_end()
        is_sent = self.send(end)
        if last:
            close_quietly(self.task.storage)
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

    def write(self, before: AgentSave | None) -> None:
        """Write nothing."""
        with self._changed:
            self._is_written = True
            self._changed.notify_all()

    def _hold_rounds(self) -> None:
        """Assign the work as in a save, and wait until all ranks are ready."""
        group, timeout_s, subject = self.task.group, self.task.options.timeout_s, f"save {self.number}"
        with comm.turn(group, ASSIGN, timeout_s, merge=merge_claims, subject=subject, opens=True) as turn:
            if self.error is not None:
                raise self.error
            requests, answers = turn.gather(claims(group.rank, self.begin.claims)), None
            if requests is not None:
                answers = self.here.coordinator.assign(None, requests)
            assigned = turn.give(answers, round_messages.Assignment)
        self.send(messages.Assigned(self.number, assigned.shard_owners))
        with comm.turn(group, ROUND, timeout_s, merge=b"".join, subject=subject) as turn:
            self.wait_until(lambda: self._staged)
            turn.arrive()


class AgentState:
    """Makes the saves of one agent, with the state that they share."""

    def __init__(self, send: Callable[[messages.AgentMessage], bool]) -> None:
        self._send = send
        self._earlier = EarlierSaves(Coordinator())
        self._context: ProcessContext | None = None
        self._due: ProcessContext | None = None
        self._tuners: dict[tuple[str, int | None, int | None], Tuner] = {}

    def save(
        self, begin: messages.Begin, options: SaveOptions, group: comm.Group, earlier: Sequence[AgentSave]
    ) -> AgentSave:
        """Return a save that the trainer has begun after the `earlier` saves.  Raises `ReknitError`."""
        self.adapt(begin.context, earlier, options.timeout_s)
        task = agent_task(begin, options, group, self._send)
        kind = WarmUp if begin.warm_up else AgentSave
        return kind(begin, task, self._send, self._earlier, self._tuner(begin.url, options))

    def adapt(self, due: ProcessContext | None, earlier: Sequence[AgentSave], timeout_s: float) -> None:
        """Set the context of this process to that of a save that begins; None keeps those of the save before.

        `earlier` are the saves under way.  They are committed first, and another umask also waits for
        their promotions.  If the umask stays, promotions go on, since their stores are open.  Raises
        `DeadlineError`; then the next save tries again.
        """
        self._due = due or self._due
        if self._due is None:
            return
        promoted = self._context is not None and self._context.umask != self._due.umask
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
            # While this process has the context that these stores need.
            for store in save.promotions.stores if save.promotes else ():
                store.open_ahead()
        messages.adopt(self._due, self._context)
        self._context, self._due = self._due, None

    def _tuner(self, url: str, options: SaveOptions) -> Tuner:
        """Return the tuner for stores of this kind, with its earlier measurements."""
        scheme, colon, _ = url.partition("://")
        key = (scheme if colon else "", options.threads, options.piece_nbytes)
        if key not in self._tuners:
            self._tuners[key] = Tuner(threads=options.threads, piece_nbytes=options.piece_nbytes)
        return self._tuners[key]


def refuse(number: int, error: ReknitError, group: comm.Group, timeout_s: float) -> None:
    """Raise, on all ranks, the error that kept a save from beginning here."""
    subject = f"save {number}"
    with comm.turn(group, ASSIGN, timeout_s, merge=merge_claims, subject=subject, opens=True):
        raise error
