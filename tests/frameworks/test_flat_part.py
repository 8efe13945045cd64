"""Consecutive elements of a flattened tensor become boxes with their memory."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reknit.frameworks.torch.dtensor import MeshCut, applied, boxes
from reknit.frameworks.torch.flat_part import FlatPart, storage_order
from reknit.types.box import Box
from reknit.types.shard import Strided
from tests.tables import table

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def flattened(draw: st.DrawFn) -> tuple[torch.Tensor, FlatPart, torch.Tensor]:
    """Return a whole tensor, a part of one rank, and the rank's flat memory with other things in it."""
    shape = draw(shapes)
    whole = torch.arange(prod(shape), dtype=torch.int64).reshape(shape)
    held: Any = [(Box.whole(shape), Box.whole(shape))]
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        size = draw(st.integers(1, 3))
        cut = MeshCut(dim, size, draw(st.integers(0, size - 1)), draw(st.sampled_from([0, 2])))
        held = boxes(applied(shape, [cut]))
    lengths = tuple(max((inside.ends[d] for _, inside in held), default=0) for d in range(len(shape)))
    local = torch.empty(lengths, dtype=torch.int64)
    for box, inside in held:
        local[inside.slices()] = whole[box.slices()]
    order = draw(st.permutations(range(len(shape))))
    stored = local.permute(order).reshape(-1)
    start = draw(st.integers(0, stored.numel()))
    numel = draw(st.integers(0, stored.numel() - start))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    memory = torch.full((before + numel + after + 5,), -1, dtype=torch.int64)[2:-3]
    memory[before : before + numel] = stored[start : start + numel]
    part = FlatPart(shape, lengths, tuple(held), tuple(order), start, numel, before, before + numel + after)
    return whole, part, memory


@given(flattened())
def test_parts_are_exactly_the_elements_of_the_range_now_and_later_and_nothing_else_is_filled(
    case: tuple[torch.Tensor, FlatPart, torch.Tensor],
) -> None:
    whole, part, memory = case
    expected, found = memory.clone(), list[int]()
    for (box, seen), (same, unseen) in zip(part.parts(memory), part.unseen(memory), strict=True):
        assert torch.equal(seen, whole[box.slices()])
        assert not seen.numel() or seen.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        found += seen.reshape(-1).tolist()
        later = unseen.view() if isinstance(unseen, Strided) else unseen
        assert same == box
        assert (later.shape, later.stride(), later.tolist()) == (seen.shape, seen.stride(), seen.tolist())
        assert not seen.numel() or later.data_ptr() == seen.data_ptr()
    assert sorted(found) == sorted(memory[part.offset : part.offset + part.numel].tolist())
    memory[part.offset : part.offset + part.numel] = -2
    for box, data in part.parts(memory):
        data.copy_(whole[box.slices()])
    assert torch.equal(memory, expected)


def test_a_range_inside_two_boxes_of_a_local_tensor_is_cut_at_their_border() -> None:
    # Rows 0 and 1 of the local tensor are rows 2 and 3 of the whole one, the others rows 8 and 9.
    held = ((Box((2, 0), (2, 3)), Box((0, 0), (2, 3))), (Box((8, 0), (2, 3)), Box((2, 0), (2, 3))))
    part = FlatPart((12, 3), (4, 3), held, None, 3, 7, 0, 7)
    parts = part.parts(torch.arange(7))
    assert [(box.offsets, box.lengths, data.tolist()) for box, data in parts] == [
        ((3, 0), (1, 3), [[0, 1, 2]]),
        ((8, 0), (1, 3), [[3, 4, 5]]),
        ((9, 0), (1, 1), [[6]]),
    ]


def test_memory_fits_flat_or_as_a_whole_local_tensor() -> None:
    held = ((Box.whole((2, 3)), Box.whole((2, 3))),)
    whole = FlatPart((2, 3), (2, 3), held, None, 0, 6, 4, 16)
    some = FlatPart((2, 3), (2, 3), held, None, 1, 5, 0, 5)
    assert whole.fits(torch.zeros(16))
    assert whole.fits(torch.zeros(2, 3))
    assert not whole.fits(torch.zeros(6))
    assert whole.alone.fits(torch.zeros(6))
    assert some.fits(torch.zeros(5))
    assert not some.fits(torch.zeros(10)[::2])
    assert not some.fits(torch.zeros(2, 3))
    assert not some.fits(torch.zeros(()))
    held = ((Box.whole((5,)), Box.whole((5,))),)
    row = FlatPart((5,), (5,), held, None, 0, 5, 4, 16)
    assert not row.fits(torch.zeros(5)), "it would be read behind the elements before it in the flat memory"
    assert row.alone.fits(torch.zeros(5))
    assert row.alone is row.alone


def test_a_tensor_without_elements_is_one_empty_box_and_a_rank_without_elements_has_none() -> None:
    assert [box for box, _ in FlatPart.nothing((0, 3), 8).parts(torch.zeros(8))] == [Box((0, 0), (0, 3))]
    assert FlatPart.nothing((2, 3), 8).parts(torch.zeros(8)) == ()


@given(shapes, st.randoms(use_true_random=False))
def test_the_storage_order_of_a_permuted_tensor_flattens_it_as_it_lies(shape: Any, random: Any) -> None:
    dims = list(range(len(shape)))
    random.shuffle(dims)
    tensor = torch.arange(prod(shape)).reshape([shape[d] for d in dims])
    tensor = tensor.permute([dims.index(d) for d in range(len(shape))])
    order = storage_order(tensor.shape, tensor.stride())
    flat = tensor if order is None else tensor.permute(order)
    assert flat.reshape(-1).tolist() == list(range(prod(shape)))


@table("strides", [(0, 1), (4, 1), (1, 1)])
def test_memory_with_gaps_or_twice_used_places_has_no_storage_order(strides: Any) -> None:
    with pytest.raises(ValueError, match="not dense"):
        storage_order((2, 3), strides)
