"""A promotion as a process carries it out: from where, to where, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reknit.engine.report import PromotionReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.monitor.phase import Recorder
    from reknit.options import SaveOptions
    from reknit.storage.base import Storage
    from reknit.types.manifest import FileEntry


@dataclass(frozen=True, slots=True)
class Promotion:
    """Where a checkpoint is, and where it is to be as well; `overwrite` replaces another one there."""

    source: Storage
    target: Storage
    overwrite: bool
    options: SaveOptions
    recorder: Recorder

    def report(self, step: int | None, write_id: str, copied: Sequence[FileEntry]) -> PromotionReport:
        """Return what was done here."""
        return PromotionReport(
            path=self.target.url,
            source=self.source.url,
            step=step,
            write_id=write_id,
            nbytes=sum(file.nbytes for file in copied),
            num_files=len(copied),
            phases=tuple(self.recorder.records),
        )
