"""One background save as its trainer sees it, from the first message to the agent until the outcome."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from reknit.engine.background import messages
from reknit.engine.reports import PromotionReport, SaveReport
from reknit.engine.stored.agents import unanswered
from reknit.errors import DeadlineError, ReknitError, SkippedError, from_wire, typed
from reknit.events.phase import Stopwatch, monotonic, now
from reknit.events.records import PhaseRecord, record_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.comm.group import Group
    from reknit.engine.background.link import AgentLink
    from reknit.engine.memory.arena_pool import Arenas, Lease
    from reknit.engine.outcome import SaveOutcome
    from reknit.engine.saving.task import SaveTask
    from reknit.events.phase import Recorder


class SaveArena:
    """The lease of an arena for one save."""

    def __init__(self, arenas: Arenas) -> None:
        """Take no arena yet; see `acquire`."""
        self.arenas = arenas
        self.lease: Lease | None = None
        self._waited_s = 0.0

    def acquire(self, nbytes: int, task: SaveTask) -> Lease:
        """Return an arena of `nbytes`, after a wait that the options limit.

        Raises `DeadlineError`, and `SkippedError` if the options skip saves that would wait.
        """
        if self.lease is not None:
            return self.lease
        options, clock = task.options, Stopwatch()
        skip = options.when_busy == "skip"
        with task.recorder.phase("back_pressure"), clock.timed():
            self.lease = self.arenas.acquire(nbytes, 0.0 if skip else options.timeout_s)
            if self.lease is None and skip:
                raise SkippedError(
                    "earlier saves are still being written, and this one was skipped",
                    remedy="save less often, or wait for them: SaveOptions(when_busy='wait')",
                )
            if self.lease is None:
                raise DeadlineError(f"earlier saves gave no host memory free within {options.timeout_s:g} s")
        self._waited_s = clock.seconds
        return self.lease

    def hand_over(self, save: TrainerSave) -> None:
        """Pass the arena, if any, to a save, which will release it."""
        if self.lease is not None:
            save.waited_s = self._waited_s
            save.take(self.arenas, self.lease)

    def release(self) -> None:
        """Release the arena, if there is one."""
        if self.lease is not None:
            self.arenas.release(self.lease)


logger = logging.getLogger("reknit")


class TrainerSave:
    """The messages between trainer and agent about one save.

    The thread that receives from the agent calls `receive` and `lose`.  The trainer's thread, or the thread
    that stages lazily, calls all other methods.
    """

    def __init__(self, number: int, write_id: str, pending: SaveOutcome, link: AgentLink) -> None:
        self.number = number
        self.write_id = write_id
        self.pending = pending
        self.link = link
        self.blocked_s = self.waited_s = 0.0
        self.begun = monotonic()
        """The time of the call."""
        self.streamed = False
        self.layout = b""
        """The `layout_digest` of the holdings, once they are collected."""
        self._changed = threading.Condition()
        self.promotes = False
        """Whether the checkpoint is promoted when it is committed."""
        self._recorder: Recorder | None = None
        self.unrecorded: Recorder | None = None
        """The recorder, until it has recorded the end of the save."""
        self.group: Group | None = None
        """The group, kept until the save and its promotion are over, since its agents end with it."""
        self._owners: bytes | None = None
        self._freed: set[int] = set()
        self._done: messages.SaveDone | None = None
        self._lease: tuple[Arenas, Lease] | None = None
        self._staging = True
        self._read = False

    def begin(self, begin: messages.Begin, recorder: Recorder) -> None:
        """Begin the save at the agent."""
        self.pending.step = recorder.step
        self.promotes = bool(begin.promote_to)
        if not (begin.warm_up or self.link.in_process):
            unanswered[self] = [begin.url, *(url for url, *_ in begin.promote_to)]
        self.link.send(begin)
        self._recorder = self.unrecorded = recorder

    def owners(self, timeout_s: float) -> bytes:
        """Return the owners of the shards that this rank claimed, once all ranks' agents have them."""
        with self._changed:
            self._wait(lambda: self._owners is not None, "all ranks to begin this save", timeout_s)
            assert self._owners is not None
            return self._owners

    def take(self, arenas: Arenas, lease: Lease) -> None:
        """Record the arena that this save fills; it is released when neither process needs it any more."""
        with self._changed:
            self._lease = arenas, lease

    def wait_freed(self, span: int, timeout_s: float) -> None:
        """Wait until a span is written, so that its place may be filled again."""
        with self._changed:
            self._wait(lambda: span in self._freed, "staged bytes to be written", timeout_s)

    def report_filled(self, span: int) -> None:
        """Report to the agent that a span holds its bytes."""
        self.link.send(messages.Filled(self.number, span))

    def staged(self) -> None:
        """Record that the state may change, since all copies from it are made."""
        self.pending.note_staged()
        with self._changed:
            self._staging = False
        self._settle()

    def abandon(self, error: BaseException, timeout_s: float) -> None:
        """Give the save up, and send the error to all ranks."""
        failure, unbegun = typed(error), self._recorder is None
        failure.sign(rank=self.link.rank, phase="assign" if unbegun else None)  # as the round does elsewhere
        with suppress(ReknitError):  # a thread that needs the agent raises its loss
            self.link.send(messages.Abandon(self.number, unbegun, failure.to_wire(), timeout_s))
        self._end(failure if isinstance(error, Exception) else error)
        self.staged()

    def receive(self, message: Any) -> None:
        """Receive a message of the agent about this save."""
        if isinstance(message, messages.Promoted):
            self._promoted(message)
            return
        if isinstance(message, messages.Events):
            if self._recorder is not None:
                self._recorder.pass_on(map(record_of, message.records))
            return
        unanswered.pop(self, None)
        with self._changed:
            if isinstance(message, messages.Assigned):
                self._owners = message.shard_owners
            elif isinstance(message, messages.Freed):
                self._freed.add(message.span)
            elif isinstance(message, messages.ArenaFree):
                self._read = True
            elif isinstance(message, messages.SaveDone):
                self._done = message
            self._changed.notify_all()
        self._settle()

    def lose(self, error: ReknitError) -> None:
        """End the save after the loss of the agent."""
        self.receive(messages.ArenaFree(self.number))
        with self._changed:
            ended = self._done is not None
        if not ended:
            self.receive(messages.SaveDone(self.number, error.to_wire()))
        else:
            for target, promotion in enumerate(self.pending.promotions):
                if not promotion.done():
                    self.receive(messages.Promoted(self.number, target, error.to_wire()))

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until `ready`, with the condition held.  Raises the error of a save that fails meanwhile."""
        # After a failed write, the outcome has the cause once all ranks have it.
        if not self._changed.wait_for(lambda: ready() or self._done is not None, timeout_s):
            raise DeadlineError(f"waited longer than {timeout_s:g} s for {what}", rank=self.link.rank)
        if not ready():
            assert self._done is not None
            raise from_wire(self._done.error or {})

    def _settle(self) -> None:
        """Release the arena, and end the save, once neither process needs them."""
        with self._changed:
            lease = self._lease if self._read and not self._staging else None
            if lease is not None:
                self._lease = None
            done = None if self._staging else self._done
        if lease is not None:
            lease[0].release(lease[1])
        if done is not None:
            self._end(self._report(done) if done.error is None else from_wire(done.error))

    def _report(self, done: messages.SaveDone) -> SaveReport:
        assert self._recorder is not None
        assert done.totals is not None
        return SaveReport(
            path=self._recorder.path,
            step=self._recorder.step,
            write_id=self.write_id,
            phases=(*self._recorder.records, *(PhaseRecord(**record) for record in done.records)),
            blocked_s=self.blocked_s,
            waited_s=self.waited_s,
            streamed=self.streamed,
            **done.totals._asdict(),
        )

    def _promoted(self, message: messages.Promoted) -> None:
        """End the promotion; log its error, which the user may never request."""
        pending, target = self.pending, message.target
        if message.error is None:
            records = tuple(PhaseRecord(**record) for record in message.records)
            done = message.path, pending.path, pending.step, self.write_id, message.nbytes, message.num_files
            pending.end_promotion(target, PromotionReport(*done, records))
            return
        error = from_wire(message.error)

        def log() -> None:
            if self.link.rank in (0, error.rank):
                logger.error("promotion of %s to %s failed: %s", pending.path, pending.places[target], error)

        pending.end_promotion(target, error, log)

    def _record_end(self, outcome: SaveReport | BaseException) -> None:
        """Record the end of the save once, before any waiting thread continues."""
        with self._changed:
            recorder, self.unrecorded = self.unrecorded, None
        if recorder is not None:
            seconds = monotonic() - self.begun
            if isinstance(outcome, SaveReport):
                recorder.end(now() - seconds, seconds, outcome.nbytes)
            else:
                recorder.end(now() - seconds, seconds, 0, outcome)

    def _end(self, outcome: SaveReport | BaseException) -> None:
        """End the save, and log its outcome once, since the user may never request it."""
        unanswered.pop(self, None)
        self._record_end(outcome)
        self.pending.end(outcome, partial(self._log, outcome))

    def _log(self, outcome: SaveReport | BaseException) -> None:
        rank = self.link.rank
        if isinstance(outcome, SaveReport):
            if rank == 0:
                summary = self.pending.summary(monotonic() - self.begun)
                logger.info("%s; blocked training for %.3g s", summary, outcome.blocked_s)
            for warning in outcome.warnings if rank == 0 else ():
                logger.warning("save to %s: %s", outcome.path, warning)
        elif isinstance(outcome, SkippedError):
            logger.warning("save to %s was skipped: %s", self.pending.path, outcome)
        elif rank == getattr(outcome, "rank", rank) or rank == 0:
            log_failure(self.pending, outcome)


def log_failure(pending: SaveOutcome, error: BaseException) -> None:
    """Log that a save failed; the traceback comes with the outcome."""
    logger.error("save to %s failed: %s", pending.path, str(error) or type(error).__name__)
