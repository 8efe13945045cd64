"""A checkpoint whose index lists its files is opened, checked, copied, shown and removed like any other."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.cli.main import main
from reknit.engine.stored import manifest_content
from reknit.engine.stored.delete import delete
from reknit.engine.stored.leftovers import leftovers, remove
from reknit.errors import CheckpointNotFoundError, CorruptError, StorageError
from reknit.format import paths
from reknit.format.manifest_file import decode_record
from reknit.storage.local.memory import SweptFolder
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.types.manifest import Manifest

STATE: dict[str, Any] = {"model": {"w": np.arange(1000.0), "name": "x"}, "optimizer": {"m": np.ones(7)}}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint whose manifest lists only the index, as if it had thousands of files."""
    monkeypatch.setattr(manifest_content, "MAX_LISTED_FILES", -1)
    reknit.save(tmp_path / "run" / "step_00000001", STATE, step=1)
    return tmp_path / "run" / "step_00000001"


def record(path: Path) -> Manifest:
    return decode_record((path / "manifest.json").read_bytes())


def files(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def damage_table(path: Path) -> None:
    """Change a byte of the table that Parquet does not read."""
    manifest = record(path)
    assert manifest.table is not None
    data = bytearray((path / manifest.index_path).read_bytes())
    data[manifest.table.start + manifest.table.nbytes // 2] ^= 1
    (path / manifest.index_path).write_bytes(data)


def test_it_loads_and_is_sound(saved: Path) -> None:
    assert record(saved).table is not None
    assert [file.path for file in record(saved).files] == [record(saved).index_path]
    assert reknit.verify(saved, "data").ok
    state: dict[str, Any] = {"model": {"w": np.zeros(1000), "name": ""}, "optimizer": {"m": np.zeros(7)}}
    reknit.load(saved, state)
    assert state["model"]["name"] == "x"
    assert np.array_equal(state["model"]["w"], STATE["model"]["w"])
    with reknit.open(saved) as checkpoint:
        listed = {file.path for file in checkpoint.manifest.files}
    assert listed == files(saved) - {"manifest.json"}


def test_its_manifest_alone_tells_how_large_it_is(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nbytes = sum((saved / name).stat().st_size for name in files(saved) - {"manifest.json"})
    (step,) = reknit.steps(saved.parent)
    assert (step.step, step.nbytes) == (1, nbytes)
    for command in (["ls", str(saved.parent)], ["show", str(saved)]):
        assert main([*command, "--json"]) == 0
        assert f'"nbytes": {nbytes}' in json.dumps(json.loads(capsys.readouterr().out))


def test_damage_to_the_table_is_found(saved: Path) -> None:
    damage_table(saved)
    for level in ("metadata", "data"):
        report = reknit.verify(saved, level)
        assert not report.ok
        assert record(saved).index_path in report.problems[0]
    with pytest.raises(CorruptError, match="differ from the saved bytes"):
        reknit.open(saved)
    assert main(["verify", str(saved), "--rebuild-index"]) == 1


def test_damage_to_a_file_of_the_table_is_found(saved: Path) -> None:
    (data,) = saved.glob("model/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    assert reknit.verify(saved).ok
    assert data.name in str(reknit.verify(saved, "data").problems)
    data.unlink()
    assert "missing" in str(reknit.verify(saved).problems)


def test_it_is_removed_whole_though_its_table_is_damaged(saved: Path) -> None:
    damage_table(saved)
    (saved / "notes.txt").write_text("mine")
    assert reknit.delete(saved) > 8000
    assert files(saved) == {"notes.txt"}


def test_after_a_fault_it_is_whole_or_gone_and_the_rest_is_swept(saved: Path) -> None:
    """The index may be gone before the files that it lists: their names show that no checkpoint has them."""
    outcomes = []
    for after in one_by_one(range(1, 6)):
        reknit.save(saved, STATE, step=1, overwrite=True)
        storage = LocalStorage(saved)
        try:
            delete(FaultyStorage(storage, plan=[Fault("error", after, "delete")]))
        except StorageError:
            for note in saved.glob(".notes/removal.*"):  # it counts a minute more
                note.unlink()
            if (saved / "manifest.json").exists():
                assert reknit.verify(saved, "data").ok
                outcomes.append("whole")
                continue
            with pytest.raises(CheckpointNotFoundError):
                reknit.open(saved)
            sweep = SweptFolder(str(saved))
            for left in leftovers(storage, sweep.dated(), before=float("inf")):
                assert remove(storage, sweep, left, open_storage)
        assert files(saved.parent) == set()
        outcomes.append("gone")
    assert set(outcomes) == {"whole", "gone"}


def test_what_its_table_names_is_no_leftover_and_other_files_are(saved: Path) -> None:
    dead = paths.data_path("model", 3, "0123abcd" + "0" * 24)
    (saved / dead).write_bytes(b"x")
    before = files(saved)
    storage, sweep = LocalStorage(saved), SweptFolder(str(saved))
    for each in leftovers(storage, sweep.dated(), before=float("inf")):
        assert remove(storage, sweep, each, open_storage)
    assert files(saved) == before - {dead}
    (saved / dead).write_bytes(b"x")
    damage_table(saved)
    assert all(
        "cannot be read" in (each.kept or "") for each in leftovers(storage, sweep.dated(), float("inf"))
    )


def test_it_is_promoted_with_all_files(saved: Path, tmp_path: Path) -> None:
    report = reknit.promote(saved, tmp_path / "slow")
    assert report.num_files == record(saved).num_files
    assert files(tmp_path / "slow") == files(saved)
    assert reknit.verify(tmp_path / "slow", "data").ok


@pytest.mark.parametrize("verify", ["full"])
def test_ranks_load_what_ranks_saved_and_each_gets_its_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any
) -> None:
    monkeypatch.setattr(manifest_content, "MAX_LISTED_FILES", -1)
    path, got = tmp_path / "many", list[dict[str, Any]]()

    def save(group: Group) -> None:
        state = {f"w.{group.rank}": np.full(9, group.rank), "own": reknit.PerRank([group.rank])}
        reknit.save(path, {"model": state}, group=group)

    def load(group: Group) -> None:
        state: dict[str, Any] = {f"w.{rank}": np.zeros(9, np.int64) for rank in range(3)}
        state["own"] = reknit.PerRank([])
        reknit.load(path, {"model": state}, group=group, options=reknit.LoadOptions(verify=verify))
        assert state["own"].value == [group.rank]
        got.append(state)

    run_ranks(3, save)
    assert record(path).num_files == 1 + 3 + 3
    run_ranks(3, load)
    for state in got:
        assert [int(state[f"w.{rank}"][0]) for rank in range(3)] == [0, 1, 2]
