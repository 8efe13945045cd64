"""Ranks that fail, die, are interrupted or do something else: real processes, a real tree, a real disk.

No test here asserts a time, but every wait has a deadline far beyond that of the run.  So a rank that waits
for a missing rank makes the run fail.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultyStorage
from tests.faults.trainers import Held, at_rest
from tests.ranks import Died, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAVE = reknit.SaveOptions(durability="process", threads=2, timeout_s=100)
LOAD = reknit.LoadOptions(threads=2, timeout_s=100)
RUN_S = 50.0
Answer = dict[str, Any]


def state(value: int, rank: int | None = None) -> dict[str, Any]:
    """Return a tensor of each rank's own, one that all have, and values."""
    rank = dist.get_rank() if rank is None else rank
    model = {f"own.{rank}": np.full((64, 32), value + rank, np.float32), "all": np.full(9, value)}
    return {"model": model, "extra": {"epoch": value, "mine": reknit.PerRank([value, rank])}}


def attempt(action: Callable[[], Any]) -> Answer:
    """Do something, and return its result or its error."""
    try:
        return {"type": "ok", "answer": action()}
    except reknit.ReknitError as error:
        return {**error.to_wire(), "comm": isinstance(error, reknit.CommError)}
    except BaseException as error:  # an interrupt is an answer, too
        return {"type": type(error).__name__, "message": str(error)}


def saved(path: str, value: int, **more: Any) -> list[str]:
    """Save, and return the warnings."""
    report = reknit.save(path, state(value), options=SAVE, **more).result()
    return list(report.warnings)


PLAN: list[Fault] = []
"""The faults of this process for paths that begin with ``faulty://``."""


def faulty(stall: Callable[[], object] = os.getpid) -> None:
    """Register ``faulty://`` on this rank, with the faults of `PLAN`."""

    def factory(url: str, durability: Any) -> FaultyStorage:
        inner = LocalStorage(url.removeprefix("faulty://"), durability=durability)
        return FaultyStorage(inner, plan=list(PLAN), stall=stall)

    register("faulty", factory)


def files(path: Path | str) -> dict[str, bytes]:
    """Return every file below a path, hidden ones included."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            with open(full, "rb") as file:
                found[os.path.relpath(full, path)] = file.read()
    return found


def found(path: Path | str, world: int) -> int:
    """Return the value in a checkpoint of `world` ranks, which is whole."""
    report = reknit.verify(path, "data")
    assert report.ok, report.problems
    value = reknit.open(path).values["extra"]["epoch"]
    target: dict[str, Any] = {"model": {"all": np.zeros(9, int)}}
    for rank in range(world):
        target["model"][f"own.{rank}"] = np.zeros((64, 32), np.float32)
    reknit.load(path, target)
    for rank in range(world):
        assert (target["model"][f"own.{rank}"] == value + rank).all()
    assert (target["model"]["all"] == value).all()
    assert isinstance(value, int)
    return value


def place(answer: Answer) -> tuple[Any, ...]:
    return answer["type"], answer["message"], answer["rank"], answer["phase"], answer["path"]


# A rank that fails.

FAULTS = [
    (kind, rank, operation)
    for kind in ("error", "full", "short", "lost")
    for rank, operation in ((0, "write"), (1, "create"), (1, "finish"), (2, "write"))
]


def fail_in_turn(root: str) -> list[Answer]:
    faulty()
    answers = []
    for number, (kind, rank, operation) in enumerate(FAULTS):
        PLAN[:] = [Fault(kind, 1, operation)] if rank == dist.get_rank() else []  # type: ignore[arg-type]
        answers.append(attempt(lambda path=f"faulty://{root}/{number}": saved(path, 1)))  # type: ignore[misc]
    PLAN.clear()
    return [*answers, attempt(lambda: saved(f"{root}/last", 1))]


def test_storage_that_fails_on_one_rank_is_the_same_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    answers = run(3, fail_in_turn, str(tmp_path), timeout=RUN_S)
    for number, (kind, rank, operation) in enumerate(FAULTS):
        each = [place(answer[number]) for answer in answers]
        assert each[0] == each[1] == each[2]
        name, message, at, phase, path = each[0]
        assert name == ("StorageFullError" if kind == "full" else "StorageError")
        assert (at, phase) == (rank, "write")
        assert f"/0000{rank}." in path
        assert operation in message
        left = files(tmp_path / str(number))
        # A save must not delete a file that it may not have created; the next save here does so.
        assert left == {} or (kind, operation) == ("lost", "create"), left
        assert not any(any(data) for data in left.values())
    assert [answer[-1] for answer in answers] == [{"type": "ok", "answer": []}] * 3
    assert found(tmp_path / "last", 3) == 1
    assert reknit.latest(tmp_path) == str(tmp_path / "last")


class Raises:
    """A stateful object whose `state_dict` fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self.error


FOREIGN = (ValueError("no state today"), KeyboardInterrupt(), SystemExit(3), RecursionError("deep"))


def raise_in_state_dict(root: str) -> list[Answer]:
    answers = []
    for error in FOREIGN:
        more = {"odd": Raises(error)} if dist.get_rank() == 1 else {}
        answers.append(attempt(lambda more=more: reknit.save(f"{root}/a", state(1) | more, options=SAVE)))  # type: ignore[misc]
    return [*answers, attempt(lambda: saved(f"{root}/b", 2))]


def test_an_exception_of_an_object_is_one_error_on_all_ranks_and_an_interrupt_is_raised_where_it_began(
    tmp_path: Path,
) -> None:
    answers = run(3, raise_in_state_dict, str(tmp_path), timeout=RUN_S)
    for number, error in enumerate(FOREIGN):
        is_own = isinstance(error, Exception)
        if not is_own:
            assert answers[1][number] == {"type": type(error).__name__, "message": str(error)}
        kind, phase = ("StateError", "collect") if is_own else ("ReknitError", "assign")
        for rank in (0, 1, 2) if is_own else (0, 2):
            reported = answers[rank][number]
            assert (reported["type"], reported["rank"], reported["phase"]) == (kind, 1, phase)
            assert type(error).__name__ in reported["message"]
    assert [answer[-1]["type"] for answer in answers] == ["ok"] * 3
    assert files(tmp_path / "a") == {}
    assert found(tmp_path / "b", 3) == 2


def stumble(root: str) -> list[Answer]:
    """Call with arguments that are wrong on rank 1 only."""
    odd = dist.get_rank() == 1
    path, wrong = f"{root}/a", cast("Any", [1, 2])
    return [
        attempt(lambda: reknit.save(path, wrong if odd else state(1), options=SAVE)),
        attempt(lambda: reknit.save("nosuch://x" if odd else path, state(1), options=SAVE)),
        attempt(lambda: reknit.save(path, state(1), step=-1 if odd else 1, options=SAVE)),
        attempt(lambda: reknit.load(path, wrong if odd else state(1), options=LOAD)),
        attempt(lambda: reknit.load(path, state(1), items=["lost"] if odd else None, options=LOAD)),
        attempt(lambda: saved(path, 1)),
    ]


def test_a_wrong_argument_on_one_rank_is_an_error_on_all_at_once(tmp_path: Path) -> None:
    answers = run(2, stumble, str(tmp_path), timeout=RUN_S)
    for mine, theirs in zip(*answers, strict=True):
        assert mine == theirs
    kinds = [answer["type"] for answer in answers[0]]
    assert kinds == ["UsageError", "UnknownSchemeError", *["UsageError"] * 3, "ok"]
    assert {answer["rank"] for answer in answers[0][:-1]} == {1}


# A rank that dies or is interrupted.


def die_at(root: str, rank: int, at: int, operation: str) -> Answer:
    faulty()
    saved(f"{root}/x", 1)
    PLAN[:] = [Fault("kill", at, operation)] if dist.get_rank() == rank else []
    return attempt(lambda: saved(f"faulty://{root}/x", 2, overwrite=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_it_writes_fails_the_others_and_keeps_the_old_checkpoint(
    tmp_path: Path, rank: int
) -> None:
    answers = run(3, die_at, str(tmp_path), rank, 2, "write", timeout=RUN_S, some_die=True)
    assert answers.pop(rank) == Died(-signal.SIGKILL)
    assert all(answer["comm"] for answer in answers), answers
    assert found(tmp_path / "x", 3) == 1


def test_the_root_killed_before_its_last_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    answers = run(3, die_at, str(tmp_path), 0, 1, "commit", timeout=RUN_S, some_die=True)
    assert answers.pop(0) == Died(-signal.SIGKILL)
    assert all(answer["comm"] for answer in answers), answers
    assert found(tmp_path / "x", 3) == 1


def test_the_root_killed_after_its_last_write_leaves_the_new_checkpoint_and_the_others_know(
    tmp_path: Path,
) -> None:
    # The listing of old files comes after the manifest, and two other listings come before it.
    answers = run(3, die_at, str(tmp_path), 0, 3, "list", timeout=RUN_S, some_die=True)
    assert answers.pop(0) == Died(-signal.SIGKILL)
    assert [answer["type"] for answer in answers] == ["ok", "ok"], answers
    assert all("committed" in answer["answer"][0] for answer in answers)
    assert found(tmp_path / "x", 3) == 2


def interrupt_while_writing(root: str, number: int) -> Answer:
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    faulty(stall=lambda: os.kill(os.getpid(), number))
    if dist.get_rank() == 1:
        PLAN[:] = [Fault("stall", 2, "write")]
    return attempt(lambda: saved(f"faulty://{root}/x", 1))


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")]
)
def test_a_rank_interrupted_while_it_writes_tells_the_others_and_leaves_nothing(
    tmp_path: Path, number: int, name: str
) -> None:
    first, interrupted, last = run(3, interrupt_while_writing, str(tmp_path), number, timeout=RUN_S)
    assert interrupted["type"] == name
    assert first == last
    assert (first["type"], first["rank"]) == ("ReknitError", 1)
    assert name in first["message"]
    assert files(tmp_path / "x") == {}


def interrupt_while_waiting(root: str) -> Answer:
    with open(f"{root}/{dist.get_rank()}.pid", "w") as file:
        file.write(str(os.getpid()))

    def interrupt_rank_1() -> None:
        with open(f"{root}/1.pid") as file:
            os.kill(int(file.read()), signal.SIGINT)
        time.sleep(1)

    faulty(stall=interrupt_rank_1)
    dist.barrier()
    if dist.get_rank() == 0:
        PLAN[:] = [Fault("stall", 1, "commit")]
    return attempt(lambda: saved(f"faulty://{root}/x", 1))


def test_a_rank_interrupted_while_the_root_commits_takes_nothing_of_the_checkpoint_away(
    tmp_path: Path,
) -> None:
    answers = run(3, interrupt_while_waiting, str(tmp_path), timeout=RUN_S)
    assert answers[1]["type"] == "KeyboardInterrupt"
    assert answers[0]["type"] == answers[2]["type"] == "ok"
    assert found(tmp_path / "x", 3) == 1


# Ranks that do different things.


def disagree(root: str) -> list[Answer]:
    saved(f"{root}/x", 1)
    rank = dist.get_rank()
    target = state(7)
    load = attempt(lambda: reknit.load(f"{root}/x", target, options=LOAD))
    split = (
        attempt(lambda: reknit.load(f"{root}/x", target, options=LOAD))
        if rank == 1
        else attempt(lambda: saved(f"{root}/y", 1))
    )
    return [load, split, attempt(lambda: saved(f"{root}/z", 3))]


def test_a_rank_that_loads_while_others_save_is_a_protocol_error_on_all(tmp_path: Path) -> None:
    answers = run(3, disagree, str(tmp_path), timeout=RUN_S)
    assert [[a["type"] for a in answer] for answer in answers] == [["ok", "ProtocolError", "ok"]] * 3
    assert files(tmp_path / "y") == {}
    assert found(tmp_path / "z", 3) == 3


def save_in_many_places(root: str) -> list[Answer]:
    rank = dist.get_rank()
    first = attempt(lambda: saved(f"{root}/place-{rank}", 1))
    return [first, attempt(lambda: saved(f"{root}/one", 2))]


def test_ranks_that_save_to_different_folders_commit_nothing(tmp_path: Path) -> None:
    answers = run(3, save_in_many_places, str(tmp_path), timeout=RUN_S)
    assert len({place(answer[0]) for answer in answers}) == 1
    assert answers[0][0]["type"] == "CommitError"
    assert answers[0][0]["rank"] == 1
    assert "place-1" in answers[0][0]["message"]
    for rank in range(3):
        assert files(tmp_path / f"place-{rank}") == {}
    assert found(tmp_path / "one", 3) == 2


def save_twice(root: str) -> list[Any]:
    path = f"{root}/x"
    saved(path, 1)
    dist.barrier()
    before = files(path)
    dist.barrier()
    answer = attempt(lambda: saved(path, 2))
    dist.barrier()
    return [answer, files(path) == before]


def test_saving_twice_to_one_path_is_refused_on_all_ranks_and_touches_nothing(tmp_path: Path) -> None:
    answers = run(3, save_twice, str(tmp_path), timeout=RUN_S)
    assert {place(answer) for answer, _ in answers} == {place(answers[0][0])}
    assert answers[0][0]["type"] == "CheckpointExistsError"
    assert all(same for _, same in answers)
    assert found(tmp_path / "x", 3) == 1


# Loads that fail.


def load_damaged(root: str) -> Any:
    path, rank = f"{root}/x", dist.get_rank()
    saved(path, 1)
    dist.barrier()
    if rank == 0:
        (name,) = (n for n in files(path) if n.startswith("model/00001."))
        with open(f"{path}/{name}", "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"damage")
    dist.barrier()
    mine = {"model": {f"own.{rank}": np.zeros((64, 32), np.float32)}}
    options = reknit.LoadOptions(timeout_s=100)
    return attempt(lambda: reknit.load(path, mine, strict=["!model/all"], options=options))


def test_a_damaged_block_that_one_rank_reads_is_an_error_on_all_that_names_file_and_rank(
    tmp_path: Path,
) -> None:
    first, second = run(2, load_damaged, str(tmp_path), timeout=RUN_S)
    assert first == second
    assert (first["type"], first["rank"], first["phase"]) == ("CorruptError", 1, "verify")
    assert "model/00001." in first["message"]
    assert first["path"].startswith(str(tmp_path))


def load_misfit(root: str) -> Any:
    path, rank = f"{root}/x", dist.get_rank()
    saved(path, 1)
    target = state(7)
    if rank == 1:
        target["model"]["own.1"] = np.full((64, 33), 7, np.float32)
    answer = attempt(lambda: reknit.load(path, target, options=LOAD))
    untouched = all(
        (array == 7 + (rank if name != "all" else 0)).all()
        for name, array in target["model"].items()
        if rank != 1 or name == "all"
    )
    untouched = untouched and target["extra"]["epoch"] == 7 and target["extra"]["mine"].value == [7, rank]
    return answer, untouched


def test_a_mismatch_on_one_rank_is_an_error_on_all_before_anything_changes(tmp_path: Path) -> None:
    answers = run(3, load_misfit, str(tmp_path), timeout=RUN_S)
    assert {place(answer) for answer, _ in answers} == {place(answers[0][0])}
    assert answers[0][0]["type"] == "MismatchError"
    assert "model/own.1" in answers[0][0]["message"]
    assert "(rank 1)" in answers[0][0]["message"]
    assert all(untouched for _, untouched in answers)


# Groups of ranks.


def save_in_a_subgroup(root: str) -> Any:
    group = dist.new_group([0, 2])
    rank = dist.get_rank()
    if rank == 1:
        return attempt(lambda: reknit.save(f"{root}/x", state(1), group=group, options=SAVE))
    same: dict[str, Any] = {"weight": torch.arange(200_000.0), "own": reknit.PerRank(rank)}
    one = reknit.save(f"{root}/x", {"model": same}, group=group, options=SAVE).result()
    target: dict[str, Any] = {"weight": torch.zeros(200_000), "own": reknit.PerRank(-1)}
    reknit.load(f"{root}/x", {"model": target}, group=group, options=LOAD)
    right = torch.equal(target["weight"], same["weight"]) and target["own"].value == rank
    return right, one.warnings, reknit.open(f"{root}/x").manifest.origin["world_size"]


def test_some_ranks_save_and_load_while_the_others_do_nothing(tmp_path: Path) -> None:
    first, outside, last = run(3, save_in_a_subgroup, str(tmp_path), timeout=RUN_S)
    assert first == last == (True, (), 2)
    assert outside["type"] == "UsageError"
    assert reknit.verify(tmp_path / "x", "data").ok


def save_over(root: str, value: int) -> Answer:
    return attempt(lambda: saved(f"{root}/x", value, overwrite=True))


def test_a_checkpoint_may_be_replaced_by_jobs_of_other_sizes(tmp_path: Path) -> None:
    for value, world in enumerate((3, 2, 3)):
        for answer in run(world, save_over, str(tmp_path), value, timeout=RUN_S):
            assert answer == {"type": "ok", "answer": []}
        assert found(tmp_path / "x", world) == value
        left = files(tmp_path / "x")
        # For each rank tensors and own values, the shared values, the index, the manifest.
        assert len(left) == 2 * world + 3, sorted(left)


# Many saves, and the end of a process.


def save_often(root: str, count: int) -> Any:
    before: Held | None = None
    for number in range(count):
        saved(f"{root}/x", number, overwrite=True)
        reknit.load(f"{root}/x", state(-1), options=LOAD)
        if number == 4:
            gc.collect()
            before = at_rest(os.getpid(), None)
    gc.collect()
    return before, at_rest(os.getpid(), before)


def test_thirty_saves_and_loads_leave_threads_and_descriptors_as_they_were(tmp_path: Path) -> None:
    for before, after in run(2, save_often, str(tmp_path), 35, timeout=RUN_S):
        assert after.threads <= before.threads + 4, "an executor may not have had all of its threads yet"
        assert after.descriptors <= before.descriptors
