from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reknit.types.box import Box, flat_range_boxes
from tests.tables import table

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=5).map(tuple)


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(0, prod(shape) - start))


@given(flat_ranges())
def test_a_flat_range_becomes_few_boxes_that_hold_its_elements_in_storage_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, numel = case
    boxes = flat_range_boxes(shape, start, numel)
    elements = np.arange(prod(shape)).reshape(shape)
    laid_out = [int(e) for box in boxes for e in elements[box.slices()].reshape(-1)]
    assert laid_out == list(range(start, start + numel))
    assert all(box.fits(shape) for box in boxes)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_flat_range_of_a_huge_tensor_needs_no_more_work_than_of_a_small_one() -> None:
    boxes = flat_range_boxes((1 << 20, 1 << 20, 3), 7, (1 << 41) + 5)
    assert sum(box.numel for box in boxes) == (1 << 41) + 5
    assert len(boxes) <= 5


@table(("start", "numel"), [(-1, 2), (0, 13), (12, 1), (3, -1)])
def test_a_flat_range_outside_its_box_is_refused(start: int, numel: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        flat_range_boxes((3, 4), start, numel)


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes)

    def box() -> Box:
        offsets = tuple(draw(st.integers(0, n)) for n in shape)
        return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))

    return shape, box(), box()


@given(box_pairs())
@example(((4,), Box((0,), (3,)), Box((1,), (3,))))
@example(((4,), Box((1,), (3,)), Box((0,), (3,))))
def test_the_intersection_of_two_boxes_holds_exactly_their_common_elements(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    shape, a, b = case
    elements = np.arange(prod(shape)).reshape(shape)
    common = set(elements[a.slices()].reshape(-1).tolist()) & set(elements[b.slices()].reshape(-1).tolist())
    found = a.intersect(b)
    assert (found is None) == (not common)
    assert (set() if found is None else set(elements[found.slices()].reshape(-1).tolist())) == common


def test_a_box_reads_like_a_slice() -> None:
    assert str(Box((0, 256), (128, 256))) == "[0:128,256:512]"
    assert str(Box((), ())) == "[]"
