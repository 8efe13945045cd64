"""`reknit.prepare` does the work of a first save ahead, so that this blocks no longer than later saves."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.api import checks, ranks
from reknit.engine.memory.arena_pool import Arenas
from reknit.processes.shared_memory import SharedMemory
from reknit.storage.registry import register
from reknit.testing.world import run_ranks
from tests.engine.watched import Watched
from tests.faults.nursery import agents_of, wait_until
from tests.resources import mapped, open_files, threads
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.engine.background.background import Background
    from reknit.engine.background.session import AgentSession

LIMIT_S = 60.0
MIB = 1 << 20


def shut(url: str, durability: str) -> ProcessMemory:
    """Open a store; raise an error in agents."""
    if "/only-by-agents" in url and "rank " in threading.current_thread().name:
        return ProcessMemory("prepared")
    raise reknit.StorageError("nobody is in")


register("shut", lambda url, durability: shut(url, durability))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert reknit.close(LIMIT_S)
    ProcessMemory.clear("prepared")


class Broken:
    """An object whose own code fails when it is asked for its state."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> dict[str, Any]:
        raise self._error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self._error


def state_of(rank: int, value: float = 1.0) -> dict[str, Any]:
    """Return a state whose replica sets no framework has given."""
    model = {f"own.{rank}": np.full(40_000, value, np.float32), "all": np.full(5_000, value)}
    return {"model": model, "extra": {"epoch": int(value)}}


def background_of(group: Group | None = None, *, in_process: bool = True) -> Background:
    return checks.backgrounds[group or ranks.alone()][in_process]


def crew_of(group: Group | None = None, *, in_process: bool = True) -> AgentSession:
    agents = background_of(group, in_process=in_process).supervisor.session
    assert agents is not None
    return agents


def phases(pending: reknit.PendingSave) -> list[str]:
    return [record.phase for record in pending.result(LIMIT_S).phases]


def outcome(act: Callable[[], object]) -> tuple[str, str]:
    """Return the type and the message of the error of an act, empty without an error."""
    try:
        act()
    except Exception as error:  # the tests compare its type
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the arenas that are made from now on."""
    sizes: list[int] = []
    create = SharedMemory.create

    def counted(nbytes: int) -> SharedMemory:
        sizes.append(nbytes)
        return create(nbytes)

    monkeypatch.setattr(SharedMemory, "create", counted)
    return sizes


def test_the_first_save_after_it_plans_nothing_makes_no_memory_and_waits_for_no_rank(made: list[int]) -> None:
    others_may, reported = threading.Event(), {}

    def rank(group: Group) -> None:
        state = state_of(group.rank)
        reknit.prepare("process://prepared", state, group=group)
        sizes = len(made)
        if group.rank != 1:
            assert others_may.wait(LIMIT_S)
        with Watched() as seen:
            pending = reknit.save("process://prepared/1", state, wait=False, group=group)
        others_may.set()
        assert "assign" not in phases(pending)
        assert len(made) == sizes == 3
        reported[group.rank] = seen

    run_ranks(3, rank)
    for seen in reported.values():
        assert seen.agreed == seen.planned == set()
        assert set(seen.said) == {"Begin", "Planned", "Filled"}
    with reknit.open("process://prepared/1") as checkpoint:
        assert checkpoint.read("model", "own.2").tolist() == [1.0] * 40_000
    assert reknit.verify("process://prepared/1", "data").ok


def test_it_writes_nothing_and_keeps_nothing_of_the_state(tmp_path: Path) -> None:
    state = state_of(0)
    reknit.prepare(tmp_path / "run" / "step_1", state)
    reknit.prepare("process://prepared/here", state)
    assert list(tmp_path.iterdir()) == []
    assert list(ProcessMemory("prepared").list()) == []
    for value in state["model"].values():
        value[:] = 7
    state["extra"]["epoch"] = 7
    reknit.save(tmp_path / "run" / "step_1", state, wait=False).result(LIMIT_S)
    target = state_of(0, 0.0)
    reknit.load(tmp_path / "run" / "step_1", target)
    assert target["model"]["own.0"].tolist() == [7.0] * 40_000
    assert target["extra"] == {"epoch": 7}


@pytest.mark.parametrize(
    ("nbytes", "sizes"), [(10 * MIB, [12 * MIB]), (40 * MIB, [42 * MIB]), (160 * MIB, [64 * MIB])]
)
def test_as_much_memory_is_made_as_the_budget_allows(made: list[int], nbytes: int, sizes: list[int]) -> None:
    options = reknit.SaveOptions(host_nbytes=64 * MIB)
    state = {"model": {"w": np.arange(nbytes, dtype=np.uint8)}}
    reknit.prepare("process://prepared", state, options=options)
    assert made == sizes
    assert crew_of().arenas == {1}, "the agent maps it already"
    for k in range(2):
        report = reknit.save(f"process://prepared/{k}", state, wait=False, options=options).result(LIMIT_S)
        assert report.streamed is (nbytes > 64 * MIB)
        with reknit.open(f"process://prepared/{k}") as checkpoint:
            assert np.array_equal(checkpoint.read("model", "w"), state["model"]["w"])
    assert made == sizes


def test_a_state_that_has_another_layout_at_the_save_is_planned_anew_in_larger_memory(
    made: list[int],
) -> None:
    def rank(group: Group) -> list[list[str]]:
        small = {"model": {f"own.{group.rank}": np.ones(9)}}
        reknit.prepare("process://prepared", small, group=group)
        reported = []
        for k in range(4):
            state = {"model": {f"own.{group.rank}": np.full(MIB, k, np.float64)}}
            reported.append(phases(reknit.save(f"process://prepared/{k}", state, wait=False, group=group)))
        reported.append(phases(reknit.save("process://prepared/small", small, wait=False, group=group)))
        return [[phase for phase in names if phase == "assign"] for names in reported]

    assert run_ranks(2, rank) == [[["assign"], [], [], [], []]] * 2
    assert sorted(made) == [2 * MIB] * 2 + [10 * MIB] * 2
    with reknit.open("process://prepared/3") as checkpoint:
        assert checkpoint.read("model", "own.1")[-1] == 3
    assert reknit.verify("process://prepared/small", "data").ok


def test_without_a_state_agents_are_started_and_no_memory_is_taken(made: list[int], tmp_path: Path) -> None:
    def rank(group: Group) -> None:
        reknit.prepare(tmp_path, group=group)
        agent = crew_of(group, in_process=False).link
        assert agent.pid in agents_of(os.getpid())
        reknit.save(tmp_path / "1", state_of(group.rank), wait=False, group=group).result(LIMIT_S)
        assert crew_of(group, in_process=False).link is agent

    reknit.prepare(tmp_path)
    assert made == []
    run_ranks(2, rank)


def _bad_value(group: Group) -> dict[str, Any]:
    return {**state_of(group.rank), "odd": {"value": threading.Lock()}}


def _no_mapping(group: Group) -> Any:
    return [1, 2]


@pytest.mark.parametrize(
    ("broken", "error", "says"),
    [
        (_bad_value, "StateError", "odd/value"),
        (_no_mapping, "UsageError", "state is a mapping of items, not a list"),
    ],
)
def test_what_cannot_be_saved_on_one_rank_is_told_on_all_and_the_next_call_is_well(
    broken: Callable[[Group], Any], error: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(group: Group) -> tuple[str, str]:
        wrong = broken(group) if group.rank == 1 else state_of(group.rank)
        reported = outcome(lambda: reknit.prepare("process://prepared", wrong, group=group))
        for k in range(2):
            reknit.save(f"process://prepared/{k}", state_of(group.rank), wait=False, group=group).result(
                LIMIT_S
            )
        return reported

    caplog.set_level(logging.WARNING, "reknit")
    first, *others = run_ranks(3, rank)
    assert others == [first, first]
    assert first[0] == error
    assert says in first[1]
    assert "rank 1" in first[1]
    assert caplog.records == [], "an exception needs no line in the log"


@pytest.mark.parametrize("failure", [ValueError("not now"), KeyboardInterrupt()])
def test_an_exception_of_the_users_own_code_is_raised_there_and_described_elsewhere(
    failure: BaseException,
) -> None:
    def rank(group: Group) -> str:
        state = state_of(group.rank)
        wrong = {**state, "mine": Broken(failure)} if group.rank == 0 else state
        with pytest.raises(type(failure) if group.rank == 0 else reknit.ReknitError) as caught:
            reknit.prepare("process://prepared", wrong, group=group)
        reknit.save("process://prepared/1", state, wait=False, group=group).result(LIMIT_S)
        return str(caught.value)

    _, second = run_ranks(2, rank)
    assert type(failure).__name__ in second
    assert "rank 0" in second


@pytest.mark.parametrize("path", ["shut://x", "shut://x/only-by-agents"])
def test_a_store_that_does_not_open_is_told_on_all(path: str) -> None:
    def rank(group: Group) -> tuple[str, str]:
        return outcome(lambda: reknit.prepare(path, state_of(group.rank), group=group))

    for error, message in run_ranks(2, rank):
        assert error == "StorageError"
        assert "nobody is in" in message


def test_memory_that_one_rank_cannot_have_is_told_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = Arenas.acquire

    def scarce(self: Arenas, nbytes: int, timeout_s: float) -> Any:
        if threading.current_thread().name == "rank 1":
            raise MemoryError("no room for 12345 bytes")
        return acquire(self, nbytes, timeout_s)

    monkeypatch.setattr(Arenas, "acquire", scarce)

    def rank(group: Group) -> str:
        with pytest.raises(reknit.errors.ShortageError, match="rank 1") as caught:
            reknit.prepare("process://prepared", state_of(group.rank), group=group)
        monkeypatch.setattr(Arenas, "acquire", acquire)
        reknit.save("process://prepared/1", state_of(group.rank), wait=False, group=group).result(LIMIT_S)
        return str(caught.value)

    for reported in run_ranks(2, rank):
        assert "no room for 12345 bytes" in reported


def test_errors_only_warn_when_the_options_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reknit")
    options = reknit.SaveOptions(on_error="warn")
    reknit.prepare("shut://prepared", state_of(0), options=options)
    (record,) = caplog.records
    assert "could not prepare for saves to shut://prepared: nobody is in" in record.getMessage()
    with pytest.raises(reknit.errors.StateError):
        reknit.prepare("process://prepared", {"odd": {"value": threading.Lock()}}, options=options)
    reknit.save("process://prepared/1", state_of(0), wait=False, options=options).result(LIMIT_S)


@pytest.mark.parametrize("well", [True, False])
def test_when_all_is_closed_nothing_of_it_is_left(tmp_path: Path, well: bool) -> None:
    others = set(agents_of(os.getpid()))  # of groups that other tests have left

    def mine() -> set[int]:
        return set(agents_of(os.getpid())) - others

    def turn() -> None:
        state = state_of(0) if well else {**state_of(0), "odd": {"value": threading.Lock()}}
        reported = outcome(lambda: reknit.prepare(tmp_path, state))
        assert (reported[0] == "") is well
        wait_until(lambda: len(mine()) == 1, LIMIT_S)  # /proc shows its arguments a moment late
        assert reknit.close(LIMIT_S)

    reknit.close(LIMIT_S)
    turn()  # modules that are loaded once stay
    wait_until(lambda: not mine(), LIMIT_S)
    files, running, arenas = open_files(), threads(), set(mapped())

    def left() -> list[object]:
        return [*(open_files() - files), *(threads() - running), *(set(mapped()) - arenas), *mine()]

    for _ in range(3):
        turn()
    wait_until(lambda: not left(), LIMIT_S, lambda: f"{left()} is left")
