"""Patterns that match no name: which one is meant?"""

from __future__ import annotations

from reknit.types.wanted import suggest
from tests.tables import table

NAMES = ["model/layers.0.weight", "model/layers.0.bias", "model/head.weight", "optimizer/step"]


@table(
    ("names", "pattern", "question"),
    [
        (NAMES, "model/layer.*", "did you mean 'model/layers.*'?"),  # a part is misspelled
        (NAMES, "modle/head.*", "did you mean 'model/head.*'?"),  # the item is
        (NAMES, "head.weight", "did you mean 'model/head.weight'?"),  # the item is lacking
        (NAMES, "optimizer/model/head.weight", "did you mean 'model/head.weight'?"),  # an item is too much
        (NAMES, "zzz", f"the names are {str(NAMES[:3])[1:-1]} and 1 more"),
        ([], "something/else", ""),
        (["w"], "something/else", "the names are 'w'"),
    ],
)
def test_a_pattern_is_meant_that_matches_and_is_most_like_the_one_given(
    names: list[str], pattern: str, question: str
) -> None:
    assert suggest(pattern, names) == question
