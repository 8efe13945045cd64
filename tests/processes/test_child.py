"""A process of a module: its arguments, and the error if it cannot be started."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from reknit.errors import ShortageError
from reknit.processes import start_child

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("new_session", [False, True])
def test_a_module_that_this_process_finds_gets_a_descriptor_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_session: bool
) -> None:
    (tmp_path / "reported.py").write_text(
        "import os, sys\nos.write(int(sys.argv[1]), f'{sys.argv[2]} {os.getsid(0)}'.encode())\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    ours, theirs = os.pipe()
    child = start_child("reported", theirs, "word", stdout=subprocess.DEVNULL, new_session=new_session)
    os.close(theirs)
    with os.fdopen(ours) as read:
        assert read.read() == f"word {child.pid if new_session else os.getsid(0)}"
    assert child.wait(60) == 0


def test_a_process_starts_where_the_working_folder_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reported.py").write_text("import os, sys\nos.write(int(sys.argv[1]), b'here')\n")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    ours, theirs = os.pipe()
    child = start_child("reported", theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    with os.fdopen(ours) as read:
        assert read.read() == "here"
    assert child.wait(60) == 0


def test_too_many_processes_are_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*_: object, **__: object) -> None:
        raise BlockingIOError(11, os.strerror(11))

    monkeypatch.setattr(subprocess, "Popen", scarce)
    with pytest.raises(ShortageError, match="no further thread or process"):
        start_child("reported", 1, stdout=None)
