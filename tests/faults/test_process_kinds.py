"""Saves by every kind of process, in every way, to every kind of store, succeed or are refused at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.nursery import wait_until
from tests.faults.process_kinds import DEADLINE_S, KINDS, OUTLIVE, STORES, stored, whole
from tests.running.examples import is_night

REPOSITORY = Path(__file__).parents[2]
MODULE = "tests.faults.process_kinds"
CASES = [f"{store}-{wait}" for store in STORES for wait in ("wait", "no-wait")]

RARE = (
    "thread",
    "daemonic fork",
    "daemonic spawn",
    "daemonic forkserver",
    "daemonic thread",
    "forkserver",
    "fork after saves",
    "os.fork during saves",
    "pool of fork",
    "at exit after saves",
    "terminated spawn",
    "pool of spawn",
    "os.fork",
    "os.fork after saves",
    "running loop",
    "loop of a thread",
    "handler during collect, no wait",
    "handler during nothing",
    "handler during write",
    "at exit",
)
"""Kinds that differ little from others, and are tried at night only."""

DAY = [(kind, "") for kind in (*KINDS, "python -c") if kind not in RARE]
NIGHT = [(kind, case) for kind in (*KINDS, "python -c") for case in ("", *CASES)]
"""Each case in a process of its own, since the first save of a process does more than later ones."""

KILLED = ("terminated", "pool")
"""Kinds of processes that are killed; their agents go on."""

REFUSALS = {"at exit": "ShortageError", "handler": "UsageError"}
"""The errors by kind of process: no thread starts at exit, and a handler may interrupt another call."""


def ran(folder: Path, kind: str, case: str) -> dict[str, str]:
    """Let a process of a kind make its saves, and return how each ended."""
    command = [sys.executable, "-W", "ignore", "-m", MODULE, kind, str(folder), case]
    if kind == "python -c":
        code = f"from {MODULE} import main; main('main thread', {str(folder)!r}, {case!r})"
        command = [sys.executable, "-W", "ignore", "-c", code]
    with open(folder / "output", "wb") as output:
        subprocess.run(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        )
    return outcomes(folder)


def outcomes(folder: Path) -> dict[str, str]:
    """Return the end of each case in a log, "hangs" for a case without one."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    ended = {}
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "begin":
            ended[rest] = "hangs"
        elif word == "ended":
            name, _, ended_how = rest.partition(" ")
            ended[name] = ended_how
    return ended


def text_of(folder: Path) -> str:
    """Return the output and the stacks of the processes of a kind."""
    files = [folder / "output", *sorted(folder.glob("stacks-*"))]
    return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files)


@pytest.mark.parametrize(("kind", "case"), NIGHT if is_night() else DAY)
def test_what_a_process_of_any_kind_saves_is_found_afterwards_or_refused_at_once(
    tmp_path: Path, kind: str, case: str
) -> None:
    ended = ran(tmp_path, kind, case)
    assert set(ended) == ({case} if case else set(CASES)), text_of(tmp_path)
    refused = next((f"refused {error}: " for part, error in REFUSALS.items() if part in kind), "saved")
    bad = {name: how for name, how in ended.items() if how != "saved" and not how.startswith(refused)}
    for name in (name for name, how in ended.items() if how == "saved"):
        store = name.partition("-")[0]
        if store in OUTLIVE and not found(stored(tmp_path, store, name), name, waits=kind.startswith(KILLED)):
            bad[name] = "is not there afterwards"
    assert not bad, f"{bad}\n{text_of(tmp_path)}"
    stacks = "".join(file.read_text() for file in tmp_path.glob("stacks-*"))
    assert not stacks, f"the process hangs at its end\n{stacks}"


def found(url: str, name: str, *, waits: bool) -> bool:
    """Return whether a checkpoint is there and whole; the agent of a killed process may still write it."""
    if waits:
        wait_until(lambda: whole(url, name), DEADLINE_S, lambda: f"{name} is not there afterwards")
    return whole(url, name)
