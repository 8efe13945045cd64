"""The plugins that run the tests, on small folders of tests."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import run
from tests.running.examples import examples, is_night

ROOT = Path(__file__).parents[2]

STARTS_ONE = """
import subprocess, sys

def test_that_starts_a_process_which_starts_another():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""

SAYS_WHEN = """
import json, os, time
import pytest

from tests.ranks import run
from tests.running.examples import examples, is_night

def note(name):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps([time.monotonic(), name]) + chr(10))

@pytest.mark.parametrize("number", range(6))
def test_beside_others(number):
    note("begin"), time.sleep(0.02), note("end")

@pytest.mark.alone
def test_alone():
    note("begin alone"), time.sleep(0.1), note("end alone")

def test_after():
    note("begin"), note("end")
"""


def pytest_in(folder: Path, *arguments: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run tests with the plugins, each file in a folder of its own."""
    for name, text in files.items():
        file = folder / "tests" / name / f"test_{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = alone: alone\naddopts = --import-mode=importlib\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.running.budget", "-p", "tests.running.lanes"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(folder / "notes")}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )


def test_a_folder_that_starts_more_processes_than_its_budget_fails_the_run(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "-n", "2", dear=STARTS_ONE, cheap="def test_nothing(): pass")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "tests/dear outgrew tests/running/budgets.py: 2 processes instead of 0" in done.stdout
    assert "tests/cheap" not in done.stdout.partition("tests by folder")[2]
    assert "2 passed" in done.stdout


def test_a_test_that_wants_to_be_alone_runs_beside_no_other(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "-n", "2", a=SAYS_WHEN, b=SAYS_WHEN)
    assert "16 passed" in done.stdout, done.stdout + done.stderr
    notes = [
        name for _, name in sorted(json.loads(line) for line in (tmp_path / "notes").read_text().splitlines())
    ]
    assert notes.count("begin alone") == 2
    for at, name in enumerate(notes):
        if name == "begin alone":
            assert notes[:at].count("begin") == notes[:at].count("end")
            assert notes[at + 1] == "end alone"


def profile() -> tuple[int, bool]:
    return examples(400), is_night()


def test_ranks_have_time_for_as_much_as_the_tests_that_start_them() -> None:
    assert run(1, profile) == [profile()]


def test_no_process_of_tests_imports_jax() -> None:
    """Its threads would be in all processes that later tests fork, so JAX is tested in jobs of its own."""
    tests = Path(__file__).parents[1]
    found = []
    for path in sorted([*tests.rglob("test_*.py"), *tests.rglob("conftest.py")]):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "jax" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.relative_to(tests)}: {name}" for name in names if name.split(".")[0] == "jax"]
    assert found == []


def test_the_tests_of_the_quick_run_exist() -> None:
    script = (ROOT / "scripts" / "test").read_text()
    (words,) = re.findall(r"^quick=\(\n.*?^\)$", script, re.DOTALL | re.MULTILINE)
    command = ["bash", "-c", f"{words}\nprintf '%s\\n' \"${{quick[@]}}\""]
    named = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    lost = []
    for word in named:
        file, _, test = word.partition("::")
        path = ROOT / file
        if word != "--deselect" and not (
            path.exists() and (not test or test.split("[")[0] in path.read_text())
        ):
            lost.append(word)
    assert len(named) > 15
    assert lost == []
