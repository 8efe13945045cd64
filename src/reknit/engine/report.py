"""What a save or a load did, as told to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reknit.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.monitor.phase import PhaseRecord


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A committed checkpoint.

    `nbytes` and `num_files` are what this rank wrote, `total_nbytes` what all ranks did.  `warnings` say what
    was stored but looks wrong, such as copies that differ between ranks.  `phases` are this rank's.
    """

    path: str
    step: int | None
    write_id: str
    nbytes: int
    num_files: int
    total_nbytes: int
    warnings: tuple[str, ...]
    phases: tuple[PhaseRecord, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank restored, and everything that it did not restore exactly.

    Names are `item/fqn`.  `restored`: tensors and values filled on this rank.  `missing`: wanted but not in
    the checkpoint; `unexpected`: in a loaded item of the checkpoint but wanted by no rank; `mismatched`:
    could not be taken (with the reason).  These three are empty unless the load was lenient.  `cast`:
    converted to another dtype.  `resharded`: read from other boxes than this rank wanted.  `notes`: left as
    it was by design, with the reason, such as a random state after a change of world size.  `nbytes_wanted`
    are the bytes of the boxes that this rank wanted, `nbytes_read` those that left storage for it.
    """

    path: str
    step: int | None
    metadata: Mapping[str, Any]
    restored: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: Mapping[str, str]
    cast: tuple[str, ...]
    resharded: tuple[str, ...]
    notes: Mapping[str, str]
    nbytes_wanted: int
    nbytes_read: int
    phases: tuple[PhaseRecord, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `reknit.verify` found: `problems` name file and place, and are empty for a sound checkpoint."""

    path: str
    level: str
    num_files: int
    nbytes_checked: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Tell whether the checkpoint is sound."""
        return not self.problems


@dataclass
class PendingSave:
    """A save under way.  Saving is synchronous for now, so it is already done when a caller gets it."""

    _report: SaveReport | None = None
    _error: BaseException | None = None
    phases: tuple[PhaseRecord, ...] = field(default=())

    def staged(self, timeout: float | None = None) -> None:
        """Return when the state may be changed again.  Raises `DeadlineError` after `timeout` seconds."""

    def done(self) -> bool:
        """Tell whether the save has ended, well or not."""
        return self._report is not None or self._error is not None

    def result(self, timeout: float | None = None) -> SaveReport:
        """Return the report once the checkpoint is committed, or raise what made it fail.

        Raises `DeadlineError` when it has not ended after `timeout` seconds.
        """
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise DeadlineError(f"the save has not ended within {timeout} s")
        return self._report
