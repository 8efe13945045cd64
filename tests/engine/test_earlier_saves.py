"""Saves that wait, one after another: a layout that was saved before is neither sent nor planned again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reknit
from reknit.engine.saving import coordinator, layout
from reknit.errors import ReknitError
from reknit.planner.assemble import assemble
from reknit.planner.save import plan_save
from reknit.testing.world import run_ranks
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reknit.comm.group import Group

SIZE = 3
NAMES = ("a", "b", "c", "d")


def tensors(names: Sequence[str], value: float) -> dict[str, Any]:
    """Return plain tensors, of which no framework records the holders."""
    return {name: np.full(40 + 9 * NAMES.index(name), value, np.float32) for name in names}


class Job:
    """Ranks that save step after step in one group, each with tensors of its own choice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, held: Sequence[Sequence[Sequence[str]]], **options: Any) -> None:
        """Save a step for each entry of `held`, which has the names of each rank's tensors."""

        def rank(group: Group) -> None:
            for step, names in enumerate(held):
                self.save(group, step, names[group.rank], **options)

        run_ranks(len(held[0]), rank)

    def save(self, group: Group, step: int, names: Sequence[str], **options: Any) -> None:
        state = {"model": tensors(names, step)}
        path = self.folder / f"step_{step:08d}"
        reknit.save(path, state, step=step, group=group, options=reknit.SaveOptions(**options))

    def check(self, step: int, names: Sequence[str]) -> None:
        """Check every bit of a step, and that it has exactly these tensors."""
        path = self.folder / f"step_{step:08d}"
        assert reknit.verify(path).ok
        found, wanted = tensors(names, -1.0), tensors(names, float(step))
        reknit.load(path, {"model": found})  # it would refuse other names
        assert all(np.array_equal(found[name], wanted[name]) for name in names)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that has an entry for each plan that a rank makes, and each index that is assembled."""
    made: list[str] = []

    def plan(*args: Any) -> Any:
        made.append("plan")
        return plan_save(*args)

    def index(*args: Any) -> Any:
        made.append("index")
        return assemble(*args)

    monkeypatch.setattr(layout, "plan_save", plan)
    monkeypatch.setattr(coordinator, "assemble", index)
    return made


def test_a_layout_is_planned_once(tmp_path: Path, planned: list[str]) -> None:
    job, names = Job(tmp_path), [("a", "b"), ("b", "c"), ("a", "d")]
    job.run([names] * 4)
    assert sorted(planned) == ["index", *["plan"] * SIZE]
    for step in range(4):
        job.check(step, NAMES)


def test_two_layouts_in_turn_are_each_planned_once(tmp_path: Path, planned: list[str]) -> None:
    job = Job(tmp_path)
    one, other = [("a",), ("b",), ("c",)], [("a", "b"), ("b",), ("c",)]
    job.run([one, other] * 3)
    assert planned.count("index") == 2
    for step in range(6):
        job.check(step, NAMES[:3])


def test_other_options_are_planned_anew(tmp_path: Path, planned: list[str]) -> None:
    job = Job(tmp_path)

    def rank(group: Group) -> None:
        for step, limit in enumerate([1 << 30, 1 << 20, 1 << 30]):
            job.save(group, step, ("a", "b"), max_file_nbytes=limit)

    run_ranks(2, rank)
    assert planned.count("index") == 2
    for step in range(3):
        job.check(step, NAMES[:2])


def test_a_known_layout_gets_other_owners_when_other_ranks_change(tmp_path: Path, planned: list[str]) -> None:
    job, both = Job(tmp_path), ("a", "b")
    held = [(both, both), (both, ("c",)), (("d",), both), (both, both), (both, ("c",))]
    job.run(held)
    for step, (one, other) in enumerate(held):
        job.check(step, sorted({*one, *other}))
    assert planned.count("plan") == 6, "the last two steps are known"


LAYOUTS = [("a",), ("a", "b"), ("b", "c", "d")]


@given(st.lists(st.tuples(*[st.sampled_from(LAYOUTS)] * SIZE), min_size=3, max_size=7), st.integers(0, 6))
@settings(max_examples=examples(20), deadline=None)
def test_every_step_is_right_whatever_the_ranks_held_before(
    tmp_path_factory: pytest.TempPathFactory, held: list[tuple[tuple[str, ...], ...]], repeat: int
) -> None:
    held = [*held, held[repeat % len(held)]]
    job = Job(tmp_path_factory.mktemp("job"))
    job.run(held)
    for step, names in enumerate(held):
        job.check(step, sorted({name for mine in names for name in mine}))


def test_after_a_failed_save_every_rank_plans_anew(tmp_path: Path, planned: list[str]) -> None:
    job = Job(tmp_path)

    def rank(group: Group) -> None:
        job.save(group, 0, ("a", "b"))
        broken = {"model": tensors(("a",), 1.0), "b": object() if group.rank else 3}
        with pytest.raises(ReknitError, match="b cannot be saved"):
            reknit.save(tmp_path / "step_00000001", broken, group=group)
        job.save(group, 2, ("a", "b"))

    run_ranks(SIZE, rank)
    assert planned.count("plan") == 2 * SIZE
    job.check(2, NAMES[:2])
    assert not (tmp_path / "step_00000001" / "manifest.json").exists()


def test_copies_are_compared_in_every_save(tmp_path: Path) -> None:
    def rank(group: Group) -> list[str]:
        found = []
        for step in range(3):
            value = float(group.rank if step == 1 else 5)
            report = reknit.save(
                tmp_path / f"step_{step}", {"model": tensors(("a", "b"), value)}, group=group
            ).result()
            found.append(" ".join(report.warnings))
        return found

    for same, differ, again in run_ranks(2, rank):
        assert "model/a" in differ
        assert "model/a" not in same + again
    assert "a" in reknit.open(tmp_path / "step_2").tensors["model"]
    assert "a" not in reknit.open(tmp_path / "step_1").tensors["model"]
