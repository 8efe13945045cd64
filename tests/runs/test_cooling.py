"""Old steps of a run move to a cold store, and their paths go on working."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit import Checkpointer, Cool, Tier
from reknit.engine.memory.workers import Pace
from reknit.errors import UsageError
from reknit.policies import every, latest
from reknit.runs import cadence, cooling
from tests.runs.pieces import damage, numbers, saving, state
from tests.runs.test_at_every_instant import QUICK
from tests.servers import reach

if TYPE_CHECKING:
    from pathlib import Path


def moved(root: Path) -> list[int | None]:
    return [step.step for step in reknit.steps(root) if step.moved_to is not None]


def test_steps_that_are_kept_move_once_they_are_old(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    keep, cool = latest(2) | every(4), Cool(cold, after=latest(2))
    with Checkpointer(hot, keep=keep, cool=cool, wait=True, options=QUICK) as run:
        for step in range(1, 12):
            run.save(step, state(float(step)), {"loss": step})
            run.wait()
    assert (numbers(hot), moved(hot), numbers(cold)) == ([4, 8, 10, 11], [4, 8], [4, 8])
    held = state()
    with Checkpointer(hot, keep=latest(1), cool=cool, wait=True, options=QUICK) as run:
        run.load(held, 4)
        assert held["model"]["w"][0] == 4.0
        assert run.resume(state()) == 12
    assert (numbers(hot), numbers(cold)) == ([11], [])


def test_a_run_goes_on_from_a_step_that_has_moved(tmp_path: Path) -> None:
    hot, cool = tmp_path / "hot", Cool(tmp_path / "cold", after=latest(1))
    with Checkpointer(hot, cool=cool, wait=True, options=QUICK) as run:
        for step in (1, 2):
            run.save(step, state(float(step)))
    assert moved(hot) == [1]
    damage(hot / "step_00000002")
    held = state()
    with Checkpointer(hot, cool=cool, wait=True, options=QUICK) as run:
        assert run.resume(held) == 2
        assert held["model"]["w"][0] == 1.0
        run.save(3, state(3.0))
    assert moved(hot) == [1]


def test_what_a_lost_run_has_moved_loads_comes_back_and_goes_once_it_is_unpinned(tmp_path: Path) -> None:
    hot, cold = tmp_path / "hot", tmp_path / "cold"
    with Checkpointer(hot, cool=Cool(cold, after=latest(1)), wait=True, options=QUICK) as run:
        for step in (1, 2, 3):
            run.save(step, state(float(step)))
    shutil.rmtree(hot)
    first, second = (cold / f"step_{step:08d}" for step in (1, 2))
    with pytest.raises(UsageError, match=f"moved from {hot}"):
        reknit.delete(first)
    assert reknit.unpin(first)
    reknit.delete(first)
    reknit.promote(second, to=hot / second.name)
    held = state()
    with Checkpointer(hot, cool=Cool(cold, after=latest(1)), wait=True, options=QUICK) as run:
        assert run.resume(held) == 3
        assert held["model"]["w"][0] == 2.0
        run.save(3, state(3.0))
    assert (moved(hot), numbers(cold)) == ([2], [2])
    reknit.delete(hot / second.name)
    assert not second.exists()


def test_steps_move_and_are_promoted_late_at_the_rates_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float | None] = []

    class Noted(Pace):
        def __init__(self, bytes_per_s: float | None = None) -> None:
            rates.append(bytes_per_s)
            super().__init__(bytes_per_s)

    monkeypatch.setattr(cooling, "Pace", Noted)
    monkeypatch.setattr(cadence, "Pace", Noted)
    cool = Cool(tmp_path / "cold", after=latest(1), bytes_per_s=1e9)
    with Checkpointer(tmp_path / "hot", cool=cool, wait=True, options=QUICK) as run:
        for step in (1, 2):
            run.save(step, state())
    assert rates == [1e9]
    with Checkpointer(tiers=[Tier(tmp_path / "hot"), Tier(tmp_path / "b", bytes_per_s=2e9)]) as run:
        run.resume(state())
    assert numbers(tmp_path / "b") == [1, 2]
    assert rates == [1e9, 2e9, 2e9]


def test_the_newest_whole_step_never_moves(tmp_path: Path) -> None:
    cool = Cool(tmp_path / "cold", after=lambda steps: set())
    with Checkpointer(tmp_path / "hot", cool=cool, wait=True, options=QUICK) as run:
        for step in (1, 2):
            run.save(step, state())
    assert moved(tmp_path / "hot") == [1]


def test_a_tier_has_a_cold_store_on_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cool = Cool(reach("s3", monkeypatch), after=latest(1), bytes_per_s=1e6)
    tiers = [Tier(tmp_path / "a", keep=latest(1)), Tier(tmp_path / "b", every=2, cool=cool)]
    with Checkpointer(tiers=tiers, options=QUICK) as run:
        for step in range(1, 7):
            saving(run, step, state(float(step))).wait_promoted(60)
    assert (numbers(tmp_path / "b"), moved(tmp_path / "b")) == ([2, 4, 6], [2, 4])
    held = state()
    with Checkpointer(tiers=tiers, options=QUICK) as run:
        run.load(held, 4)
    assert held["model"]["w"][0] == 4.0


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"root": "", "after": latest(1)}, "path or a URL"),
        ({"root": "s3://b/x?retry_s=1", "after": latest(1)}, "has options"),
        ({"root": "x", "after": 5}, "policy"),
        ({"root": "x", "after": latest(1), "bytes_per_s": -1}, "bytes_per_s"),
    ]
    for arguments, match in refused:
        with pytest.raises(UsageError, match=match):
            Cool(**arguments)
    with pytest.raises(UsageError, match="one root"):
        Checkpointer(tmp_path, cool=Cool(tmp_path, after=latest(1)))
    with pytest.raises(UsageError, match=r"cool is a reknit\.Cool"):
        Checkpointer(tmp_path, cool=5)  # type: ignore[arg-type]
