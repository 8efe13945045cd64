"""Several cases in one test, where each is cheap: the report of a failure ends with the case that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

T = TypeVar("T")


def one_by_one(cases: Iterable[T]) -> Iterator[T]:
    """Yield each case, and print it first: pytest shows the output of a test that failed."""
    for case in cases:
        print("the case:", case)
        yield case


def one_by_one_in(folder: Path, cases: Iterable[T]) -> Iterator[tuple[T, Path]]:
    """Yield each case with an empty folder of its own."""
    for number, case in enumerate(one_by_one(cases)):
        place = folder / f"case_{number}"
        place.mkdir()
        yield case, place
