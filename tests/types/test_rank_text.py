"""The text for a set of ranks."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from reknit.types.small import spelled


def read(text: str) -> set[int]:
    """Return the ranks that a text names."""
    spans = [span.split("-") for span in re.findall(r"\d+(?:-\d+)?", text.replace(",000", "000"))]
    return {rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)}


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranks_are_spelled_so_that_they_can_be_read_back(ranks: set[int]) -> None:
    text = spelled(ranks, limit=200)
    named, _, without = text.partition(" except ")
    assert read(named) - read(without) == ranks
    assert text.startswith("rank ") == (len(ranks) == 1)


def test_the_few_that_are_left_out_are_named() -> None:
    assert spelled(set(range(9_000)) - {17}) == "ranks 0-8,999 except 17"
    assert spelled(set(range(100)) - {17, 18, 40}) == "ranks 0-99 except 17-18, 40"
    assert spelled(set(range(9_000)) - set(range(5, 1_000, 2)), limit=3) == "ranks 0-4, 6, 8 and 8,495 more"
    assert spelled({0, 1, 3}) == "ranks 0-1, 3"
    assert spelled([3, 3]) == "rank 3"
    assert spelled([]) == "no rank"
