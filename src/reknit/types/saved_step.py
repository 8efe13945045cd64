"""A step of a run that was saved: one checkpoint among those side by side in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed checkpoint directly below the folder of a run.

    `step` is None where none was given at the save.  `created` is seconds since the epoch, `nbytes` the size
    of all its files.  `metrics` are the numbers given to `Checkpointer.save` and `reknit.note`; one that was
    not finite is None.  `write_id` differs for each save, also of the same step.  `problem` says why the
    manifest cannot be read, and is None for a checkpoint that can be opened; it does not say whether every
    file is whole, as `reknit.verify` does.  `dropped` are items that were removed since.
    `moved_to` is where the files are, if not at `path`.
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
