"""A shortage of memory, threads or open files raises an error of its own, and never ends the process."""

from __future__ import annotations

import errno
import faulthandler
import os
import shutil
import signal
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from tests import ranks, sandbox
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
LIMIT_S = 40

LIMITS: dict[str, Callable[[int], None]] = {
    "memory": sandbox.leave_memory,
    "threads": sandbox.leave_threads,
    "files": sandbox.leave_files,
}
FEW = {"memory": [0, 4 * MIB, 18 * MIB, 32 * MIB], "threads": [0, 1, 2, 3], "files": [0, 1, 3]}
MANY = {"memory": [n * MIB for n in range(100)], "threads": list(range(12)), "files": list(range(12))}

NUM_TENSORS = 600
"""Tensors of a checkpoint whose index is large enough to be read by several threads, and to take memory."""


def state(value: float) -> dict[str, Any]:
    weights = {f"layers.{n}.weight": np.full((3, 7), value, np.float32) for n in range(NUM_TENSORS)}
    return {
        "model": {**weights, "large": np.full(5 * MIB, value, np.float32)},
        "extra": {"epoch": int(value)},
    }


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a folder that every user may write to, with a checkpoint in it."""
    made = Path(tempfile.mkdtemp(prefix="reknit-limits-"))
    reknit.save(made / "sound", state(1.0))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def actions(folder: Path) -> dict[str, Callable[[], object]]:
    sound, target = folder / "sound", state(2.0)

    def verify() -> None:
        assert reknit.verify(sound, "data").ok

    return {
        "load": lambda: reknit.load(sound, target),
        "verify": verify,
        "save": lambda: reknit.save(folder / f"{os.getpid()}", target),
    }


def outcomes(folder: str, kind: str, amounts: list[int]) -> list[tuple[str, int, str]]:
    """Return the outcome of each action under each limit, each in a process of its own."""
    doing = actions(Path(folder))
    for action in doing.values():
        action()  # so that late imports are done before the limit
    found = []
    for name, action in doing.items():
        for amount in amounts:
            found.append((name, amount, outcome(action, LIMITS[kind], amount)))
    return found


def outcome(action: Callable[[], object], limit: Callable[[int], None], amount: int) -> str:
    """Return the outcome of an action in a process with this limit: a type of error, nothing, or a signal."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(LIMIT_S)  # a watchdog thread would be lost in the fork, and count
        reported = b"nothing"
        try:
            limit(amount)
            action()
        except reknit.ReknitError as error:
            reported = type(error).__name__.encode()
        except BaseException:  # of any type: the test receives it
            reported = traceback.format_exc().encode()
        os.write(sink, reported)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said if status == 0 else f"ended with {status}"


@pytest.mark.parametrize("kind", list(LIMITS))
def test_a_limit_is_told_as_such_and_not_as_damage(folder: Path, kind: str) -> None:
    if kind == "threads" and os.geteuid() != 0:
        pytest.skip("only root can become somebody who has no other processes")
    amounts = (MANY if is_night() else FEW)[kind]
    (found,) = ranks.run(
        1, outcomes, str(folder), kind, amounts, joined=False, timeout=300 + 5 * len(amounts)
    )
    assert {reported for *_, reported in found} <= {"nothing", "ShortageError"}, found
    for name in ("load", "verify", "save"):
        reported = [one for action, _, one in found if action == name]
        assert reported[0] == "ShortageError", found
    assert [reported for *_, reported in found].count("nothing"), found
    assert reknit.verify(folder / "sound", "data").ok


def without_threads(folder: str) -> list[str]:
    sandbox.refuse({"clone": errno.EAGAIN, "clone3": errno.ENOSYS})
    doing = actions(Path(folder))
    doing["save in the background"] = lambda: reknit.save(Path(folder) / "b", state(3.0), wait=False).result(
        30
    )
    reported = []
    for action in doing.values():
        with pytest.raises(reknit.errors.ShortageError) as caught:
            action()
        reported.append(str(caught.value))
    return reported


@pytest.mark.skipif(
    not sandbox.KNOWN, reason="the calls of this machine have numbers that are not known here"
)
def test_a_process_without_any_further_thread_is_told_what_to_do(folder: Path) -> None:
    (reported,) = ranks.run(1, without_threads, str(folder), joined=False)
    assert all("thread or process" in one and "ulimit -u" in one for one in reported), reported


def with_little_on_rank_1(folder: str) -> list[str]:
    path, target = Path(folder, "sound"), state(2.0)
    options = reknit.LoadOptions(timeout_s=LIMIT_S)
    reknit.load(path, target, options=options)
    if os.environ["RANK"] == "1":
        sandbox.leave_memory(2 * MIB)  # less than a thread takes, or a block of a file
    reported = []
    for action in (
        lambda: reknit.load(path, target, options=options),
        lambda: reknit.save(Path(folder, "both"), target, options=reknit.SaveOptions(timeout_s=LIMIT_S)),
    ):
        with pytest.raises(reknit.errors.ShortageError) as caught:
            action()
        reported.append(str(caught.value))
    return reported


def test_too_little_memory_on_one_rank_is_the_same_error_on_all(folder: Path) -> None:
    first, second = ranks.run(2, with_little_on_rank_1, str(folder))
    assert first == second
    assert all("rank 1" in one for one in first), first
