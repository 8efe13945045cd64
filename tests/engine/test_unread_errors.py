"""The end of a process one of whose background saves failed: it says so, and its status is not 0."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

import reknit
from tests.running.cases import one_by_one
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LIMIT_S = 60.0

SAVES = """
import atexit, os, sys
atexit.register(print, "the first handler has run")
import reknit
def save(name, **more):
    return reknit.save(f"{sys.argv[1]}{name}", {"extra": {"epoch": 1}}, wait=False, **more)
def reported(call):
    try:
        call()
    except reknit.errors.StorageError:
        return True
print("unflushed", end=" ")
"""
FORK = """
if child := os.fork():
    print('its child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
ENDS = {
    "at its last line": "save('/one')",
    "with two failed saves": "save('/one').wait(), reknit.close(), save('/two')",
    "by sys.exit(0)": "save('/one')\nsys.exit(0)",
    "after close": "save('/one')\nassert reknit.close()",
    "by an exception": "save('/one')\nraise ValueError('of the script')",
    "by Ctrl-C": "save('/one')\nraise KeyboardInterrupt",
    "without standard error": "save('/one')\nsys.stderr = None",
    "after a result": "assert reported(save('/one').result)",
    "after the next save has raised it": "save('/one').wait()\nassert reported(lambda: save('.good'))",
    "with options that only warn": "save('/one', options=reknit.SaveOptions(on_error='warn'))",
    "after a fork": f"save('/one').wait()\n{FORK}",
    "after a fork whose child fails itself": f"save('/one').wait()\n{FORK}else:\n    save('/two')",
}
OUT = "unflushed the first handler has run\n"


class Ended(NamedTuple):
    """The end of a script."""

    status: int
    out: str
    said: str
    """All that is printed about saves that nobody asked for."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """Run all scripts side by side; a file is in the place of their folder."""
    file = tmp_path_factory.mktemp("ends") / "file"
    file.touch()
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", f"{SAVES}{end}", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, end in ENDS.items()
    }
    found = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=LIMIT_S)
        found[name] = Ended(process.returncode, out, "".join(err.partition("reknit: ")[1:]))
    return found


def test_a_script_that_asks_for_no_result_fails_with_the_error_of_its_save(ends: Mapping[str, Ended]) -> None:
    for name in one_by_one(["at its last line", "by sys.exit(0)", "after close"]):
        assert ends[name][:2] == (120, OUT)
        assert "file/one, which failed: StorageNotFoundError" in ends[name].said


def test_each_failed_save_is_said(ends: Mapping[str, Ended]) -> None:
    said = ends["with two failed saves"].said
    assert said.count("reknit: ") == 1
    assert said.count("StorageNotFoundError") == 2
    assert said.index("file/one") < said.index("file/two")


def test_another_failure_keeps_its_status_and_that_of_the_save_is_said(ends: Mapping[str, Ended]) -> None:
    for name, status in one_by_one([("by an exception", 1), ("by Ctrl-C", -signal.SIGINT)]):
        assert ends[name][:2] == (status, OUT)
        assert "file/one, which failed: StorageNotFoundError" in ends[name].said


def test_a_process_without_standard_error_has_the_status_alone(ends: Mapping[str, Ended]) -> None:
    assert ends["without standard error"] == (120, OUT, "")


def test_a_failure_that_was_raised_or_only_warns_is_not_said_again(ends: Mapping[str, Ended]) -> None:
    for name in one_by_one(
        ["after a result", "after the next save has raised it", "with options that only warn"]
    ):
        assert ends[name] == (0, OUT, "")


def test_a_forked_process_says_its_own_failures_only(ends: Mapping[str, Ended]) -> None:
    status, out, said = ends["after a fork"]
    assert status == 120
    assert "its child ended with 0" in out
    assert said.count("reknit: ") == 1
    status, out, said = ends["after a fork whose child fails itself"]
    assert status == 120
    assert "its child ended with 120" in out
    _, of_child, of_parent = said.split("reknit: ")
    assert "file/two" in of_child
    assert "file/one" not in of_child
    assert "file/two" not in of_parent


def rank_of_a_job(rank: int, folder: Path, end: str) -> None:
    """Save as a rank whose store fails, and end in some way."""
    os.dup2(os.open(folder / f"{rank}.said", os.O_CREAT | os.O_WRONLY), 2)
    group = reknit.connect(rank, 2, at=str(folder), job="job")
    (folder / "file").touch()
    pending = reknit.save(folder / "file" / "one", {"w": np.zeros(9)}, wait=False, group=group)
    pending.wait(LIMIT_S)
    if end == "raises":
        raise ValueError("of the rank")
    sys.exit(3 if end == "exits" else 0)


@pytest.mark.parametrize(("end", "status"), [("returns", 120), ("raises", 1), *[("exits", 3)] * is_night()])
def test_each_rank_of_a_job_says_it(tmp_path: Path, end: str, status: int) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=rank_of_a_job, args=(rank, tmp_path, end)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    assert [process.exitcode for process in ranks] == [status, status]
    for rank in range(2):
        said = (tmp_path / f"{rank}.said").read_text()
        assert said.count("reknit: ") == 1
        assert f"save to {tmp_path}/file/one" in said.partition("reknit: ")[2]
