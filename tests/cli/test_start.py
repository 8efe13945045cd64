"""How the program starts: its imports come late, and Ctrl-C ends it in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

STOPPED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
SCRIPT = """
import sys
from reknit.__main__ import main
sys.exit(main())
"""


def test_an_interrupt_while_modules_are_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy is the first thing that takes long to import; this one is interrupted meanwhile."""
    (tmp_path / "numpy.py").write_text(STOPPED)
    (tmp_path / "reknit").write_text(SCRIPT)  # like that of an installer
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for program in (["-m", "reknit"], [str(tmp_path / "reknit")]):
        command = [sys.executable, *program, "ls", "."]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "reknit: interrupted\n"), program


def test_the_program_is_installed_under_its_name() -> None:
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines()
    assert 'reknit = "reknit.__main__:main"' in lines
