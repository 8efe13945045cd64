"""A save to a path whose checkpoint is just being removed waits for the end of the removal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from reknit.engine.stored import removals
from reknit.engine.stored.removals import PathRemoval
from reknit.errors import CommitError
from reknit.storage.registry import open_storage

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"m": {"w": np.ones(3)}}


@pytest.mark.parametrize("pauses", [0, 3])
def test_it_begins_when_the_removal_has_ended(
    pauses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step_1"
    removal = PathRemoval(open_storage(path))
    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(seconds)
        if len(seen) == pauses:
            removal.end()

    monkeypatch.setattr(removals, "sleep", sleep)
    if not pauses:
        removal.end()
    reknit.save(path, STATE)
    assert len(seen) == pauses
    assert reknit.verify(path, "data").ok


def test_one_that_does_not_end_is_an_error_that_names_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "_PATIENCE_S", 0.0)
    PathRemoval(open_storage(tmp_path / "step_1"))
    with pytest.raises(CommitError, match=r"are being deleted by 'process \d+ of") as caught:
        reknit.save(tmp_path / "step_1", STATE)
    assert "here in 1.0 minutes; or delete" in (caught.value.remedy or "")


def test_one_whose_process_has_died_in_a_folder_counts_for_a_minute_only(tmp_path: Path) -> None:
    PathRemoval(open_storage(tmp_path / "step_1"))
    (note,) = (tmp_path / "step_1").rglob("removal.*")
    before = note.stat().st_mtime - 63
    os.utime(note, (before, before))
    reknit.save(tmp_path / "step_1", STATE)
    assert reknit.verify(tmp_path / "step_1", "data").ok
