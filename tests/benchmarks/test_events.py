"""The benchmark of events: each save beside a bad sink is committed, and each kind of sink is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.events.run import beside_sinks

if TYPE_CHECKING:
    from pathlib import Path


def test_each_save_beside_a_bad_sink_is_committed_and_measured(tmp_path: Path) -> None:
    found = beside_sinks(tmp_path, 3, nbytes=800)
    assert list(found) == ["none", "none again", "good", "hanging", "failing", "full", "lying"]
    assert found["none"]["ratio"] == 1.0
    assert all(row["ratio"] > 0 for row in found.values())
