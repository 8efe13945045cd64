"""transformers' Trainer with samplers and transforms that draw from the generators of the whole process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests import ranks
from tests.integrations import hf_orders as jobs
from tests.optional import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs("transformers", "transformers"), needs("accelerate", "accelerate")]

run = partial(ranks.run, warm="trainers", joined=False)

# An epoch has ten steps on one rank, or five of two batches, and five on two ranks.
ALONE = {
    "seedable": (13,), "length": (10, 13), "weighted": (8,), "drawing": (13,), "owning": (10,),
    "persistent": (13,), "stream": (13,), "plain": (13,),
}  # fmt: skip


@pytest.mark.parametrize("kinds", [("seedable", "length", "weighted"), ("drawing", "owning", "plain")])
def test_a_resumed_run_takes_the_samples_of_one_that_never_stopped_bit_for_bit(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    assert run(1, jobs.differing_alone, str(tmp_path), {kind: ALONE[kind] for kind in kinds}) == [[]]


def test_workers_and_streams_do_not_change_the_order(tmp_path: Path) -> None:
    stops = {kind: ALONE[kind] for kind in ("persistent", "stream")}
    assert run(1, jobs.differing_alone, str(tmp_path), stops) == [[]]


def test_each_of_two_ranks_takes_its_samples_again(tmp_path: Path) -> None:
    assert run(2, jobs.differing, str(tmp_path), {"random": (5, 8), "drawing": (8,)}) == [[], []]


def test_the_order_of_several_ranks_is_continued_by_one(tmp_path: Path) -> None:
    both = run(2, jobs.saved, str(tmp_path), "random", 8)
    ((rest, warnings),) = run(1, jobs.continued, str(tmp_path), "random", 8, 4)
    assert rest == [one + other for one, other in zip(*both, strict=True)][8:]
    assert not [text for text in warnings if "order of samples" in text]


@pytest.mark.parametrize(("kind", "sampler"), [("drawing", "Drawing"), ("length", "LengthGroupedSampler")])
def test_an_order_that_cannot_be_continued_is_said(kind: str, sampler: str, tmp_path: Path) -> None:
    run(1, jobs.saved, str(tmp_path), kind, 13)
    for _, warnings in run(2, jobs.continued, str(tmp_path), kind, 13, 1):
        assert [text for text in warnings if f"the order of samples cannot be continued: {sampler}" in text]


def test_a_position_that_transformers_computes_differently_is_said(tmp_path: Path) -> None:
    run(1, jobs.saved, str(tmp_path), "seedable", 13)
    ((_, warnings),) = run(1, jobs.continued, str(tmp_path), "seedable", 13, 4)
    assert [text for text in warnings if "continues after 3 of epoch 2" in text]
