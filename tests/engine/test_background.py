"""Saves that go on in the background, through the public door: snapshots, plans, back-pressure, failures."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.api import checks
from reknit.engine.background import link as agent_link
from reknit.engine.background.agent import Agent
from reknit.engine.background.background import Background
from reknit.engine.background.session import AgentSession
from reknit.engine.background.snapshot import Snapshot
from reknit.engine.outcome import SaveOutcome
from reknit.engine.saving.coordinator import Coordinator
from reknit.storage.base import CopiesFiles
from reknit.storage.registry import open_storage, recipe, register
from reknit.testing.world import run_ranks
from tests.engine.watched import Watched
from tests.faults.nursery import agent_of, agents_of, wait_until
from tests.running.cases import one_by_one
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reknit.comm.group import Call, Group

LIMIT_S = 60.0
MIB = 1 << 20


class Gate:
    """A gate before every new file: creation waits until it is open, and fails for the paths in `failing`."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.failing: Callable[[str], bool] = lambda path: False
        self.closing: Callable[[], None] = lambda: None


GATE = Gate()


class Gated(ProcessMemory):
    """Memory behind the gate; agents that use it are threads, as only this process has the memory."""

    def create(self, path: str, nbytes: int) -> Any:
        assert GATE.open.wait(LIMIT_S)
        if GATE.failing(f"{self._prefix}{path}"):
            raise reknit.errors.StorageFullError(f"no room for {path}")
        return super().create(path, nbytes)

    def close(self) -> None:
        GATE.closing()

    def sub(self, path: str) -> Gated:
        below = Gated("gated")
        below._prefix = f"{self._prefix}{path}/"
        return below


register("gated", lambda url, durability: Gated("gated").sub(url.removeprefix("gated://")))


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    GATE.open.set()
    GATE.failing = lambda path: False
    GATE.closing = lambda: None
    assert reknit.close(LIMIT_S)
    ProcessMemory.clear("gated")


def weights(value: float, names: Sequence[str] = ("a", "b"), numel: int = 40_000) -> dict[str, Any]:
    return {name: np.full(numel, value + n, np.float32) for n, name in enumerate(names)}


def background(path: Any, state: dict[str, Any], **more: Any) -> reknit.PendingSave:
    return reknit.save(path, state, wait=False, **more)


def test_what_changes_after_an_eager_save_returned_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": weights(1),
        "extra": {"epoch": [1, {"seen": 5}]},
        "rng": reknit.RngState(),
    }
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    GATE.open.clear()
    pending = {path: background(path, state) for path in ("gated://snap", str(tmp_path / "snap"))}
    state["model"]["a"][:] = 7
    state["extra"]["epoch"][1]["seen"] = 6
    torch.rand(5)
    GATE.open.set()
    for path, save in pending.items():
        save.result(LIMIT_S)
        target: dict[str, Any] = {"model": weights(0), "extra": {"epoch": None}, "rng": reknit.RngState()}
        torch.manual_seed(0)
        reknit.load(path, target)
        assert target["model"]["a"].tolist() == weights(1)["a"].tolist()
        assert target["extra"]["epoch"] == [1, {"seen": 5}]
        assert torch.equal(torch.get_rng_state(), expected)


def test_a_save_is_not_visible_before_it_is_committed_and_tells_when_it_is() -> None:
    GATE.open.clear()
    save = background("gated://slow", {"model": weights(1)}, step=4)
    save.staged(0)
    assert not save.done()
    assert save.error is None
    assert save.phases == ()
    with pytest.raises(reknit.DeadlineError, match="gated://slow"):
        save.result(0.01)
    with pytest.raises(reknit.CheckpointNotFoundError):
        reknit.load("gated://slow", {"model": weights(0)})
    GATE.open.set()
    report = save.result(LIMIT_S)
    assert save.done()
    assert (report.step, report.num_files, report.streamed) == (4, 1, False)
    assert report.total_nbytes > report.nbytes > 320_000
    assert report.blocked_s > 0
    assert {"collect", "plan", "stage", "digest", "write", "commit"} <= {
        record.phase for record in report.phases
    }
    assert reknit.verify("gated://slow", "data").ok


def test_what_is_staged_is_committed_though_its_trainer_is_gone_before_a_byte_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noticed, ended, outlive, run = threading.Event(), threading.Event(), Agent.outlive, Agent.run

    def outlives(agent: Agent, *, announced: bool) -> None:
        outlive(agent, announced=announced)
        noticed.set()

    def runs(agent: Agent) -> None:
        run(agent)
        ended.set()

    monkeypatch.setattr(Agent, "outlive", outlives)
    monkeypatch.setattr(Agent, "run", runs)
    GATE.open.clear()
    save = background("gated://orphan", {"model": weights(1)})
    save.staged(LIMIT_S)
    for link in list(agent_link.open_links):
        link.channel.shut()  # as the kernel does when a process dies
    assert noticed.wait(LIMIT_S)
    GATE.open.set()
    assert ended.wait(LIMIT_S)
    with pytest.raises(reknit.errors.AgentError):
        save.result(LIMIT_S)
    assert reknit.verify("gated://orphan", "data").ok


class Counted:
    """A group that counts the rounds that its trainer takes part in."""

    def __init__(self, group: Group) -> None:
        self._group, self.rounds = group, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def gather(self, call: Call) -> list[Any] | None:
        self.rounds += 1
        return self._group.gather(call)


def test_after_the_first_plan_nothing_of_planning_agreement_and_commit_is_on_the_training_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided: list[tuple[str, str]] = []

    def note(name: str) -> None:
        whole = getattr(Coordinator, name)

        def noted(*args: Any, **more: Any) -> Any:
            decided.append((name, threading.current_thread().name))
            return whole(*args, **more)

        monkeypatch.setattr(Coordinator, name, noted)

    note("assign")
    note("commit")
    back = [threading.Event() for _ in range(4)]
    rounds: dict[int, list[int]] = {}

    def rank(group: Group) -> None:
        counted = Counted(group)
        for step, first_is_back in enumerate(back):
            state = {"model": {f"own.{group.rank}": np.full(9, step), "all": np.full(5, step)}, "n": step}
            if step and step % 3 != group.rank:
                assert first_is_back.wait(LIMIT_S), "a rank whose plan is known waited for another"
            with Watched() as seen:
                save = background(f"gated://plan/{step}", state, group=counted)
            first_is_back.set()
            assigned = [r.phase for r in save.result(LIMIT_S).phases if r.phase == "assign"]
            rounds.setdefault(group.rank, []).append(counted.rounds)
            if step == 0:
                assert assigned
                assert "reknit.engine.background.trainer_save.owners" in seen.agreed
                assert "reknit.planner.save.plan_save" in seen.planned
            else:
                assert assigned == []
                assert seen.agreed == seen.planned == set()
                assert set(seen.said) - {"GiveArena"} == {"Begin", "Planned", "Filled"}

    run_ranks(3, rank)
    for reported in rounds.values():
        assert reported[0] > 0
        assert reported == [reported[0]] * 4
    assert sorted(decided) == [(name, "reknit-agent-commit") for name in ["assign"] * 4 + ["commit"] * 4]
    target: dict[str, Any] = {"model": {"own.2": np.zeros(9, int), "all": np.zeros(5, int)}, "n": 0}
    reknit.load("gated://plan/3", target, strict=False)
    assert target["n"] == 3
    assert target["model"]["own.2"].tolist() == [3] * 9
    assert target["model"]["all"].tolist() == [3] * 5


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda model: model.update(lora=np.ones(3)), "saved"),
        (lambda model: model.update(all=model["all"].astype(np.float64)), "CommitError"),
        (lambda model: model.pop("all"), "CommitError or saved"),
    ],
)
def test_a_layout_that_changes_on_one_rank_is_noticed_by_all_and_planned_anew(
    change: Callable[[dict[str, Any]], Any], outcome: str
) -> None:
    def rank(group: Group) -> list[str]:
        reported = []
        model = {f"own.{group.rank}": np.full(9, 1.0, np.float32), "all": np.full(5, 1.0, np.float32)}
        for step in range(4):
            if step == 2 and group.rank == 1:
                change(model)
            path = f"gated://{outcome}/{step}"
            try:
                background(path, {"model": model}, group=group).result(LIMIT_S)
                reported.append("saved")
            except reknit.ReknitError as error:
                reported.append(type(error).__name__)
        return reported

    first, *others = run_ranks(3, rank)
    assert others == [first, first]
    assert first[:2] == ["saved", "saved"]
    assert first[2] in outcome.split(" or ")
    if outcome == "CommitError or saved":
        assert first[3] == "saved", "a changed layout is planned anew after it failed once"
    ProcessMemory.clear("gated")


def open_once_waited_for(thread: int) -> None:
    """Open the gate once a thread has waited for an arena for a while."""

    def waits() -> bool:
        stack = traceback.extract_stack(sys._current_frames()[thread])
        return stack[-1].name == "wait" and any("arena_pool" in frame.filename for frame in stack)

    wait_until(waits, LIMIT_S)
    time.sleep(0.2)
    GATE.open.set()


def test_a_third_save_waits_until_an_arena_is_free_and_says_so() -> None:
    GATE.open.clear()
    saves = [background(f"gated://wait/{k}", {"model": weights(k)}) for k in range(2)]
    threading.Thread(target=open_once_waited_for, args=(threading.get_ident(),)).start()
    third = background("gated://wait/2", {"model": weights(2)})
    assert GATE.open.is_set()
    for save in saves:
        save.result(LIMIT_S)
    assert third.result(LIMIT_S).waited_s > 0.2
    for k in range(3):
        target = {"model": weights(-1)}
        reknit.load(f"gated://wait/{k}", target)
        assert target["model"]["b"][0] == k + 1


def test_a_save_is_skipped_on_all_ranks_when_one_has_no_memory_free() -> None:
    options = reknit.SaveOptions(when_busy="skip")

    def rank(group: Group) -> list[str]:
        if group.rank == 0:
            GATE.open.clear()
        saves = [
            background(f"gated://skip/{k}", {"model": weights(k)}, group=group, options=options)
            for k in range(3)
        ]
        if group.rank == 0:
            GATE.open.set()
        reported = []
        for save in saves:
            try:
                save.result(LIMIT_S)
                reported.append("saved")
            except reknit.errors.SkippedError:
                assert save.skipped
                reported.append("skipped")
        background("gated://skip/9", {"model": weights(9)}, group=group).result(LIMIT_S)
        return reported

    assert run_ranks(2, rank) == [["saved", "saved", "skipped"]] * 2
    assert reknit.latest("gated://skip") is not None


def test_a_state_larger_than_the_host_memory_granted_is_streamed_through_it(tmp_path: Path) -> None:
    options = reknit.SaveOptions(host_nbytes=64 * MIB)
    values = np.arange(40 * MIB, dtype=np.float32)
    model = {"big": values, "more": np.arange(7.0)}
    for path in ("gated://stream", str(tmp_path / "stream")):
        report = background(path, {"model": model}, options=options).result(LIMIT_S)
        assert report.streamed
        with reknit.open(path) as checkpoint:
            assert np.array_equal(checkpoint.read("model", "big"), values)
            assert checkpoint.read("model", "more").tolist() == model["more"].tolist()
        assert reknit.verify(path, "data").ok


def test_streaming_ends_with_the_error_when_the_store_is_full() -> None:
    GATE.failing = lambda path: True
    options = reknit.SaveOptions(host_nbytes=64 * MIB)
    save = background("gated://full", {"model": {"big": np.zeros(40 * MIB, np.float32)}}, options=options)
    with pytest.raises(reknit.errors.StorageFullError):
        save.result(LIMIT_S)
    GATE.failing = lambda path: False
    background("gated://full", {"model": weights(1)}, options=options).result(LIMIT_S)


def test_saves_to_one_path_may_overlap_and_the_last_one_stays() -> None:
    for k in range(6):
        background("gated://one", {"model": weights(k)}, overwrite=True, step=k)
    report = background("gated://one", {"model": weights(9)}, overwrite=True, step=9).result(LIMIT_S)
    assert report.warnings == ()
    with reknit.open("gated://one") as checkpoint:
        assert checkpoint.step == 9
        assert checkpoint.read("model", "a")[0] == 9
    assert reknit.verify("gated://one", "data").ok


def test_a_failure_is_raised_by_result_or_by_the_next_save_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "reknit")
    GATE.failing = lambda path: path.startswith(("f/1", "f/2"))
    asked = background("gated://f/1", {"model": weights(1)})
    for _ in range(2):
        with pytest.raises(reknit.errors.StorageFullError) as reported:
            asked.result(LIMIT_S)
    assert (reported.value.rank, reported.value.phase) == (0, "write")
    unasked = background("gated://f/2", {"model": weights(2)})
    unasked.wait(LIMIT_S)
    with pytest.raises(reknit.errors.StorageFullError, match="no room"):
        background("gated://f/3", {"model": weights(3)})
    background("gated://f/4", {"model": weights(4)}).result(LIMIT_S)
    assert reknit.verify("gated://f/3", "data").ok, "the save whose call raised the failure went on"
    failures = [r.getMessage() for r in caplog.records if "failed" in r.getMessage()]
    assert len(failures) == 2
    assert [("f/1" in f, "f/2" in f) for f in failures] == [(True, False), (False, True)]


def test_errors_only_warn_when_the_options_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reknit")
    options = reknit.SaveOptions(on_error="warn")
    GATE.failing = lambda path: True
    background("gated://w/1", {"model": weights(1)}, options=options).wait(LIMIT_S)
    save = background("gated://w/2", {"model": weights(1)}, options=options)
    with pytest.raises(reknit.errors.StorageFullError):
        save.result(LIMIT_S)
    save = reknit.save("gated://w/3", {"model": weights(1)}, options=options)
    assert isinstance(save.error, reknit.errors.StorageFullError)
    with pytest.raises(reknit.errors.StorageFullError):
        save.result()
    assert sum("failed" in record.getMessage() for record in caplog.records) == 3


def test_an_error_of_one_rank_reaches_all_and_the_next_save_is_well() -> None:
    def rank(group: Group) -> list[str]:
        reported = []
        for k, extra in enumerate([1, object(), 2]):
            state = {"model": weights(k), "extra": {"x": extra if group.rank == 1 else 1}}
            save = background(f"gated://one/{k}", state, group=group)
            try:
                save.result(LIMIT_S)
                reported.append("saved")
            except reknit.errors.StateError as error:
                reported.append(f"refused by {error.rank}")
        return reported

    assert run_ranks(3, rank) == [["saved", "refused by 1", "saved"]] * 3


def test_ranks_that_save_different_steps_are_told_so_and_nothing_is_committed() -> None:
    def rank(group: Group) -> list[str]:
        reported = []
        for k in range(2 - group.rank, 4):  # rank 1 makes one call more
            state = {"model": {f"own.{group.rank}": np.full(9, k)}}
            options = reknit.SaveOptions(timeout_s=4)
            try:
                save = background("gated://x", state, step=k, overwrite=True, group=group, options=options)
                save.result(LIMIT_S)
                reported.append("saved")
            except reknit.ReknitError as error:
                reported.append(type(error).__name__)
        return reported

    first, second = run_ranks(2, rank)
    assert set(first) == {"ProtocolError"}
    assert "saved" not in second
    assert reknit.latest("gated://") is None


def test_a_save_that_waits_comes_after_one_under_way_to_the_same_path() -> None:
    GATE.open.clear()
    first = background("gated://same", {"model": weights(1)}, step=1, overwrite=True)
    threading.Timer(0.3, GATE.open.set).start()
    reknit.save("gated://same", {"model": weights(2)}, step=2, overwrite=True)
    assert first.done()
    first.result()
    with reknit.open("gated://same") as checkpoint:
        assert checkpoint.step == 2
    assert reknit.verify("gated://same", "data").ok


def test_a_close_while_lost_agents_are_replaced_leaves_none_behind(tmp_path: Path) -> None:
    others = set(agents_of(os.getpid()))  # of groups that other tests have left

    def rank(group: Group) -> None:
        background(tmp_path / "0", {"model": weights(1)}, group=group).result(LIMIT_S)
        before = set(agents_of(os.getpid()))
        formed.wait(LIMIT_S)
        if group.rank == 1:
            kill_own_agent(group)
        wait_until(lambda: set(agents_of(os.getpid())) - before, LIMIT_S)  # a new one starts
        checks.backgrounds[group][False].close(LIMIT_S)

    formed = threading.Barrier(2)
    run_ranks(2, rank)
    assert set(agents_of(os.getpid())) <= others


def kill_own_agent(group: Group) -> None:
    os.kill(agent_of(group), signal.SIGKILL)


def test_an_interrupt_while_a_first_save_copies_is_raised_though_no_agents_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(self: Snapshot) -> None:
        raise KeyboardInterrupt

    def gone(*arguments: Any) -> None:
        arguments[-1].give_up()
        raise reknit.CommError("rank 1 is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Snapshot, "take", interrupted)
        patched.setattr(AgentSession, "form", gone)
        with pytest.raises(KeyboardInterrupt):
            background("gated://ctrl-c", {"model": weights(1)})
    background("gated://ctrl-c", {"model": weights(1)}).result(LIMIT_S)


def test_a_store_that_cannot_be_closed_stops_neither_this_save_nor_the_next() -> None:
    def lost() -> None:
        if threading.current_thread().name == "reknit-agent-commit":
            raise RuntimeError("session lost")

    GATE.closing = lost
    for k in range(2):
        assert background(f"gated://close/{k}", {"model": weights(k)}).result(LIMIT_S).num_files == 1


@pytest.mark.parametrize("wait", [True, False])
def test_a_place_where_no_folder_can_be_made_is_named_whoever_writes(tmp_path: Path, wait: bool) -> None:
    (tmp_path / "file").touch()
    places = {
        tmp_path / "file/below/it": f"the folder {tmp_path}/file cannot be created: a file is in the place",
        Path("/proc/nope/x"): "/proc/nope cannot be created: /proc exists, but accepts no new entry",
    }
    for place, fault in places.items():
        with pytest.raises(reknit.StorageError, match=fault) as caught:
            reknit.save(place, {"model": weights(1)}, wait=wait).result(LIMIT_S)
        assert caught.value.rank == 0
        assert caught.value.phase == "assign" or (not wait and caught.value.phase == "write")


def test_what_is_saved_is_collected_and_copied_before_the_first_agent_takes_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, before = [], set(agents_of(os.getpid()))  # those of earlier tests may yet be ending
    state = {f"w{number}": np.full(150_000, number) for number in range(5)}

    class Looks:
        def state_dict(self) -> dict[str, Any]:
            seen.append(set(agents_of(os.getpid())) - before)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Load nothing."""

    def changing(*arguments: Any, form: Any = AgentSession.form, **options: Any) -> Any:
        for array in state.values():
            array[:] = -1
        formed: AgentSession = form(*arguments, **options)
        return formed

    monkeypatch.setattr(AgentSession, "form", changing)
    options = reknit.SaveOptions(max_file_nbytes=2 << 20)
    pending = reknit.save(tmp_path / "a", {"model": state, "odd": Looks()}, wait=False, options=options)
    report = pending.result(LIMIT_S)
    assert seen == [set()]
    assert [phase.phase for phase in report.phases].count("stage") == 1
    assert reknit.verify(tmp_path / "a", "data").ok
    with reknit.open(tmp_path / "a") as checkpoint:
        for number in range(5):
            assert set(checkpoint.read("model", f"w{number}").tolist()) == {number}
    files = list((tmp_path / "a" / "model").iterdir())
    assert len(files) > 2
    for file in files:
        assert report.write_id.encode() in file.read_bytes()[:4096]


def test_a_save_that_may_not_begin_leaves_the_next_one_of_its_new_layout_well() -> None:
    background("gated://there", {"model": weights(1, ("c",))}).result(LIMIT_S)
    GATE.open.clear()
    values = background("gated://values", {"extra": {"epoch": 1}})  # later saves wait behind it in the agent
    refused, well = (background(f"gated://{name}", {"model": weights(2)}) for name in ("there", "free"))
    GATE.open.set()
    values.result(LIMIT_S)
    with pytest.raises(reknit.CheckpointExistsError):
        refused.result(LIMIT_S)
    assert well.result(LIMIT_S).num_files == 1


def test_a_store_that_only_this_process_knows_is_served_by_threads() -> None:
    assert not recipe("gated://x").agents_can_open
    assert not recipe("process://x").agents_can_open
    assert recipe("mem://x") == ("mem://x", True, None)
    assert recipe("/tmp/x").agents_can_open
    assert recipe("file:///tmp/x").factory is None
    assert recipe("folder/x").url == str(Path("folder/x").absolute())
    register("elsewhere", open_elsewhere)
    assert recipe("elsewhere://x") == ("elsewhere://x", True, f"{__name__}:open_elsewhere")


def test_a_trainer_knows_what_its_agent_can_take_over_without_opening_the_store(tmp_path: Path) -> None:
    for url in one_by_one([str(tmp_path), f"file://{tmp_path}", "mem://x", "process://x"]):
        storage = open_storage(url)
        assert recipe(url).copies_files("process") == isinstance(storage, CopiesFiles)


def open_elsewhere(url: str, durability: str) -> ProcessMemory:
    return ProcessMemory("elsewhere")


def test_saves_that_are_lost_with_their_process_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Background(in_process=True)
    promoted = SaveOutcome("/x", promote_to=[reknit.options.PromotionTarget("/y")])
    saves.pending.append(promoted)
    monkeypatch.setattr(Background, "close", lambda self: False)
    saves.at_exit()
    assert isinstance(promoted.error, reknit.errors.AgentError)
    assert promoted.over()
    assert promoted.unread
