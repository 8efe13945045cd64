"""Which ranks or steps are these, in words?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_PER_HOLE = 8
"""Gaps are named if the number of ranks is at least so many times the number of gaps."""


class _NumberRange(NamedTuple):
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

    If few ranks between the first and the last are missing, these are named: ``ranks 0-8,999 except 17``.  At
    most `limit` ranges are named.
    """
    return named(ranks, "rank", limit)


def named(numbers: Iterable[int], noun: str, limit: int = 16) -> str:
    """Return numbers as text with a `noun`, as `spelled` does with ranks."""
    ranges = _ranges_of(numbers)
    if not ranges:
        return f"no {noun}"
    if len(ranges) == 1 and ranges[0].size == 1:
        return f"{noun} {ranges[0]}"
    holes = [_NumberRange(before.high + 1, after.low - 1) for before, after in pairwise(ranges)]
    if 0 < len(holes) <= limit and _PER_HOLE * _num(holes) <= _num(ranges):
        return f"{noun}s {_NumberRange(ranges[0].low, ranges[-1].high)} except {', '.join(map(str, holes))}"
    rest = _num(ranges[limit:])
    return f"{noun}s {', '.join(map(str, ranges[:limit]))}" + (f" and {rest:,} more" if rest else "")


def _ranges_of(numbers: Iterable[int]) -> list[_NumberRange]:
    """Return the ranges of consecutive numbers, in order."""
    ranges: list[_NumberRange] = []
    for number in sorted(set(numbers)):
        low = ranges.pop().low if ranges and number == ranges[-1].high + 1 else number
        ranges.append(_NumberRange(low, number))
    return ranges


def _num(ranges: Iterable[_NumberRange]) -> int:
    return sum(each.size for each in ranges)
