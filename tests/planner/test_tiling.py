from __future__ import annotations

import random
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.planner import tiling
from reknit.planner.tiling import untiled
from reknit.types.box import Box, flat_range_boxes
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence


def check(shapes: Sequence[tuple[int, ...]], chunks: Sequence[tuple[int, Box]]) -> list[int]:
    """Run the columnar check on Python boxes; return the numbers of broken tensors."""
    width = max([len(s) for s in shapes] + [1])
    chunks = sorted(chunks, key=lambda c: (c[0], c[1].offsets))
    pad = [
        (box.offsets + (0,) * (width - box.ndim), box.lengths + (1,) * (width - box.ndim))
        for _, box in chunks
    ]
    tensor = np.array([t for t, _ in chunks], np.int64)
    offsets = np.array([o for o, _ in pad], np.int64).reshape(-1, width)
    lengths = np.array([n for _, n in pad], np.int64).reshape(-1, width)
    return [gap.tensor for gap in untiled(shapes, tensor, offsets, lengths)]


def is_tiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Count how often each element is covered."""
    count = np.zeros(shape, np.int64)
    for box in boxes:
        count[box.slices()] += 1
    return bool(boxes) and bool((count == 1).all())


def cut(shape: tuple[int, ...], rng: random.Random, depth: int) -> list[Box]:
    """Cut a shape at random places along random dimensions."""
    boxes = [Box.whole(shape)]
    for _ in range(depth):
        box = boxes.pop(rng.randrange(len(boxes)))
        splittable = [d for d in range(box.ndim) if box.lengths[d] > 1]
        if not splittable:
            boxes.append(box)
            continue
        d = rng.choice(splittable)
        k = rng.randrange(1, box.lengths[d])
        left = tuple(k if i == d else n for i, n in enumerate(box.lengths))
        right = tuple(n - k if i == d else n for i, n in enumerate(box.lengths))
        boxes.append(Box(box.offsets, left))
        boxes.append(Box(tuple(o + (k if i == d else 0) for i, o in enumerate(box.offsets)), right))
    return boxes


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[tuple[int, Box]]]:
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=4))
    chunks = [(t, box) for t, shape in enumerate(shapes) for box in cut(shape, rng, rng.randrange(5))]
    for _ in range(draw(st.integers(0, 2))):  # damage
        if not chunks:
            break
        k = rng.randrange(len(chunks))
        number, box = chunks.pop(k)
        action = rng.randrange(3)
        if action == 0:
            chunks += [(number, box), (number, box)]
        elif action == 1 and box.ndim:
            d = rng.randrange(box.ndim)
            moved = max(0, min(box.offsets[d] + rng.choice((-1, 1)), shapes[number][d] - box.lengths[d]))
            chunks.append(
                (number, Box(tuple(moved if i == d else o for i, o in enumerate(box.offsets)), box.lengths))
            )
    return shapes, chunks


@given(checkpoints())
def test_the_check_agrees_with_counting_also_when_positions_do_not_fit_in_one_number(
    case: tuple[list[tuple[int, ...]], list[tuple[int, Box]]],
) -> None:
    shapes, chunks = case
    expected = [t for t, shape in enumerate(shapes) if not is_tiled(shape, [b for n, b in chunks if n == t])]
    assert check(shapes, chunks) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "_EXACT", 0.0)
        assert check(shapes, chunks) == expected


@given(st.integers(0, 1 << 30), st.booleans())
def test_cells_of_a_grid_are_found_whole_and_broken(seed: int, damage: bool) -> None:
    rng = random.Random(seed)
    shapes, chunks = [], []
    for number in range(3):
        cuts = [sorted({0, *rng.sample(range(1, 9), rng.randrange(4)), 9}) for _ in range(3)]
        shapes.append((9, 9, 9))
        for corner in product(*(list(pairwise(axis)) for axis in cuts)):
            chunks.append((number, Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))))
    broken = []
    if damage:
        number, box = chunks[rng.randrange(len(chunks))]
        twin = [k for k, (n, other) in enumerate(chunks) if n == number and other.lengths == box.lengths]
        if len(twin) > 1:  # the right number of elements, one cell twice
            chunks[twin[0]] = chunks[twin[1]]
            broken = [number]
    assert check(shapes, chunks) == broken


@given(st.integers(0, 1 << 30))
def test_boxes_of_flat_ranges_are_found_whole_and_broken(seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(3, 4, 5), (7,), (2, 2, 2)]
    chunks = []
    for number, shape in enumerate(shapes):
        cuts = sorted({0, *rng.sample(range(prod(shape)), 3), prod(shape)})
        for first, end in pairwise(cuts):
            chunks += [(number, box) for box in flat_range_boxes(shape, first, end - first)]
    assert check(shapes, chunks) == []
    number, _ = chunks.pop(rng.randrange(len(chunks)))
    assert check(shapes, chunks) == [number]


LINE = [Box((0, 0), (2, 2)), Box((1, 0), (1, 4))]
"""Boxes of a tensor of 2 x 4, the second of which begins where the one before seems to end."""


@table(
    ("shape", "boxes"),
    [
        ((4, 4), [Box((0, 0), (1, 8)), Box((2, 0), (1, 8))]),  # it goes beyond its row
        # sizes that add up, ranges that overlap by as much as is missing elsewhere, no ranges of the line
        ((3, 3), [Box((0, 0), (2, 2)), Box((0, 1), (2, 2)), Box((2, 0), (1, 3)), Box((0, 0), (1, 1))]),
        ((6,), [Box((0,), (2,)), Box((0,), (2,)), Box((2,), (2,))]),
        ((2, 4), LINE),
        # a grid but for two cells that overlap in one dimension
        ((3, 2), [Box((0, 0), (2, 1)), Box((0, 1), (1, 1)), Box((1, 0), (2, 1)), Box((2, 1), (1, 1))]),
    ],
)
def test_boxes_that_look_like_a_tiling_and_are_none_are_found(
    shape: tuple[int, ...], boxes: list[Box]
) -> None:
    assert check([shape], [(0, box) for box in boxes]) == [0]


def test_all_broken_tensors_are_found_however_many_have_the_right_number_of_elements() -> None:
    assert check([(2, 4)] * 3, [(number, box) for number in range(3) for box in LINE]) == [0, 1, 2]


def test_a_tensor_that_nobody_wrote_is_found_even_when_it_has_no_elements() -> None:
    assert check([(2,), (0, 3), ()], [(0, Box((0,), (2,)))]) == [1, 2]
