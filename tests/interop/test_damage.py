"""Damaged copies of folders: every file has its turn, the folder itself stays whole, and a loss is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import reknit
from tests.interop.damage import CUT, REMOVED, SWAPPED, damages, wrong_in_silence

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"a_0.pt": b"zero", "a_1.pt": b"one", "p/x.bin": b"px", "q/x.bin": b"qx", "note": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / "whole" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "whole" / name).write_bytes(data)
    return tmp_path / "whole"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def test_each_damage_changes_what_its_name_says_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    found = {name: contents(broken) for name, broken in damages(folder, tmp_path, flips=1)}
    assert contents(folder) == FILES
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]
    assert set(found) == {
        *(f"removed {name}" for name in FILES),
        *(f"{kind} {name}" for kind in ("emptied", "cut") for name, data in FILES.items() if data),
        *(f"flipped byte {len(data) // 2} of {name}" for name, data in FILES.items() if data),
        "swapped a_0.pt and a_1.pt",
        "swapped p/x.bin and q/x.bin",
        "added a_2.pt, a copy of a_1.pt",
    }
    assert found["removed note"] == {name: data for name, data in FILES.items() if name != "note"}
    assert found["cut a_0.pt"] == {**FILES, "a_0.pt": b"ze"}
    assert found["flipped byte 1 of a_1.pt"] == {**FILES, "a_1.pt": b"o\x91e"}
    assert found["swapped p/x.bin and q/x.bin"] == {**FILES, "p/x.bin": b"qx", "q/x.bin": b"px"}
    assert found["added a_2.pt, a copy of a_1.pt"] == {**FILES, "a_2.pt": b"one"}


def test_kinds_and_files_are_chosen(folder: Path, tmp_path: Path) -> None:
    names = [name for name, _ in damages(folder, tmp_path, kinds=(CUT, SWAPPED), files="a_*.pt")]
    assert names == ["cut a_0.pt", "cut a_1.pt", "swapped a_0.pt and a_1.pt"]


def test_values_that_changed_in_silence_are_named(tmp_path: Path) -> None:
    for number in range(2):
        reknit.save(tmp_path / f"{number}", {"model": {"w": np.full(4, number), "n": number}})
    with reknit.open(tmp_path / "0") as checkpoint:
        whole = checkpoint.read_all()
    assert wrong_in_silence(tmp_path / "0", whole) == []
    assert wrong_in_silence(tmp_path / "1", whole) == ["model/n", "model/w"]
    assert wrong_in_silence(tmp_path / "1", {"model": {}}) == ["model/n", "model/w"]
    for damage, broken in damages(tmp_path / "0", tmp_path, kinds=(REMOVED, CUT)):
        assert wrong_in_silence(broken, whole) == [], damage
