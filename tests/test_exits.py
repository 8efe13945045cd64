"""The functions that reknit calls at the end of a process, in processes of every start method."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.comm.group import turn
from reknit.comm.tree import rounds
from reknit.system import AtExit

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.tree.rounds import Visit

SCRIPT = """
from reknit.system import AtExit
AtExit(lambda: print("after them"), last=True)
for word in ("first", "second", "third"):
    made = AtExit(lambda word=word: print(word))
    if word == "second":
        made.cancel()
"""


def append(file: Path, word: str) -> None:
    with file.open("a") as out:
        out.write(word)


def end(file: Path) -> None:
    """End a process with three functions to call, and one that was cancelled."""
    for word in "zabc":
        made = AtExit(partial(append, file, word), last=word == "z")
        if word == "b":
            made.cancel()


def test_a_script_does_at_its_end_what_was_asked_for_last_first() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["third", "first", "after them"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_so_does_a_process_of_multiprocessing(tmp_path: Path, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=end, args=(tmp_path / "reported",))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "reported").read_text() == "caz"


def test_a_process_that_was_forked_leaves_to_its_parent_what_that_asked_for(tmp_path: Path) -> None:
    script = f"""
import multiprocessing, os
from pathlib import Path
from reknit.system import AtExit
AtExit(lambda: Path({str(tmp_path / "reported")!r}).open("a").write(f"{{os.getpid()}} "))
process = multiprocessing.get_context("fork").Process(target=print, args=("child",))
process.start()
process.join()
print(os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (tmp_path / "reported").read_text().split() == [done.stdout.split()[-1]]


def last_round(rank: int, size: int, folder: Path) -> None:
    """End a rank right after its last round, whose result rank 0 sends late to the others."""
    if rank == 0:
        answer = rounds.Rounds.answer

        def slowly(self: rounds.Rounds, visit: Visit) -> object:
            outcome = answer(self, visit)
            time.sleep(0.5)
            return outcome

        rounds.Rounds.answer = slowly  # type: ignore[assignment, method-assign]
    group = reknit.connect(rank, size, at=str(folder), job="job")
    with turn(group, "last", 60.0) as its_turn:
        answered = its_turn.give(its_turn.gather(b"%d" % rank), bytes)
    (folder / f"{rank}.answer").write_bytes(answered)


def test_ranks_of_multiprocessing_that_end_after_their_last_round_all_get_its_answer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=last_round, args=(rank, 3, tmp_path)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert [(tmp_path / f"{rank}.answer").read_bytes() for rank in range(3)] == [b"0", b"1", b"2"]
