"""Checkpoints are removed whole, manifest first, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file

import reknit
from reknit.engine.stored.delete import delete
from reknit.errors import CheckpointNotFoundError, StorageError, UsageError
from reknit.format import paths
from reknit.format.checksum import digest
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.storage.registry import open_storage
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.types.manifest import FileEntry
from tests.running.cases import one_by_one_in

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


def test_after_a_fault_it_is_whole_or_gone_and_the_rest_can_be_swept(tmp_path: Path) -> None:
    for after, folder in one_by_one_in(tmp_path, range(1, 7)):
        path = folder / "one"
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
                left = [file for file in path.rglob("*") if file.is_file()]
                assert all(paths.parse_path(str(file.relative_to(path))) for file in left)
        else:
            assert not path.exists()


def test_a_damaged_checkpoint_can_be_removed_and_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "one"
    reknit.save(path, STATE)
    (path / "manifest.json").write_bytes(b"{}")
    (path / "notes.txt").write_text("mine")
    assert reknit.delete(path) > 0
    assert [file.name for file in path.rglob("*") if file.is_file()] == ["notes.txt"]


def test_what_a_manifest_names_is_removed_only_where_reknit_could_have_written_it(tmp_path: Path) -> None:
    """A manifest of another program may name any file of its folder."""
    path = tmp_path / "one"
    reknit.save(path, STATE)
    manifest = decode_manifest((path / "manifest.json").read_bytes())
    other = FileEntry("notes.txt", 4, (digest(b"mine"),))
    hostile = replace(manifest, files=(*manifest.files, other))
    (path / "manifest.json").write_bytes(encode_manifest(hostile))
    (path / "notes.txt").write_text("mine")
    reknit.delete(path)
    assert [file.name for file in path.rglob("*")] == ["notes.txt"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    reknit.save(tmp_path / "kept", STATE)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    with pytest.raises(UsageError, match="is a link"):
        reknit.delete(tmp_path / "link")
    assert reknit.verify(tmp_path / "kept", "data").ok


def test_a_save_under_way_keeps_its_folder(tmp_path: Path) -> None:
    reknit.save(tmp_path / "one", STATE)
    (tmp_path / "one" / f"pending.{9:016x}.{'b' * 8}").touch()
    with pytest.raises(UsageError, match="under way"):
        reknit.delete(tmp_path / "one")
    assert reknit.verify(tmp_path / "one", "data").ok


def test_what_another_program_saved_is_left_alone(tmp_path: Path) -> None:
    save_file({"w": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="Hugging Face"):
        reknit.delete(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
