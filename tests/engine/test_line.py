"""The line of descent holds the steps that the newest one came from, and no step that was given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.stored.run_record import Branch, Line

ACTS = st.lists(
    st.tuples(st.sampled_from(["save", "save", "restart", "load"]), st.integers(0, 30)), max_size=40
)


class Reference:
    """A run whose steps name the step they came from."""

    def __init__(self) -> None:
        self.folder: dict[int, int] = {}
        self.saves: list[tuple[int, int, int | None]] = []
        self.at: int | None = None
        self.generation = 0
        self.line = Line()

    def save(self, more: int) -> None:
        step = 1 + (0 if self.at is None else self.saves[self.at][1]) + more % 3
        self.saves.append((self.generation, step, self.at))
        self.at = self.folder[step] = len(self.saves) - 1

    def restart(self, _: int) -> None:
        self.generation += 1 + _ % 3

    def load(self, which: int) -> None:
        there = sorted(self.folder)
        if not there:
            return
        self.at = self.folder[there[which % len(there)]]
        parent, step, _ = self.saves[self.at]
        self.generation += 1
        self.line = self.line.after(Branch(self.generation, parent, step))

    def ancestry(self, save: int | None) -> set[int]:
        found = set()
        while save is not None:
            found.add(save)
            save = self.saves[save][2]
        return found


@given(ACTS)
def test_a_line_holds_exactly_the_steps_that_the_newest_came_from(acts: list[tuple[str, int]]) -> None:
    run = Reference()
    for act, number in acts:
        getattr(run, act)(number)
    if not run.saves:
        return
    there = {save: run.saves[save][:2] for save in run.folder.values()}
    found = {save for save, each in there.items() if run.line.begun([*there.values()]).holds(*each)}
    assert found == run.ancestry(len(run.saves) - 1) & there.keys()


def test_a_step_that_was_given_up_is_on_the_line_again_when_a_run_continues_from_it() -> None:
    line = Line().after(Branch(5, 1, 10)).after(Branch(9, 1, 30))
    assert line.holds(1, 30)
    assert not line.holds(5, 15)
    assert line.holds(9, 31)
