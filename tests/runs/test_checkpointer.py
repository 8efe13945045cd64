"""The steps of a run: saved, found again, kept and removed, by one process and by several ranks."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit import Checkpointer, Tier
from reknit.engine.stored.agents import AtWork
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptError,
    MismatchError,
    ReknitError,
    UsageError,
)
from reknit.policies import at, best, every, latest, on_preemption
from reknit.runs import pending_saves
from reknit.testing.world import run_ranks
from tests.runs.pieces import damage, numbers, resumed, saved, state

if TYPE_CHECKING:
    from reknit.comm.group import Group


SOURCES = Path(reknit.__file__).parents[1]


def train(run: Checkpointer, held: dict[str, Any], total: int) -> list[int]:
    """Train up to `total` steps, each of which adds one, and return the steps that were saved."""
    saved = []
    for step in range(run.resume(held), total):
        held["model"]["w"] += 1
        held["model"]["count"] += 1
        pending = run.save(step, held, {"loss": abs(step - 11)})
        if pending is not None:
            pending.result()
            saved.append(step)
    return saved


def test_a_run_says_in_a_line_where_and_how_far_it_is_without_a_look_at_its_store(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", save=every(2), wait=True) as run:
        assert repr(run) == f"<Checkpointer root: {tmp_path / 'run'}>"
        run.save(2, state())
        shutil.rmtree(tmp_path / "run")
        assert repr(run) == f"<Checkpointer root: {tmp_path / 'run'}, step: 2>"
    tiers = [Tier("memory://fast"), Tier("memory://slow", every=10)]  # a long text would lose its middle
    with Checkpointer(tiers=tiers, wait=True) as run:
        assert repr(run) == "<Checkpointer root: memory://fast and memory://slow>"


def test_a_run_goes_on_where_it_was_and_keeps_what_it_was_told_to(tmp_path: Path) -> None:
    how: dict[str, Any] = {"save": every(steps=5), "keep": latest(2) | best(1, "loss"), "wait": True}
    held = state()
    with Checkpointer(tmp_path, **how) as run:
        assert train(run, held, 23) == [5, 10, 15, 20]
        run.wait()
        assert numbers(tmp_path) == [10, 15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".reknit",
        *(f"step_{n:08d}" for n in (10, 15, 20)),
    ]
    fresh = state()
    with Checkpointer(tmp_path, **how) as run:
        assert train(run, fresh, 32) == [25, 30]
        run.wait()
        # Each step was trained once: the result is that of a run without a break.
        assert fresh["model"]["count"] == 32
        assert set(fresh["model"]["w"]) == {32.0}
        assert numbers(tmp_path) == [10, 25, 30]
        assert run.latest() == 30
        assert (found := run.best()) is not None
        assert (found.step, found.metrics) == (10, {"loss": 1.0})
        old = state()
        assert run.load(old, "best").step == 10
        assert old["model"]["count"] == 11


def test_force_saves_whatever_the_policy_says_and_a_step_only_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, save=at(1), wait=True) as run:
        assert run.save(0, state()) is None
        one = run.save(1, state())
        assert run.save(1, state(), force=True) is one
        assert run.save(2, state(), force=True) is not None
    assert numbers(tmp_path) == [1, 2]


def test_damaged_steps_are_passed_over_with_a_reason_and_replaced_when_they_come_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = state()
    with Checkpointer(tmp_path, save=every(5), wait=True) as run:
        train(run, held, 17)
    damage(tmp_path / "step_00000015")
    (tmp_path / "step_00000010" / "manifest.json").write_bytes(b"{}")
    with Checkpointer(tmp_path, save=every(5), wait=True) as run:
        again = state()
        assert run.resume(again) == 6
        assert again["model"]["count"] == 6
        reported = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any("passed over step 15" in line for line in reported)
        assert any("passed over step 10" in line for line in reported)
        train(run, again, 17)
    assert numbers(tmp_path) == [5, 10, 15]
    assert reknit.verify(tmp_path / "step_00000015", "data").ok


def test_a_run_whose_steps_are_all_damaged_does_not_start_from_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    damage(tmp_path / "step_00000003")
    with Checkpointer(tmp_path) as run, pytest.raises(CorruptError, match="none of the 1 steps"):
        run.resume(state())


def test_a_state_that_does_not_fit_is_an_error_and_no_reason_to_take_an_older_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        run.save(3, state())
        with pytest.raises(MismatchError):
            run.resume({"model": {"w": np.zeros(7), "count": 0}})


def test_starting_from_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path / "typo") as run:
        assert run.resume(state()) == 0
        with pytest.raises(CheckpointNotFoundError):
            run.load(state())
        assert run.latest() is None
    assert "there is no checkpoint below" in caplog.text


def test_a_run_that_did_not_resume_replaces_no_step_that_comes_after_its_first(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        run.save(1, state(1.0))
        reknit.save(tmp_path / "step_00000002", state(3.0), step=2)
        with pytest.raises(CheckpointExistsError) as caught:
            run.save(2, state(2.0))
    assert "number the steps of a run upwards" in (caught.value.remedy or "")
    with reknit.open(tmp_path / "step_00000002") as checkpoint:
        assert checkpoint.read("model", "w")[0] == 3.0


def test_steps_that_others_named_are_taken_too(tmp_path: Path) -> None:
    reknit.save(tmp_path / "my-100", state(1.0), step=100)
    with Checkpointer(tmp_path, keep=latest(1), wait=True) as run:
        assert run.resume(state()) == 101
        run.save(101, state())
        run.wait()
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["step_00000101"]


def test_each_step_is_promoted_to_its_own_folder_and_read_from_there_if_damaged(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    options = reknit.SaveOptions(promote_to=cold)
    with Checkpointer(hot, wait=True, options=options, keep=latest(1)) as run:
        for step in (1, 2):
            run.save(step, state(float(step)))
    assert (numbers(hot), numbers(cold)) == ([2], [1, 2])
    damage(hot / "step_00000002")
    assert resumed(hot, load_options=reknit.LoadOptions(replicas=(cold,))) == (3, 2)


def test_what_an_earlier_run_has_begun_cannot_commit_behind_a_new_one(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    begun = [tmp_path / f"step_{step:08d}" / f"pending.{7:016x}.{'a' * 8}" for step in (3, 9)]
    for marker in begun:
        marker.parent.mkdir()
        marker.touch()
    with Checkpointer(tmp_path, wait=True) as run:
        assert run.resume(state()) == 6
        assert [marker.exists() for marker in begun] == [True, False]  # step 3 could not be the newest
        run.save(9, state(9.0))
    assert numbers(tmp_path) == [5, 9]


def test_agents_of_an_earlier_run_are_waited_for(tmp_path: Path) -> None:
    """A trainer dies as soon as its state is copied, and its agent has not read of the save yet.

    The new run resumes from that step all the same.
    """
    script = tmp_path / "train.py"
    script.write_text(STAGED)
    process = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCES), str(SOURCES.parent)])},
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    going_on = threading.Timer(0.5, os.kill, (int(process.stdout), signal.SIGCONT))
    going_on.start()
    held = {"model": {"w": np.zeros(8 << 20)}}
    with Checkpointer(tmp_path / "run") as run:
        assert run.resume(held) == 8
    going_on.join()
    assert held["model"]["w"][-1] == 7.0


def test_whatever_agents_of_an_earlier_run_do_they_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These agents write, or have not read their orders yet."""
    looks = [[AtWork(71, 0, f"{tmp_path}/7", 0.0)], [AtWork(71, 0, None, None)], []]
    monkeypatch.setattr(pending_saves, "at_work", lambda root: looks.pop(0))
    assert resumed(tmp_path)[0] == 0
    assert looks == []


def test_an_agent_that_stands_still_without_a_save_is_not_waited_for_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending_saves, "at_work", lambda root: [AtWork(71, 0, None, None)])
    monkeypatch.setattr(pending_saves, "_READ_S", 0.1)
    assert resumed(tmp_path)[0] == 0
    assert "still writing" not in caplog.text, "it may be one of another run"


def test_a_wait_for_agents_of_an_earlier_run_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending_saves, "at_work", lambda root: [AtWork(71, 0, None, None)])
    monkeypatch.setattr(pending_saves, "_READ_S", 0.3)
    monkeypatch.setattr(pending_saves, "_SILENT_S", 0.0)
    with caplog.at_level(logging.INFO), Checkpointer(tmp_path) as run:
        run.resume(state())
    assert "waiting up to 0 s for agents of an earlier run on this host" in caplog.text
    assert "processes [71]" in caplog.text


def test_metrics_are_numbers_by_name_and_a_policy_is_for_its_purpose(tmp_path: Path) -> None:
    wrong: Any
    for wrong in ({"loss": "low"}, {"loss": None}, {"loss": 10**400}, 5, {3: 1.0}, ["loss"]):
        with Checkpointer(tmp_path) as run, pytest.raises(UsageError, match="metrics"):
            run.save(1, state(), wrong)
    for wrong in ({"save": latest(3)}, {"keep": on_preemption()}, {"save": 500}):
        with pytest.raises(UsageError):
            Checkpointer(tmp_path, **wrong)


def test_a_metric_that_is_not_finite_is_stored_as_unknown(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=latest(5) | best(1, "loss"), wait=True) as run:
        run.save(1, state(), {"loss": float("nan")})
        run.save(2, state(), {"loss": np.float32(0.5)})
        assert [each.metrics for each in run.steps()] == [{"loss": None}, {"loss": 0.5}]
        assert (found := run.best()) is not None
        assert found.step == 2


@pytest.mark.parametrize(("steps", "noticed"), [(7, 16), (1, 3)])
def test_ranks_save_together_also_where_a_notice_to_one_decides(
    tmp_path: Path, steps: int, noticed: int
) -> None:
    notice = tmp_path / "notice"

    def work(group: Group) -> tuple[list[int], str | None]:
        saved = []
        how = every(steps=steps) | on_preemption(file=notice if group.rank == 2 else tmp_path / "other")
        with Checkpointer(tmp_path / "run", save=how, keep=latest(2), wait=True, group=group) as run:
            held = {"model": {"w": np.arange(10.0)}}
            for step in range(run.resume(held), 1000):
                if step == noticed and group.rank == 2:
                    notice.touch()
                if run.save(step, held, {"loss": 1.0 + group.rank}) is not None:
                    saved.append(step)
                if run.preempted:
                    break
            return saved, run.preempted

    (saved, why), *others = run_ranks(3, work)
    assert others == [(saved, why)] * 2
    assert saved[:2] == [steps, 2 * steps]
    assert len(saved) == saved.index(saved[-1]) + 1
    assert why is not None
    assert "notice" in why
    assert numbers(tmp_path / "run")[-1] == saved[-1]
    with reknit.open(tmp_path / "run" / f"step_{saved[-1]:08d}") as checkpoint:
        assert checkpoint.metadata == {"metrics": {"loss": 1.0}}, "of rank 0"


def test_ranks_decide_alone_where_the_step_alone_does(tmp_path: Path) -> None:
    patient = reknit.SaveOptions(timeout_s=60)

    def work(group: Group) -> list[int]:
        with Checkpointer(tmp_path, save=at(3, 9), group=group, options=patient) as run:
            assert not run.should_save(1)  # together: a run that begins may be refused
            return [step for step in range(2, 20) if group.rank == 0 and run.should_save(step)]

    assert run_ranks(2, work) == [[3, 9], []], "rank 0 does not wait for the other"


def test_errors_of_rank_0_are_those_of_all(tmp_path: Path) -> None:
    reknit.save(tmp_path / "one", state())

    def work(group: Group) -> str:
        with Checkpointer(tmp_path / "one", group=group) as run:
            try:
                run.resume(state())
            except ReknitError as error:
                return error.message
        return ""

    first, second = run_ranks(2, work)
    assert first == second
    assert "is a checkpoint" in first


SCRIPT = """
import sys, time
import numpy as np
import reknit
from reknit.policies import every, latest, on_preemption
if __name__ == "__main__":
    held = {"model": {"w": np.zeros(1000)}}
    with reknit.Checkpointer(sys.argv[1], save=every(10_000) | on_preemption(), keep=latest(1)) as run:
        step = run.resume(held)
        print("begun", flush=True)
        for step in range(step, 1_000_000):
            held["model"]["w"] += 1
            time.sleep(0.001)
            run.save(step, held)
            if run.preempted:
                break
    print(step, run.preempted, flush=True)
"""


STAGED = """
import os, signal, sys
import numpy as np
import reknit
from tests.faults.nursery import agents_of
if __name__ == "__main__":
    run = reknit.Checkpointer(sys.argv[1])
    run.save(6, {"model": {"w": np.full(8 << 20, 6.0)}}).result()
    (agent,) = agents_of(os.getpid())
    os.kill(agent, signal.SIGSTOP)
    print(agent, flush=True)
    run.save(7, {"model": {"w": np.full(8 << 20, 7.0)}}).staged()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_gets_sigterm_saves_its_step_and_a_new_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(SOURCES)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        step, why = process.stdout.readline().split()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert why == "SIGTERM"
    held = {"model": {"w": np.zeros(1000)}}
    with Checkpointer(tmp_path / "run") as run:
        assert run.resume(held) == int(step) + 1
    assert set(held["model"]["w"]) == {float(int(step) + 1)}


def test_a_handler_that_was_there_is_called_and_comes_back(tmp_path: Path) -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        with Checkpointer(tmp_path, save=on_preemption(signal.SIGUSR1), wait=True) as run:
            assert not run.should_save(0)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals == [signal.SIGUSR1]
            assert run.save(1, state()) is not None
            assert run.preempted == "SIGUSR1"
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_are_for_the_main_thread(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def work() -> None:
        try:
            Checkpointer(tmp_path, save=on_preemption())
        except BaseException as error:  # looked at below
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(found[0], UsageError)


def test_a_dry_run_removes_nothing(tmp_path: Path) -> None:
    for step in range(4):
        reknit.save(tmp_path / f"step_{step:08d}", state(), step=step)
    with Checkpointer(tmp_path, keep=latest(1)) as run:
        assert [each.step for each in run.prune(dry_run=True)] == [0, 1, 2]
        assert numbers(tmp_path) == [0, 1, 2, 3]
        assert [each.step for each in run.prune()] == [0, 1, 2]
    assert numbers(tmp_path) == [3]
