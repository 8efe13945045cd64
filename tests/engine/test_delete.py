"""Checkpoints are removed whole, manifest first, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.stored.delete import delete, sweep
from reknit.errors import CheckpointNotFoundError, StorageError, UsageError
from reknit.storage.registry import open_storage
from reknit.testing.faulty_storage import Fault, FaultyStorage

if TYPE_CHECKING:
    from pathlib import Path

STATE: dict[str, Any] = {"model": {"w": np.arange(10.0)}, "step": 5}


def test_a_checkpoint_goes_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "one"
    reknit.save(path, STATE)
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    freed = reknit.delete(path)
    assert 0 < freed < nbytes  # the manifest is not counted
    assert not path.exists()
    with pytest.raises(CheckpointNotFoundError):
        reknit.delete(path)


def test_in_memory_too() -> None:
    reknit.save("mem://test_delete/one", STATE)
    assert reknit.delete("mem://test_delete/one") > 0
    assert reknit.steps("mem://test_delete") == []


@pytest.mark.parametrize("after", range(1, 6))
def test_after_a_fault_it_is_whole_or_gone_and_the_rest_can_be_swept(tmp_path: Path, after: int) -> None:
    path = tmp_path / "one"
    reknit.save(path, STATE)
    storage = open_storage(path)
    faulty = FaultyStorage(storage, plan=[Fault("error", after, "delete")])
    try:
        delete(faulty)
    except StorageError:
        if (path / "manifest.json").exists():
            assert reknit.verify(path, "data").ok
        else:
            with pytest.raises(CheckpointNotFoundError):
                reknit.open(path)
            sweep(storage)
            assert not path.exists()
    else:
        assert not path.exists()


def test_a_save_under_way_keeps_its_folder(tmp_path: Path) -> None:
    reknit.save(tmp_path / "one", STATE)
    (tmp_path / "one" / f"pending.{9:016x}.{'b' * 8}").touch()
    with pytest.raises(UsageError, match="under way"):
        reknit.delete(tmp_path / "one")
    assert reknit.verify(tmp_path / "one", "data").ok


def test_what_another_program_saved_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UsageError, match="Hugging Face"):
        reknit.delete(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
