"""A run with several tiers: the tiers of each step, the steps that stay, and the tiers that are read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit import Checkpointer, SaveOptions, Tier
from reknit.engine.background import promotions
from reknit.errors import UsageError
from reknit.policies import at, best, every, latest, on_preemption, without
from reknit.runs import cadence
from reknit.testing.faulty_storage import Fault
from reknit.testing.world import run_ranks
from tests.faults.nursery import wait_until
from tests.runs.pieces import damage, numbers, saved, saving, state
from tests.servers import reach
from tests.storage.killpoint import faulty_url, register_faulty
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group

QUICK = SaveOptions(durability="process", threads=1, timeout_s=60)


def run_of(*tiers: Tier, wait: bool = True, **more: Any) -> Checkpointer:
    return Checkpointer(tiers=tiers, wait=wait, options=QUICK, **more)


def value(held: dict[str, Any]) -> float:
    return float(held["model"]["w"][0])


def test_each_tier_gets_steps_at_its_pace_and_keeps_its_own(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    with run_of(Tier(a, every=1, keep=latest(2)), Tier(b, every=3, keep=latest(2)), Tier(c, every=6)) as run:
        for step in range(14):
            run.save(step, state(float(step)))
        run.wait()
        assert [each.step for each in run.steps()] == [6, 9, 12, 13]
    assert (numbers(a), numbers(b), numbers(c)) == ([12, 13], [9, 12], [6, 12])


def test_a_run_goes_on_from_the_newest_step_of_any_tier(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with run_of(Tier(a, keep=latest(1)), Tier(b, every=4)) as run:
        for step in range(1, 7):
            run.save(step, state(float(step)))
    held = state()
    with run_of(Tier(a), Tier(b, every=4)) as run:
        assert run.resume(held) == 7
    assert value(held) == 6
    (a / "step_00000006" / "manifest.json").unlink()  # as memory is lost with a host
    with run_of(Tier(a, keep=latest(1)), Tier(b, every=4)) as run:
        assert run.latest() == 4
        assert run.resume(held) == 5
        assert value(held) == 4
        run.save(5, state(5.0))
    assert numbers(a) == [5]


def test_what_is_damaged_in_one_tier_is_read_from_another(tmp_path: Path) -> None:
    tiers = [Tier(tmp_path / name) for name in "ab"]
    with run_of(*tiers) as run:
        run.save(1, state(1.0))
    damage(tmp_path / "a" / "step_00000001")
    held = state()
    with run_of(*tiers) as run:
        assert run.resume(held) == 2
    assert value(held) == 1.0


def test_of_a_step_that_is_another_in_each_tier_the_next_tier_stands_in_as_a_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = [Tier(tmp_path / name) for name in "ab"]
    for tier, number in zip(tiers, (1.0, 2.0), strict=True):
        reknit.save(tmp_path / str(tier.root) / "step_00000007", state(number), step=7)
    held = state()
    with run_of(*tiers) as run:
        run.resume(held)
        assert value(held) == 1.0
        damage(tmp_path / "a" / "step_00000007")
        assert run.resume(held) == 8
    assert value(held) == 2.0
    assert "a/step_00000007 cannot be loaded" in caplog.text


def test_items_that_one_tier_has_dropped_are_had_from_another(tmp_path: Path) -> None:
    a, b = (
        Tier(tmp_path / "a", keep=latest(9) & (latest(1) | without("extra", after_hours=1e-9))),
        tmp_path / "b",
    )
    with run_of(a, Tier(b)) as run:
        for step in (1, 2):
            run.save(step, {**state(float(step)), "extra": {"n": step}})
    assert [each.dropped for each in reknit.steps(tmp_path / "a")] == [("extra",), ()]
    held = {**state(), "extra": {"n": 0}}
    with run_of(a, Tier(b)) as run:
        run.load(held, 1)
    assert held["extra"] == {"n": 1}


def test_what_an_earlier_run_did_not_come_to_promote_is_promoted(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    saved(a, 4, 5, 6, 8, 9, 10)
    reknit.promote(a / "step_00000004", b / "step_00000004")
    with run_of(Tier(a, keep=latest(1)), Tier(b, every=3, keep=latest(2))) as run:
        assert run.resume(state()) == 11
        run.save(11, state(11.0))  # the call for step 9 was due to this tier, too
    assert (numbers(a), numbers(b)) == ([11], [6, 9])


def test_steps_that_are_promoted_late_stay_until_they_are_there(tmp_path: Path) -> None:
    register_faulty()
    a, b, gate = tmp_path / "a", tmp_path / "b", tmp_path / "gate"
    saved(a, 1, 2, 3)
    slow = faulty_url(b, Fault("stall", 1, "finish"), gate=gate)
    with run_of(Tier(a, keep=latest(1)), Tier(slow)) as run:
        assert run.resume(state()) == 4
        assert [each.step for each in run.prune()] == []  # step 1 is copied, and 2 waits
        gate.touch()
    assert (numbers(a), numbers(b)) == ([3], [1, 2, 3])


def test_damaged_steps_are_not_promoted_late_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "a", 1, 2)
    damage(tmp_path / "a" / "step_00000001")
    with run_of(Tier(tmp_path / "a"), Tier(tmp_path / "b")) as run:
        assert run.resume(state()) == 3
    assert numbers(tmp_path / "b") == [2]
    assert "step 1 cannot be promoted" in caplog.text


def test_a_tier_that_is_busy_gets_the_next_step_that_is_saved_and_delays_no_other(tmp_path: Path) -> None:
    register_faulty()
    a, b, c, gate = tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "gate"
    slow = faulty_url(b, Fault("stall", 1, "finish"), gate=gate)
    tiers = [Tier(a, keep=latest(1)), Tier(slow, every=2), Tier(c, keep=latest(2))]
    with run_of(*tiers, wait=False) as run:
        first = saving(run, 2, state(2.0))
        wait_until(lambda: first.promotion_done(1), 60)
        for step in (4, 5):
            save = saving(run, step, state(float(step)))
            save.wait_promoted(60)
        run.wait()
        assert (numbers(a), numbers(b), numbers(c)) == ([2, 5], [], [4, 5])
        gate.touch()
        first.wait_promoted(60)
        run.save(7, state(7.0))
    assert (numbers(a), numbers(b), numbers(c)) == ([7], [2, 7], [5, 7])


def test_all_tiers_together_take_the_memory_of_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ProcessMemory.clear("tiers")  # threads of this process copy: no other opens such a store
    taken: list[int] = []

    def noted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def copy(job: Any, *args: Any, **more: Any) -> Any:
            taken.append(more.get("options", job.options).inflight_nbytes)
            return call(job, *args, **more)

        monkeypatch.setattr(module, name, copy)

    noted(promotions, "promote_saved")
    noted(cadence, "promote_alone")
    options = SaveOptions(durability="process", threads=1, inflight_nbytes=48 << 20)
    a, b, c, d, e = ("process://tiers/" + name for name in "abcde")
    with Checkpointer(tiers=[Tier(a), Tier(b), Tier(c)], options=options) as run:
        run.save(1, state(1.0))
    with Checkpointer(tiers=[Tier(a), Tier(d), Tier(e)], options=options) as run:
        run.resume(state())
    assert taken == [24 << 20] * 4


def test_scores_are_noted_in_each_tier_and_the_best_is_found_in_any(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with run_of(Tier(a, keep=latest(1)), Tier(b, keep=best(1, "score", mode="max"))) as run:
        for step, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
            run.save(step, state(float(step)))
            run.note(step, {"score": score})
        found = run.best()
        assert found is not None
        assert found.step == 2
        held = state()
        run.load(held, "best")
        assert value(held) == 2.0
    assert 2 in numbers(b)


def test_all_ranks_promote_the_same_steps_where_rank_0_decides(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    asked = threading.Lock()
    steps: list[int] = []

    def odd(moment: Any) -> bool:
        with asked:
            steps.append(moment.step)
        return bool(moment.step % 2)

    def work(group: Group) -> None:
        with run_of(Tier(a), Tier(b, every=odd), group=group) as run:
            for step in range(1, 5):
                run.save(step, state(float(step)))

    run_ranks(2, work)
    assert numbers(b) == [1, 3]
    assert steps == [1, 2, 3, 4]


def test_the_last_step_before_the_end_goes_to_the_tiers_that_ask_for_it(tmp_path: Path) -> None:
    a, b, c, notice = (tmp_path / name for name in ("a", "b", "c", "notice"))
    end = on_preemption(file=notice)
    tiers = [
        Tier(a, every=every(steps=1) | end),
        Tier(b, every=every(steps=4) | end),
        Tier(c, every=every(steps=4)),
    ]
    with run_of(*tiers) as run:
        for step in range(1, 8):
            if step == 6:
                notice.touch()
            run.save(step, state(float(step)))
            run.wait()  # a tier that is busy is passed over
            if run.preempted:
                break
    assert (numbers(a), numbers(b), numbers(c)) == ([1, 2, 3, 4, 5, 6], [4, 6], [4])


def test_what_makes_no_sense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a = Tier("a")
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "a root, or tiers"),
        ({"root": "a", "tiers": [Tier("b")]}, "not both"),
        ({"tiers": []}, "list of reknit.Tier"),
        ({"tiers": ["mem://run"]}, "list of reknit.Tier"),
        ({"tiers": [a, Tier("./a")]}, "one root"),
        ({"tiers": [a], "save": every(5)}, r"save=.* beside tiers"),
        ({"tiers": [a], "keep": latest(5)}, r"keep=.* beside tiers"),
        ({"tiers": [a], "options": SaveOptions(promote_to="b")}, "promote_to"),
        ({"tiers": [a], "load_options": reknit.LoadOptions(replicas=("b",))}, "replicas"),
        ({"tiers": [Tier("a", bytes_per_s=5)]}, "first tier"),
        ({"tiers": [Tier("a", every=latest(5))]}, "which steps to keep"),
        ({"tiers": [Tier("a", every=0)]}, "steps"),
        ({"tiers": [Tier("a", keep=on_preemption())]}, "when to save"),
        ({"tiers": [a, Tier("b", every=at(5) | on_preemption())]}, "does not watch for"),
    ]
    for arguments, match in refused:
        with pytest.raises(UsageError, match=match):
            Checkpointer(**arguments)
    wrong: list[dict[str, Any]] = [{"root": ""}, {"root": 7}, {"root": "a", "bytes_per_s": 0}]
    for each in wrong:
        with pytest.raises(UsageError, match=r"root|bytes_per_s"):
            Tier(**each)


def test_memory_a_disk_and_s3_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKNIT_MEMORY", str(tmp_path / "memory"))
    tiers = [
        Tier("mem://run", every=1, keep=latest(2)),
        Tier(tmp_path / "disk", every=2, keep=latest(1)),
        Tier(reach("s3", monkeypatch), every=4, bytes_per_s=1e6),
    ]
    with run_of(*tiers, wait=False) as run:
        for step in range(1, 9):
            saving(run, step, state(float(step))).wait_promoted(60)
        run.wait()
        assert [[each.step for each in reknit.steps(tier.root)] for tier in tiers] == [[7, 8], [8], [4, 8]]
    held = state()
    for step in (8, 7):
        reknit.delete(f"mem://run/step_{step:08d}")
    reknit.delete(tmp_path / "disk" / "step_00000008")
    with run_of(*tiers) as run:
        assert run.resume(held) == 9
    assert value(held) == 8.0
