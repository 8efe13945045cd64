"""Saves that go on to a second store, through the public door: outcomes, failures, order, ends."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.engine.background import lanes
from reknit.engine.background.agent_save import AgentSave
from reknit.engine.background.session import AgentSession
from reknit.errors import UnknownSchemeError
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultKind
from reknit.testing.world import run_ranks
from tests.faults.nursery import agents_of, wait_until
from tests.storage.killpoint import faulty_url, register_faulty
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reknit.comm.group import Group

LIMIT_S = 60.0
NUMEL = 300_000

register_faulty()


class Strikes:
    """The faults of a store in memory: a test sets `opening` or `closing` to a function that may raise."""

    opening: Any = None
    closing: Any = None


class Striking(ProcessMemory):
    """A store in the memory of this process, for which agents are threads."""

    def close(self) -> None:
        if Strikes.closing is not None:
            Strikes.closing()


def open_striking(url: str) -> ProcessMemory:
    if Strikes.opening is not None:
        Strikes.opening()
    return Striking("striking").sub(url.removeprefix("striking://"))


register("striking", lambda url, durability: open_striking(url))


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    yield
    Strikes.opening = Strikes.closing = None
    (tmp_path / "gate").touch()
    ProcessMemory.clear("striking")


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    """Let one agent serve most tests of this module."""
    yield
    assert reknit.close(LIMIT_S)


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"w": np.arange(NUMEL, dtype=np.float32) + value}, "extra": {"epoch": int(value)}}


def options(to: object, **more: Any) -> reknit.SaveOptions:
    return reknit.SaveOptions(**{"promote_to": to, "durability": "process", "timeout_s": LIMIT_S, **more})


def save(path: object, to: object, value: float = 1.0, **more: Any) -> reknit.PendingSave:
    saving = {name: more.pop(name) for name in ("wait", "overwrite", "group", "step") if name in more}
    return reknit.save(str(path), state(value), options=options(to, **more), **{"wait": False, **saving})


def slow(tmp_path: Path, name: str) -> str:
    """Return a folder in which nothing is finished until there is a gate."""
    return faulty_url(tmp_path / name, Fault("stall", 1, "finish"), gate=tmp_path / "gate")


def failing(tmp_path: Path, name: str, kind: FaultKind = "full") -> str:
    return faulty_url(tmp_path / name, Fault(kind, 1, "create"))


def value_at(path: object, **loading: Any) -> float | None:
    """Return the value of a checkpoint after a full check, None without a checkpoint."""
    try:
        assert reknit.verify(str(path), "data").ok or loading
    except reknit.CheckpointNotFoundError:
        if not loading:
            return None
    target: dict[str, Any] = {"model": {"w": np.zeros(NUMEL, np.float32)}, "extra": {"epoch": 0}}
    reknit.load(str(path), target, options=reknit.LoadOptions(**loading))
    value = float(target["extra"]["epoch"])
    assert np.array_equal(target["model"]["w"], state(value)["model"]["w"])
    return value


def names(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# Outcomes.


def test_a_checkpoint_is_in_both_stores_and_report_and_events_say_so(tmp_path: Path) -> None:
    for wait in (True, False):
        a, b, events = (tmp_path / f"{wait}" / name for name in ("a", "b", "events.jsonl"))
        pending = save(a, b, wait=wait, step=4, events=str(events))
        report = pending.result(LIMIT_S)
        reported = pending.promoted(LIMIT_S)
        assert (reported.path, reported.source, reported.step) == (str(b), str(a), 4)
        assert reported.write_id == report.write_id, wait
        assert (reported.nbytes, reported.num_files) == (report.total_nbytes, report.num_files + 1), wait
        assert {"claim", "promoted"} <= {record.phase for record in reported.phases}, wait
        assert {record.action for record in reported.phases} == {"promote"}, wait
        assert names(a) == names(b), wait
        assert all((a / name).read_bytes() == (b / name).read_bytes() for name in names(a)), wait
        assert value_at(b) == 1, wait
        assert pending.promotion_done(), wait
        assert pending.promotion_error is None, wait
        assert reknit.sinks.flush(LIMIT_S), wait
        records = [json.loads(line) for line in events.read_text().splitlines()]
        of_target = [each for each in records if each["action"] == "promote" and each["path"] == str(b)]
        assert any("phase" in each for each in of_target), wait
        assert {"create", "write", "commit"} <= {each.get("operation") for each in of_target}, wait


def test_stores_that_only_this_process_has_are_promoted_by_its_threads(tmp_path: Path) -> None:
    for kinds in ("striking://a folder", "folder striking://b", "striking://a striking://b"):
        folder = tmp_path / kinds.replace("/", "")
        folder.mkdir()
        a, b = (str(folder / str(n)) if kind == "folder" else kind for n, kind in enumerate(kinds.split()))
        before = set(agents_of(os.getpid()))
        ProcessMemory.clear("striking")
        save(a, b).promoted(LIMIT_S)
        assert set(agents_of(os.getpid())) <= before, kinds
        assert (value_at(a), value_at(b)) == (1, 1), kinds


def test_a_state_of_values_alone_is_promoted_too(tmp_path: Path) -> None:
    reported = reknit.save(
        tmp_path / "a", {"extra": {"epoch": 3}}, wait=False, options=options(tmp_path / "b")
    ).promoted(LIMIT_S)
    assert reported.num_files == 2
    target = {"extra": {"epoch": 0}}
    reknit.load(tmp_path / "b", target)
    assert target == {"extra": {"epoch": 3}}


def test_a_rehearsal_promotes_nothing_and_the_save_after_it_does(tmp_path: Path) -> None:
    reknit.prepare(tmp_path / "a", state(), options=options(tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    save(tmp_path / "a", tmp_path / "b").promoted(LIMIT_S)
    assert value_at(tmp_path / "b") == 1


# Calls that are wrong from the start.


def test_a_target_that_can_be_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    here = [f"{tmp_path}/a", f"file://{tmp_path}/a", f"{tmp_path}/b/../a", f"{tmp_path}/a/"]
    for to, wait in itertools.product([*here, "nowhere://b"], (True, False)):
        kind, said = (reknit.UsageError, "where it is") if to in here else (UnknownSchemeError, "nowhere")
        with pytest.raises(kind, match=said):
            save(tmp_path / "a", to, wait=wait, on_error="warn").result(LIMIT_S)
        assert not (tmp_path / "a").exists(), to


def test_who_asked_for_no_promotion_cannot_wait_for_one(tmp_path: Path) -> None:
    for wait in (True, False):
        folder = tmp_path / f"{wait}"
        folder.mkdir()
        pending = save(folder / "a", None, wait=wait)
        with pytest.raises(reknit.UsageError, match="not asked"):
            pending.promoted(LIMIT_S)
        pending.result(LIMIT_S)
        assert pending.promotion_done(), wait
        assert pending.promotion_error is None, wait


# Failures on the way.


def test_a_promotion_that_fails_is_raised_to_who_asks_and_the_save_stays_good(tmp_path: Path) -> None:
    pending = save(tmp_path / "a", failing(tmp_path, "b"))
    pending.result(LIMIT_S)
    with pytest.raises(reknit.errors.StorageFullError) as raised:
        pending.promoted(LIMIT_S)
    assert raised.value.rank == 0
    assert value_at(tmp_path / "a") == 1
    assert value_at(tmp_path / "b") is None
    assert names(tmp_path / "b") == set()
    # The next promotion does not raise the same failure again.
    save(tmp_path / "next", tmp_path / "c", 2).promoted(LIMIT_S)
    reknit.promote(tmp_path / "a", tmp_path / "b")
    assert value_at(tmp_path / "b") == 1


def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pending = save(tmp_path / "a", failing(tmp_path, "b"))
    pending.wait_promoted(LIMIT_S)
    pending.result()  # the result of the save alone
    with pytest.raises(reknit.errors.StorageFullError):
        save(tmp_path / "c", None, wait=False)
    (reported,) = [record for record in caplog.records if "promotion of" in record.message]
    assert reported.levelno == logging.ERROR
    assert str(tmp_path / "b") in reported.message
    assert reknit.close(LIMIT_S)  # close waits for the save
    assert value_at(tmp_path / "c") == 1


def test_with_on_error_warn_the_failure_of_a_promotion_is_logged_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "a", failing(tmp_path, "b"), on_error="warn").wait_promoted(LIMIT_S)
    save(tmp_path / "c", None, on_error="warn").result(LIMIT_S)
    save(tmp_path / "d", None).result(LIMIT_S)
    assert [record.levelno for record in caplog.records if "promotion of" in record.message] == [
        logging.ERROR
    ]


def test_a_promotion_that_fails_in_a_save_that_waits_leaves_the_checkpoint_where_it_is(
    tmp_path: Path,
) -> None:
    with pytest.raises(reknit.errors.StorageFullError):
        save(tmp_path / "a", failing(tmp_path, "b"), wait=True)
    assert value_at(tmp_path / "a") == 1
    assert names(tmp_path / "b") == set()


def test_a_save_that_fails_ends_its_promotion_with_the_same_error(tmp_path: Path) -> None:
    pending = save(failing(tmp_path, "a"), tmp_path / "b")
    with pytest.raises(reknit.errors.StorageFullError) as raised:
        pending.promoted(LIMIT_S)
    assert pending.error is raised.value
    assert not (tmp_path / "b").exists()
    with pytest.raises(reknit.errors.StorageFullError):
        pending.result(LIMIT_S)
    save(tmp_path / "c", None).result(LIMIT_S)


def test_a_checkpoint_at_the_target_is_not_replaced_unasked_and_nothing_is_saved(tmp_path: Path) -> None:
    for wait in (True, False):
        folder = tmp_path / f"{wait}"
        folder.mkdir()
        save(folder / "b", None, 7, wait=True)
        with pytest.raises(reknit.CheckpointExistsError):
            save(folder / "a", folder / "b", wait=wait).promoted(LIMIT_S)
        assert (value_at(folder / "a"), value_at(folder / "b")) == (None, 7), wait
        save(folder / "a", folder / "b", wait=wait, overwrite=True).promoted(LIMIT_S)
        assert (value_at(folder / "a"), value_at(folder / "b")) == (1, 1), wait


def test_a_checkpoint_that_came_to_the_target_meanwhile_stays(tmp_path: Path) -> None:
    pending = save(slow(tmp_path, "a"), tmp_path / "b")
    pending.staged(LIMIT_S)
    save(tmp_path / "b", None, 7, wait=True)
    (tmp_path / "gate").touch()
    with pytest.raises(reknit.CheckpointExistsError):
        pending.promoted(LIMIT_S)
    assert (value_at(tmp_path / "a"), value_at(tmp_path / "b")) == (1, 7)


def in_thread(name: str, strike: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls `strike` in one thread only."""

    def strikes() -> None:
        if threading.current_thread().name == name:
            strike()

    return strikes


def fail() -> None:
    raise ZeroDivisionError("struck")


def test_a_store_that_one_rank_cannot_open_fails_the_promotion_on_all_at_once(tmp_path: Path) -> None:
    met = threading.Event()

    def strike() -> None:
        if not met.is_set():
            met.set()
            fail()

    def rank(group: Group) -> list[str]:
        Strikes.opening = in_thread("reknit-agent-promote", strike)
        reported = []
        for step in range(2):
            pending = save(f"striking://a{step}", f"striking://b{step}", group=group)
            pending.result(LIMIT_S)
            try:
                pending.promoted(LIMIT_S / 2)
                reported.append("promoted")
            except reknit.ReknitError as error:
                reported.append(f"{type(error).__name__} {error.message}")
        return reported

    expected = ["ReknitError ZeroDivisionError: struck", "promoted"]
    assert run_ranks(2, rank) == [expected, expected]


def test_a_store_that_cannot_be_closed_takes_nothing_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Strikes.closing = in_thread("reknit-agent-promote", fail)
    save("striking://a", "striking://b").promoted(LIMIT_S)
    assert value_at("striking://b") == 1
    assert reknit.close(LIMIT_S)
    assert [record.message for record in caplog.records if "could not be closed" in record.message]


def test_where_agents_cannot_meet_once_more_promotions_fail_and_saves_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def strike(group: Group, *_: object) -> Any:
        asked.append(group.rank)
        raise OSError("no more ports")

    monkeypatch.setattr(lanes, "side_group", strike)

    def rank(group: Group) -> list[int | None]:
        reported = []
        for step in range(2):
            pending = save(f"striking://a{step}", f"striking://b{step}", group=group)
            pending.result(LIMIT_S)
            with pytest.raises(reknit.ReknitError, match="no more ports") as raised:
                pending.promoted(LIMIT_S)
            reported.append(raised.value.rank)
        return reported

    assert run_ranks(2, rank) == [[0, 0], [1, 1]]
    assert sorted(asked) == [0, 1], "who tried again alone would be out of step with the others' saves"


def test_several_ranks_promote_together_in_the_background(tmp_path: Path) -> None:
    def rank(group: Group) -> int:
        held = {"model": {f"w{group.rank}": np.full(5, group.rank)}, "extra": {"epoch": 1}}
        reported = 0
        for step in range(3):
            pending = reknit.save(
                f"striking://a{step}",
                held,
                wait=False,
                group=group,
                options=options([tmp_path / "b" / str(step), tmp_path / "c" / str(step)]),
            )
            reported += pending.promoted(LIMIT_S).num_files
        return reported

    assert sum(run_ranks(3, rank)) == 2 * 3 * 5
    for step in range(3):
        assert reknit.verify(tmp_path / "b" / str(step), "data").ok
        assert reknit.verify(tmp_path / "c" / str(step), "data").ok


# Order.


def test_a_slow_promotion_delays_no_save_to_another_path(tmp_path: Path) -> None:
    first = save(tmp_path / "a1", slow(tmp_path, "b1"), 1)
    first.result(LIMIT_S)
    second = save(tmp_path / "a2", None, 2)
    second.result(LIMIT_S)
    third = save(tmp_path / "a3", tmp_path / "b3", 3)
    third.result(LIMIT_S)
    save(tmp_path / "a4", None, 4, wait=True)
    with pytest.raises(reknit.DeadlineError, match="b1"):
        first.promoted(0.01)
    assert not first.promotion_done()
    assert value_at(tmp_path / "b1") is None
    assert [value_at(tmp_path / f"a{k}") for k in (1, 2, 3, 4)] == [1, 2, 3, 4]
    (tmp_path / "gate").touch()
    first.promoted(LIMIT_S)
    third.promoted(LIMIT_S)
    assert [value_at(tmp_path / f"b{k}") for k in (1, 3)] == [1, 3]


def saves_of(name: str) -> list[AgentSave]:
    """Return the saves to paths that begin so, as far as objects of this process still refer to them."""
    gc.collect()
    there = [save for save in gc.get_objects() if issubclass(type(save), AgentSave)]
    return [save for save in there if save.url.startswith(f"striking://{name}")]


def test_a_promotion_that_waits_for_its_turn_keeps_nothing_of_the_state() -> None:
    turn = threading.Event()
    Strikes.opening = in_thread("reknit-agent-promote", lambda: turn.wait(LIMIT_S))
    value = {"blob": os.urandom(1 << 20)}
    pending = [
        reknit.save(f"striking://turn{k}", {"x": value}, wait=False, options=options(f"striking://b{k}"))
        for k in range(3)
    ]
    for one in pending:
        one.result(LIMIT_S)
    waiting = saves_of("turn")
    kept = [blob for save in waiting for blob in save.begin.claims.blobs]
    images = [save.files for save in waiting]
    turn.set()
    assert (len(waiting), kept, images) == (3, [], [None] * 3)
    for one in pending:
        one.promoted(LIMIT_S)


def test_what_is_promoted_or_failed_is_forgotten_and_the_trainer_keeps_nothing_of_it() -> None:
    def left() -> list[object]:
        trainers = [agents for agents in gc.get_objects() if issubclass(type(agents), AgentSession)]
        # Threads that wait for the next save still refer to the last.
        return [*(agents.saves for agents in trainers if agents.saves), *saves_of("known")[1:]]

    for step in range(2):
        save(f"striking://known{step}", f"striking://b{step}").promoted(LIMIT_S)
    Strikes.opening = in_thread("reknit-agent-promote", fail)
    with pytest.raises(reknit.ReknitError, match="struck"):
        save("striking://known2", "striking://b2").promoted(LIMIT_S)
    wait_until(lambda: not left(), LIMIT_S / 6, lambda: str(left()))


def test_a_save_to_the_same_path_writes_nothing_before_the_promotion_is_over(tmp_path: Path) -> None:
    first = save(tmp_path / "a", slow(tmp_path, "b"), 1, overwrite=True)
    first.result(LIMIT_S)
    before = names(tmp_path / "a")
    second = save(tmp_path / "a", tmp_path / "b", 2, overwrite=True)
    second.staged(LIMIT_S)
    with pytest.raises(reknit.DeadlineError):
        second.result(0.5)
    new = names(tmp_path / "a") - before  # the marker of the second, and the lease of who promotes the first
    assert {name for name in new if "pending" not in name and "lease" not in name} == set()
    assert value_at(tmp_path / "a") == 1
    (tmp_path / "gate").touch()
    assert first.promoted(LIMIT_S).write_id == first.result().write_id
    assert second.promoted(LIMIT_S).write_id == second.result().write_id
    assert (value_at(tmp_path / "a"), value_at(tmp_path / "b")) == (2, 2)
    assert names(tmp_path / "a") == names(tmp_path / "b")


def test_a_save_that_waits_comes_after_the_promotion_of_its_path(tmp_path: Path) -> None:
    first = save(tmp_path / "a", slow(tmp_path, "b"), 1)
    first.result(LIMIT_S)
    timer = threading.Timer(0.3, (tmp_path / "gate").touch)
    timer.start()
    save(tmp_path / "a", None, 2, wait=True, overwrite=True)
    assert first.promotion_done()
    first.promoted(LIMIT_S)
    assert (value_at(tmp_path / "a"), value_at(tmp_path / "b")) == (2, 1)


# Ends.


def test_close_waits_for_promotions_and_tells_when_one_has_not_ended(tmp_path: Path) -> None:
    others = set(agents_of(os.getpid()))  # of groups that other tests have left
    pending = save(tmp_path / "a", slow(tmp_path, "b"))
    pending.result(LIMIT_S)
    save(tmp_path / "other", None).result(LIMIT_S)
    assert not reknit.close(0.1)
    (tmp_path / "gate").touch()
    pending.promoted(LIMIT_S)
    assert value_at(tmp_path / "b") == 1
    (tmp_path / "gate").unlink()
    pending = save(tmp_path / "c", slow(tmp_path, "d"))
    pending.result(LIMIT_S)
    threading.Timer(0.3, (tmp_path / "gate").touch).start()
    assert reknit.close(LIMIT_S)
    assert pending.promotion_done()
    assert value_at(tmp_path / "d") == 1
    wait_until(lambda: set(agents_of(os.getpid())) <= others, LIMIT_S)


SCRIPT = """
import gc, sys, threading
import numpy as np
import reknit
from reknit.comm.group import SoloGroup
from tests.storage.killpoint import register_faulty

register_faulty()
a, b, exit_wait_s, gate = sys.argv[1:]
state = {"model": {"w": np.arange(300_000, dtype=np.float32) + 1}, "extra": {"epoch": 1}}
options = reknit.SaveOptions(
    promote_to=b, durability="process", timeout_s=50, exit_wait_s=float(exit_wait_s)
)
group = SoloGroup()
reknit.save(a, state, wait=False, options=options, group=group).result(50)
del group  # and yet the end of the program waits for its saves
gc.collect()
if gate:
    threading.Timer(0.3, lambda: open(gate, "w").close()).start()
"""


@pytest.mark.parametrize("waits", [True, False])
def test_the_end_of_a_program_waits_for_a_promotion_and_its_agent_goes_on_after_that(
    tmp_path: Path, waits: bool
) -> None:
    a, b, gate = tmp_path / "a", tmp_path / "b", tmp_path / "gate"
    arguments = [str(a), slow(tmp_path, "b"), "45" if waits else "0", str(gate) if waits else ""]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *arguments], stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.wait(LIMIT_S) == 0
        assert value_at(a) == 1
        assert value_at(b) == (1 if waits else None)
        gate.touch()
        wait_until(lambda: not agents_of(script.pid), LIMIT_S)
        assert script.stderr is not None
        assert ("or promoted; its agent goes on" in script.stderr.read()) is not waits
    assert value_at(b) == 1


# Loading from whichever store has it.


def test_what_the_quick_store_lost_is_loaded_from_the_one_that_lasts(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    save(a, b).promoted(LIMIT_S)
    (file,) = a.glob("model/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(reknit.CorruptError):
        value_at(a, replicas=())
    assert value_at(a, replicas=(str(b),)) == 1
    shutil.rmtree(a)
    assert value_at(a, replicas=(str(b),)) == 1


# Alone.


def test_a_promotion_by_hand_can_be_asked_for_again_and_again(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    saved = save(a, None, wait=True, step=5).result()
    first = reknit.promote(a, b)
    assert (first.step, first.write_id, first.nbytes) == (5, saved.write_id, saved.total_nbytes)
    assert reknit.promote(str(a), f"file://{b}").num_files == 0
    assert value_at(b) == 1
    save(a, None, 2, wait=True, overwrite=True)
    with pytest.raises(reknit.CheckpointExistsError):
        reknit.promote(a, b)
    reknit.promote(a, b, overwrite=True)
    assert value_at(b) == 2
    with pytest.raises(reknit.UsageError, match="where it is"):
        reknit.promote(a, a)
    with pytest.raises(reknit.CheckpointNotFoundError):
        reknit.promote(tmp_path / "c", b)
