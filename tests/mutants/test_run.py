"""The runner itself, on a tree of one module: the outcomes of mutants, and that it leaves nothing behind."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.mutants.catalog import Mutant
from tests.mutants.run import Ending, Result, judge_all, main, summary

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "LENGTHS = [0, 1]\n\n\ndef total(numbers):\n    return sum(numbers[0:])\n"
TESTS = """
import subprocess, sys
from reknit.module import total

def test_one_number_is_its_own_total():
    assert total([3]) == 3

def test_a_process_that_is_started_sees_the_same_source():
    code = "from reknit.module import total; print(total([1, 2]))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "3\\n"
"""
SKIPPED = """
import pytest

@pytest.mark.skip(reason="its library is not installed")
def test_a_total_is_that_of_the_library():
    raise NotImplementedError
"""
ORPHAN = """
import subprocess, sys, time
from reknit.module import total

def test_a_total_comes_to_an_end():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    while total([1]) != 1:
        time.sleep(0.01)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "src/reknit").mkdir(parents=True)
    (made / "tests").mkdir()
    (made / "src/reknit/__init__.py").touch()
    (made / "src/reknit/module.py").write_text(MODULE)
    (made / "tests/test_total.py").write_text(TESTS)
    (made / "tests/test_orphan.py").write_text(ORPHAN)
    (made / "tests/test_skipped.py").write_text(SKIPPED)
    (made / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\n")
    return made


def mutant(old: str, new: str, *, tests: str = "tests/test_total.py", survives: str = "") -> Mutant:
    return Mutant(f"{old} is {new}", "module.py", old, new, [tests], survives, "room")


def judged(root: Path, *mutants: Mutant, limit_s: float = 60.0) -> list[Result]:
    results = judge_all(root, mutants, jobs=2, limit_s=limit_s)
    assert not isinstance(results, Ending), results.by
    assert [result.mutant for result in results] == list(mutants)
    return results


def test_mutants_are_killed_by_tests_or_survive_them_or_are_stale(root: Path) -> None:
    killed, survived, known, found, stale, twice, broken, unlisted = judged(
        root,
        mutant("[0:]", "[1:]"),  # as long as the original, and made in the same second
        mutant("[0, 1]", "[0, 2]"),
        mutant("[0, 1]", "[0, 3]", survives="nobody looks"),
        mutant("[0:]", "[:0]", survives="nobody looked"),
        mutant("[1, 2, 3]", "[]"),
        mutant("numbers", "lengths"),
        mutant("numbers[0:]", "numbers[0:"),
        mutant("[0:]", "[1:]", tests="tests/test_total.py::test_nothing"),
    )
    assert (killed.verdict, killed.bad) == ("killed", False)
    assert killed.by == "tests/test_total.py::test_one_number_is_its_own_total"
    assert (survived.verdict, survived.bad) == ("survived", True)
    assert (known.verdict, known.bad) == ("survived", False)
    assert (found.verdict, found.bad) == ("killed", True)
    assert [result.verdict for result in (stale, twice, broken, unlisted)] == ["stale"] * 4
    assert all(result.bad for result in (stale, broken, unlisted))
    assert (stale.by, unlisted.by) == (
        "src/reknit/module.py has its text no times",
        "tests/test_total.py has no test_nothing",
    )
    assert broken.by.startswith("its result is not Python")
    assert summary([killed, survived, known, found]) == [
        "room: killed 2 of 4",
        "all: killed 2 of 4",
        "survived: room: [0, 1] is [0, 2]",
        "survived: room: [0, 1] is [0, 3] (known: nobody looks)",
        "killed by now, so it did not survive: room: [0:] is [:0]",
    ]
    assert (root / "src/reknit/module.py").read_text() == MODULE


def test_a_mutant_that_cannot_even_be_imported_or_whose_tests_are_all_skipped_tells_nothing(
    root: Path,
) -> None:
    unsound, skipped = judged(
        root,
        mutant("LENGTHS = [0, 1]", "LENGTHS = NAMES"),
        mutant("[0, 1]", "[0, 2]", tests="tests/test_skipped.py"),
    )
    assert (unsound.verdict, unsound.bad) == (skipped.verdict, skipped.bad) == ("broken", True)
    assert "NameError" in unsound.by
    assert "were skipped" in skipped.by


def sleeps(process: psutil.Process) -> bool:
    """Return whether the test that hangs has started this."""
    with suppress(psutil.Error):  # it has ended, and may be a zombie
        return process.cmdline()[-1:] == ["import time; time.sleep(600)"]
    return False


def test_a_mutant_that_hangs_is_killed_with_all_that_its_tests_have_started(root: Path) -> None:
    (result,) = judged(root, mutant("[0:]", "[1:]", tests="tests/test_orphan.py"), limit_s=6.0)
    assert (result.verdict, result.by) == ("killed", "the limit of 6 s")
    assert not any(sleeps(process) for process in psutil.process_iter())


def test_tests_that_fail_without_a_mutant_are_told_and_nothing_else_is(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "src/reknit/module.py").write_text(MODULE.replace("[0:]", "[1:]"))
    catalog = tmp_path / "catalog"
    catalog.mkdir()
    (catalog / "room.toml").write_text(
        "[[mutant]]\nname = 'no lengths'\nfile = 'module.py'\nold = '[0, 1]'\nnew = '[]'\n"
        "tests = ['tests/test_total.py']\n"
    )
    assert main([], root=root, catalog=catalog) == 2
    assert "fail without any mutant" in capsys.readouterr().out
    assert main(["--list"], root=root, catalog=catalog) == 0
    assert "room: no lengths (module.py; tests/test_total.py)" in capsys.readouterr().out
    assert main(["no such thing"], root=root, catalog=catalog) == 2
