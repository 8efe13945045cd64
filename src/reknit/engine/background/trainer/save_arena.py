"""The host memory into which a trainer stages one save, until the save itself owns it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import DeadlineError, SkippedError
from reknit.monitor.phase import Stopwatch

if TYPE_CHECKING:
    from reknit.engine.background.trainer.trainer_save import TrainerSave
    from reknit.engine.memory.arena_pool import Arenas, Lease
    from reknit.engine.saving.save_job import SaveJob


class SaveArena:
    """The lease of an arena for one save."""

    def __init__(self, arenas: Arenas) -> None:
        """Take no arena yet; see `acquire`."""
        self.arenas = arenas
        self.lease: Lease | None = None
        self._waited_s = 0.0

    def acquire(self, nbytes: int, job: SaveJob) -> Lease:
        """Return an arena of `nbytes`, after a wait that the options limit.

        Raises `DeadlineError`, and `SkippedError` if the options skip saves that would wait.
        """
        if self.lease is not None:
            return self.lease
        options, clock = job.options, Stopwatch()
        skip = options.when_busy == "skip"
        with job.recorder.phase("back_pressure"), clock.lap():
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
