"""Damaged copies of folders: every file has its turn, and values that changed in silence are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import reknit
from tests.integrations.formats.damage import CUT, SWAPPED, damages, wrong_in_silence

if TYPE_CHECKING:
    from pathlib import Path


def test_each_damage_changes_one_file_or_two_and_the_folder_itself_stays_whole(tmp_path: Path) -> None:
    files = {"a_0.pt": b"zero", "a_1.pt": b"one", "note": b""}
    (tmp_path / "whole").mkdir()
    for name, data in files.items():
        (tmp_path / "whole" / name).write_bytes(data)
    found = {
        name: {each.name: each.read_bytes() for each in broken.iterdir()}
        for name, broken in damages(tmp_path / "whole", tmp_path, flips=1)
    }
    cut = {"cut a_0.pt": {**files, "a_0.pt": b"ze"}, "cut a_1.pt": {**files, "a_1.pt": b"o"}}
    swapped = {"swapped a_0.pt and a_1.pt": {**files, "a_0.pt": b"one", "a_1.pt": b"zero"}}
    assert found == {
        **{f"removed {name}": {k: v for k, v in files.items() if k != name} for name in files},
        **{f"emptied {name}": {**files, name: b""} for name in ("a_0.pt", "a_1.pt")},
        **cut,
        **swapped,
        "flipped byte 2 of a_0.pt": {**files, "a_0.pt": b"ze\x8do"},
        "flipped byte 1 of a_1.pt": {**files, "a_1.pt": b"o\x91e"},
        "added a_2.pt, a copy of a_1.pt": {**files, "a_2.pt": b"one"},
    }
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]
    chosen = damages(tmp_path / "whole", tmp_path, kinds=(CUT, SWAPPED), files="a_*.pt")
    assert [name for name, _ in chosen] == [*cut, *swapped]


def test_values_that_changed_in_silence_are_named(tmp_path: Path) -> None:
    for number in range(2):
        reknit.save(tmp_path / f"{number}", {"model": {"w": np.full(4, number), "n": number}})
    with reknit.open(tmp_path / "0") as checkpoint:
        whole = checkpoint.read_all()
    assert wrong_in_silence(tmp_path / "0", whole) == []
    assert wrong_in_silence(tmp_path / "1", whole) == ["model/n", "model/w"]
    assert wrong_in_silence(tmp_path / "1", {"model": {}}) == ["model/n", "model/w"]
    for damage, broken in damages(tmp_path / "0", tmp_path, kinds=(CUT,)):
        assert wrong_in_silence(broken, whole) == [], damage
