"""How many of the cases that there are does this run have time for?"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

USUAL = 100
_STEPS = (0, 1, 4, 6)
_FEW = 20


def examples(number: int) -> int:
    """Return how many examples this run has time for, of as many as `number` would be good to have.

    The profile says it (``--hypothesis-profile=quick``, ``ci`` or ``nightly``).
    """
    return max(1, number * settings().max_examples // USUAL)


def is_night() -> bool:
    """Return whether there is time for everything."""
    return settings().max_examples > USUAL


def some(cases: Iterable[T]) -> list[T]:
    """Return all of the cases, or every third where this run has little time."""
    return list(cases)[:: 3 if settings().max_examples < _FEW else 1]


def partners(one: str, every: list[str]) -> list[str]:
    """Return what to try one with: itself and three others, so that each is tried with three; at night all.

    What a pair does is what its halves do; that any two halves fit is tried elsewhere, with random layouts.
    """
    if is_night():
        return every
    at = every.index(one)
    return sorted({every[(at + step) % len(every)] for step in _STEPS}, key=every.index)
