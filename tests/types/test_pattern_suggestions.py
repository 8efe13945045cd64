"""Patterns that match no name: which one is meant?"""

from __future__ import annotations

from reknit.types.pattern_suggestions import suggest
from tests.tables import table

NAMES = ["model/layers.0.weight", "model/layers.0.bias", "model/head.weight", "optimizer/step"]


@table(
    ("pattern", "question"),
    [
        ("model/layer.*", "did you mean 'model/layers.*'?"),  # a part is misspelled
        ("modle/head.*", "did you mean 'model/head.*'?"),  # the item is
        ("head.weight", "did you mean 'model/head.weight'?"),  # the item is lacking
        ("optimizer/model/head.weight", "did you mean 'model/head.weight'?"),  # an item is too much
        (
            "zzz",
            "the names are 'model/layers.0.weight', 'model/layers.0.bias', 'model/head.weight' and 1 more",
        ),
    ],
)
def test_a_pattern_is_meant_that_matches_and_is_most_like_the_one_given(pattern: str, question: str) -> None:
    assert suggest(pattern, NAMES) == question


@table(("names", "question"), [([], ""), (["w"], "the names are 'w'")])
def test_with_few_names_all_are_shown(names: list[str], question: str) -> None:
    assert suggest("something/else", names) == question
