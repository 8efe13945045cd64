"""Folders on the way to a file, while others make and remove them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from reknit.storage.local.folders import Folders

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_that_is_gone_again_when_it_is_looked_at_is_missing_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(name: str) -> None:
        raise FileExistsError(name)  # made by another process, and pruned before the check

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(FileNotFoundError, match="gone again"):
        Folders(str(tmp_path), durable=True).make(str(tmp_path / "a"))


def test_a_link_that_leads_nowhere_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="a broken link"):
        Folders(str(tmp_path), durable=True).make(str(tmp_path / "link" / "a"))


def test_a_file_in_the_way_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="a file is in the place"):
        Folders(str(tmp_path), durable=False).make(str(tmp_path / "file" / "a"))
