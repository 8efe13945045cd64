"""How many of all cases does this run have time for?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

USUAL = 100
VARIABLE = "REKNIT_TEST_EXAMPLES"
"""The variable with the number of examples of the profile, which processes of tests inherit."""

_STEPS = (0, 1, 4)
_FEW = 20


def _of_profile() -> int:
    return int(os.environ.get(VARIABLE) or settings().max_examples)


def examples(number: int) -> int:
    """Return the number of examples for this run, where `number` is the desirable one.

    It depends on the profile (``--hypothesis-profile=quick``, ``ci`` or ``nightly``).
    """
    return max(1, number * _of_profile() // USUAL)


def is_night() -> bool:
    """Return whether there is time for everything."""
    return _of_profile() > USUAL


def at_night(instead: str) -> pytest.MarkDecorator:
    """Return the mark of a long test that runs at night, where `instead` names the tests of the day."""
    return pytest.mark.skipif(not is_night(), reason=f"at night: {instead}")


def some(cases: Iterable[T]) -> list[T]:
    """Return all of the cases, or every third if this run has little time."""
    return list(cases)[:: 3 if _of_profile() < _FEW else 1]


def thinned(cases: Iterable[T], every: int) -> list[T]:
    """Return all of the cases at night, and by day one of so many, beginning with the first.

    Cases of a product stay a mixture of all its factors if `every` has no divisor in common with their sizes.
    """
    return list(cases)[:: 1 if is_night() else every]


def partners(one: str, every: list[str]) -> list[str]:
    """Return the partners of one case: itself and two others, or all at night.

    A few pairs suffice, since saves and loads are independent, and random layouts test their combination.
    """
    if is_night():
        return every
    at = every.index(one)
    return sorted({every[(at + step) % len(every)] for step in _STEPS}, key=every.index)
