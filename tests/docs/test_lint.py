"""`scripts/lint` names, for each check that fails, the remedy and the command that runs the check again."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CHECKS = ["ruff", "arguments", "format", "prose", "spelling", "mypy", "docs", "links", "changelog", "scripts"]
TOOLS = (".venv/bin/ruff", ".venv/bin/python", ".venv/bin/codespell", ".venv/bin/mypy", "scripts/docs")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone with the real `scripts/lint`, whose tools have the exit status in the file `status`."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/lint", tmp_path / "scripts")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "status").write_text("0")
    for tool in ("scripts/setup", *TOOLS):
        (tmp_path / tool).write_text("exit 0\n" if tool == "scripts/setup" else 'exit "$(<status)"\n')
        (tmp_path / tool).chmod(0o755)
    return tmp_path


def lint(clone: Path, *checks: str) -> tuple[int, str]:
    """Return the exit status of `scripts/lint` and its errors."""
    command = ["bash", str(clone / "scripts/lint"), *checks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def test_without_a_failure_there_is_no_advice(clone: Path) -> None:
    assert lint(clone) == (0, "")


def test_each_check_that_fails_has_one_line_with_its_remedy_and_its_command(clone: Path) -> None:
    (clone / "status").write_text("1")
    (clone / "scripts/demo").write_text("")  # not executable
    status, errors = lint(clone)
    assert status == 1
    lines = errors[errors.index("lint failed:") :].splitlines()[1:]
    found = [re.fullmatch(r"  (\w+): (.{20,}); then: scripts/lint (\w+)", line) for line in lines]
    assert [line and line.group(1, 3) for line in found] == [(check, check) for check in CHECKS]


def test_only_the_named_checks_run_and_an_unknown_one_is_answered_with_the_list(clone: Path) -> None:
    (clone / "status").write_text("1")
    status, errors = lint(clone, "format")
    assert (status, errors.count("then: scripts/lint")) == (1, 1)
    status, errors = lint(clone, "mypi")
    assert status == 2
    assert errors == f"scripts/lint: there is no check mypi; the checks are: {' '.join(CHECKS)}\n"
