"""Arenas: where files lie in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.memory.workers import PAGE_NBYTES, SPAN_NBYTES, Span, arena_spans, borrowed, image_nbytes
from reknit.errors import UsageError
from reknit.format.checksum import BLOCK_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_arenas_of_a_block_serve_again_but_never_two_at_once() -> None:
    with borrowed(BLOCK_NBYTES) as one, borrowed(BLOCK_NBYTES) as other:
        assert one is not other
        assert one.nbytes == other.nbytes == BLOCK_NBYTES
    with borrowed(BLOCK_NBYTES) as again, borrowed(PAGE_NBYTES) as small:
        assert again in (one, other)
        assert small.nbytes == PAGE_NBYTES
    with borrowed(PAGE_NBYTES) as next_small:
        assert next_small is not small, "only those of a block are kept"


SIZES = st.lists(
    st.one_of(
        st.integers(0, 3 * PAGE_NBYTES),
        st.integers(0, 5 * SPAN_NBYTES),
        st.builds(lambda k, d: max(0, k * SPAN_NBYTES + d), st.integers(0, 5), st.integers(-1, 1)),
    ),
    max_size=12,
)
CAPACITIES = st.one_of(
    st.integers(SPAN_NBYTES, 40 * SPAN_NBYTES), st.builds(lambda k: k * SPAN_NBYTES, st.integers(1, 40))
)


def written_before(spans: Sequence[Span], number: int) -> set[int]:
    """Return all spans that are certainly written out when this one is filled."""
    found = set()
    while (number := spans[number].after) != -1:
        found.add(number)
    return found


@given(SIZES, CAPACITIES)
def test_spans_cover_each_file_in_order_on_pages_of_the_arena_and_none_is_overwritten_while_it_is_live(
    sizes: list[int], capacity: int
) -> None:
    reached: dict[int, int] = {}
    last = 0
    spans = arena_spans(sizes, capacity)
    for number, span in enumerate(spans):
        assert last <= span.file
        last = span.file
        assert span.start == reached.get(span.file, 0)
        assert span.start % SPAN_NBYTES == span.at % PAGE_NBYTES == 0
        assert 0 < span.nbytes <= SPAN_NBYTES
        assert 0 <= span.at <= capacity - span.nbytes
        reached[span.file] = span.start + span.nbytes
        assert span.after < number
        over = written_before(spans, number)
        for earlier, other in enumerate(spans[:number]):
            if other.at < span.at + span.nbytes and span.at < other.at + other.nbytes:
                assert earlier in over
    assert reached == {file: size for file, size in enumerate(sizes) if size}
    if image_nbytes(sizes) > capacity:
        num_slots = capacity // SPAN_NBYTES
        assert [span.after for span in spans] == [max(-1, k - num_slots) for k in range(len(spans))]


@given(SIZES)
def test_what_fits_is_the_image_of_the_files_and_waits_for_nothing(sizes: list[int]) -> None:
    capacity = image_nbytes(sizes)
    spans = arena_spans(sizes, capacity)
    assert all(span.after == -1 for span in spans)
    assert len({span.at - span.start for span in spans}) == sum(size > 0 for size in sizes)
    assert capacity - sum(sizes) < PAGE_NBYTES * max(1, len(sizes))
    assert max((span.at + span.nbytes for span in spans), default=0) <= capacity


def test_one_byte_too_little_makes_a_ring() -> None:
    sizes = [SPAN_NBYTES + 1, 0, PAGE_NBYTES]
    whole = image_nbytes(sizes)
    assert whole == SPAN_NBYTES + 2 * PAGE_NBYTES
    assert arena_spans(sizes, whole) == [
        Span(0, 0, SPAN_NBYTES, 0, -1),
        Span(0, SPAN_NBYTES, 1, SPAN_NBYTES, -1),
        Span(2, 0, PAGE_NBYTES, SPAN_NBYTES + PAGE_NBYTES, -1),
    ]
    assert arena_spans(sizes, whole - 1) == [
        Span(0, 0, SPAN_NBYTES, 0, -1),
        Span(0, SPAN_NBYTES, 1, 0, 0),
        Span(2, 0, PAGE_NBYTES, 0, 1),
    ]


def test_an_arena_that_holds_neither_all_nor_one_span_is_refused() -> None:
    assert arena_spans([100], PAGE_NBYTES) == [Span(0, 0, 100, 0, -1)]
    assert arena_spans([0, 0], 0) == []
    with pytest.raises(UsageError, match="cannot hold a span"):
        arena_spans([PAGE_NBYTES + 1], 2 * PAGE_NBYTES - 1)
