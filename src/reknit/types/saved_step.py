"""A saved step of a run: one of the checkpoints in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed checkpoint directly below the folder of a run.

    `step` is None for a save without a step.  `created` is in seconds since the epoch, `nbytes` the size of
    all files.  `metrics` are the numbers of `Checkpointer.save` and `reknit.note`, with None for infinite
    ones and NaN.  `write_id` differs for each save, also of the same step.  `problem` is the reason why the
    manifest cannot be read, or None; the other files are checked by `reknit.verify` only.  `dropped` are
    items that were removed since.  `moved_to` is the place of the files, if not `path`.  `generation` is that
    of the save, which is higher in each run of a job.  `of_run` is whether a `Checkpointer` saved it.
    """

    step: int | None
    path: str
    created: float = 0.0
    nbytes: int = 0
    items: tuple[str, ...] = ()
    metrics: Mapping[str, float | None] | None = None
    write_id: str | None = None
    problem: str | None = None
    dropped: tuple[str, ...] = ()
    moved_to: str | None = None
    generation: int | None = None
    of_run: bool = False
