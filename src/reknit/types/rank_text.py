"""Which ranks or steps are these, in words?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_PER_HOLE = 8
"""Where there are so many times as many ranks as gaps between them, the gaps are named."""


class _Span(NamedTuple):
    """The numbers from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def size(self) -> int:
        return self.high - self.low + 1

    def __str__(self) -> str:
        return f"{self.low:,}" if self.size == 1 else f"{self.low:,}-{self.high:,}"


def spelled(ranks: Iterable[int], limit: int = 16) -> str:
    """Return the ranks as text, with neighbours joined: ``rank 3``, ``ranks 0-4, 7``.

    Where few are left out between the first and the last, these are named: ``ranks 0-8,999 except 17``.  At
    most `limit` spans are named.
    """
    return named(ranks, "rank", limit)


def named(numbers: Iterable[int], noun: str, limit: int = 16) -> str:
    """Return the numbers of things that are called `noun` as text, as `spelled` does it with ranks."""
    spans = _spans(numbers)
    if not spans:
        return f"no {noun}"
    if len(spans) == 1 and spans[0].size == 1:
        return f"{noun} {spans[0]}"
    holes = [_Span(before.high + 1, after.low - 1) for before, after in pairwise(spans)]
    if 0 < len(holes) <= limit and _PER_HOLE * _num(holes) <= _num(spans):
        return f"{noun}s {_Span(spans[0].low, spans[-1].high)} except {', '.join(map(str, holes))}"
    rest = _num(spans[limit:])
    return f"{noun}s {', '.join(map(str, spans[:limit]))}" + (f" and {rest:,} more" if rest else "")


def _spans(numbers: Iterable[int]) -> list[_Span]:
    """Return the spans of neighbours, in order."""
    spans: list[_Span] = []
    for number in sorted(set(numbers)):
        low = spans.pop().low if spans and number == spans[-1].high + 1 else number
        spans.append(_Span(low, number))
    return spans


def _num(spans: Iterable[_Span]) -> int:
    return sum(span.size for span in spans)
