"""The line of descent of a run: which steps did its newest step come from, and which were given up?

A run that goes back to an earlier step leaves the later ones on another branch.  Each save has a generation,
so a branch needs no list of steps: it has the saves from its generation on, up to that of the next branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Branch(NamedTuple):
    """The saves from a generation on, which continue after a `step` of a save of generation `parent`."""

    generation: int
    parent: int
    step: int


class Start(NamedTuple):
    """The step after which a branch begins, and the generation of its save."""

    step: int
    generation: int | None


class _Span(NamedTuple):
    """A part of a line: generations from `first` to before `end`, and numbers above `above` up to `upto`."""

    first: int
    end: float
    above: int
    upto: float

    def holds(self, generation: int, step: int) -> bool:
        """Return whether a step lies in this part."""
        return self.first <= generation < self.end and self.above < step <= self.upto


_FIRST = -1
"""Lowest generation: that of a save whose manifest has none."""


class Line:
    """The line of descent of the newest branch; without branches, all steps are on it."""

    def __init__(self, branches: Iterable[Branch] = ()) -> None:
        self.branches = tuple(sorted(branches))
        self._spans = _spans(self.branches)

    def holds(self, generation: int | None, step: int | None) -> bool:
        """Return whether a step that a save of some generation made is on the line."""
        made = _FIRST if generation is None else generation
        return step is None or any(span.holds(made, step) for span in self._spans)

    def is_begun(self, generation: int | None, step: int | None) -> bool:
        """Return whether a step on the line shows that its newest branch has a committed step."""
        if not self.branches or generation is None or step is None:
            return not self.branches
        return generation >= self.branches[-1].generation and self.holds(generation, step)

    def before(self) -> Line:
        """Return the line before its newest branch."""
        return Line(self.branches[:-1])

    def after(self, branch: Branch) -> Line:
        """Return the line of a branch that begins now; branches of its generation or later end there."""
        return Line([*(each for each in self.branches if each.generation < branch.generation), branch])

    def branched(self, start: Start | None, generation: int) -> Line:
        """Return the line of a branch of a generation that begins after a step; without one this line."""
        if start is None:
            return self
        parent = _FIRST if start.generation is None else start.generation
        return self.after(Branch(generation, parent, start.step))

    def begun(self, steps: Sequence[tuple[int | None, int | None]]) -> Line:
        """Return the line of the newest branch that has one of `steps`, given as generation and number.

        A branch is recorded before its first save.  Until that is committed, the branch before it counts.
        """
        line = self
        while line.branches and not any(line.is_begun(made, number) for made, number in steps):
            line = line.before()
        return line


def _spans(branches: Sequence[Branch]) -> list[_Span]:
    """Return the parts of a line, the newest first."""
    spans: list[_Span] = []
    ends: list[float] = [*(branch.generation for branch in branches), float("inf")]
    at, upto = len(branches), float("inf")
    while at > 0:
        branch = branches[at - 1]
        spans.append(_Span(branch.generation, ends[at], branch.step, upto))
        upto = min(upto, branch.step)
        # The branch that the parent belongs to: the last one that began by then.
        at = next((i for i in range(at - 1, 0, -1) if branches[i - 1].generation <= branch.parent), 0)
    spans.append(_Span(_FIRST, ends[0], _FIRST, upto))
    return spans
