"""An export that fails leaves nothing, in every format, and says why."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.integrations.dcp.export import export_dcp
from reknit.integrations.hugging_face.export import export_hf
from reknit.integrations.numpy_gguf.export import export_npz
from reknit.integrations.torch_save.export import export_torch
from tests.forged import rewritten, with_value
from tests.integrations.formats.checkpoints import damage, files_of_at_most

if TYPE_CHECKING:
    from pathlib import Path

EXPORTS: list[Any] = [export_hf, export_torch, export_dcp, export_npz]
FOLDERS: list[Any] = [export_hf, export_dcp]
FILES: list[Any] = [export_torch, export_npz]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_damage_in_the_checkpoint_is_its_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    for name in ("flipped", "short"):
        reknit.save(tmp_path / name, {"model": {"w": torch.zeros(1000)}})
    damage(tmp_path / "flipped")
    rewritten(tmp_path / "short", lambda table: with_value(table, "shape", [1001]))
    for export in EXPORTS:
        for name in ("flipped", "short"):
            with pytest.raises(reknit.CorruptError, match="model/w"):
                export(tmp_path / name, tmp_path / "out")
    assert names(tmp_path) == ["flipped", "short"]


def test_a_full_disk_is_an_error_of_the_storage_and_leaves_nothing(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": {"w": torch.zeros(1_000_000)}})
    for export in EXPORTS:
        with files_of_at_most(200_000), pytest.raises(reknit.StorageError, match="write"):
            export(tmp_path / "c", tmp_path / "out")
    assert names(tmp_path) == ["c"]


def test_a_disk_without_room_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reknit.save(tmp_path / "c", {"model": {f"w{n}": torch.zeros(150) for n in range(2)}})
    usage: Any = type("Usage", (), {"free": 1000})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage)
        for export in (partial(export_hf, max_shard_nbytes=600), export_torch, export_dcp, export_npz):
            with pytest.raises(reknit.StorageError, match="No space left"):
                export(tmp_path / "c", tmp_path / "out")
    assert names(tmp_path) == ["c"]


def test_what_is_there_already_is_left_alone(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"model": {"w": torch.zeros(2)}})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "mine").write_text("mine")
    for export in FOLDERS:
        with pytest.raises(reknit.UsageError, match="not empty"):
            export(tmp_path / "c", tmp_path / "full")
    for export in FILES:
        with pytest.raises(reknit.UsageError, match="there already"):
            export(tmp_path / "c", tmp_path / "mine")
        with pytest.raises(reknit.UsageError, match="is a folder"):
            export(tmp_path / "c", tmp_path / "c", overwrite=True)
    with pytest.raises(reknit.UsageError, match="not a folder"):
        export_hf(tmp_path / "c", tmp_path / "mine", overwrite=True)
    for place in ("", "mem://x", "s3://bucket/x"):
        with pytest.raises(reknit.UsageError, match="local folder"):
            export_hf(tmp_path / "c", place)
    for export in EXPORTS:
        with pytest.raises(reknit.CheckpointNotFoundError):
            export(tmp_path / "absent", tmp_path / "out")
    assert names(tmp_path) == ["c", "full", "mine"]
    assert names(tmp_path / "full") == ["mine"]
    assert (tmp_path / "mine").read_text() == "mine"
