"""Tensors that Megatron before 0.16 saved as flat ranges of the parts of a grid, without Megatron."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.errors import CorruptError
from reknit.integrations.megatron.folder import regridded
from reknit.types.box import Box
from reknit.types.manifest import Extent
from reknit.types.shard import TensorSpec
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from reknit.integrations.formats.entries import Chunks


def test_ranges_that_begin_anywhere_in_a_part_lie_at_their_elements() -> None:
    for length, (shape, grid) in one_by_one(
        product(
            [1, 4, 7, 1000],
            [((12,), (1,)), ((12,), (3,)), ((6, 10), (2, 1)), ((6, 10), (3, 5)), ((4, 6, 4), (2, 3, 1))],
        )
    ):
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        part = tuple(n // parts for n, parts in zip(shape, grid, strict=True))
        chunks: Chunks = []
        stored = b""
        for at in np.ndindex(*grid):
            inside = tuple(slice(k * n, (k + 1) * n) for k, n in zip(at, part, strict=True))
            elements = whole[inside].reshape(-1)
            for first in range(0, len(elements), length):
                saved = elements[first : first + length]
                box = Box((*at, first), (*(1 for _ in at), len(saved)))
                chunks.append((box, Extent("data", len(stored), saved.nbytes)))
                stored += saved.tobytes()

        spec, found = regridded("key", TensorSpec((*grid, int(np.prod(part))), "float32"), chunks, shape)

        assert spec == TensorSpec(shape, "float32")
        read = np.full(shape, np.nan, dtype=np.float32)
        for box, extent in found:
            where = tuple(slice(low, low + n) for low, n in zip(box.offsets, box.lengths, strict=True))
            values = np.frombuffer(stored[extent.start : extent.start + extent.nbytes], dtype=np.float32)
            read[where] = values.reshape(box.lengths)
        assert (read == whole).all()


def test_a_grid_that_does_not_fit_its_tensor_is_damage() -> None:
    cases: list[tuple[tuple[int, ...], int, tuple[int, ...], object, str]] = [
        ((2,), 6, (1, 6), (13,), "not of its shape"),
        ((2,), 6, (1, 6), (6, 2), "not of its shape"),
        ((2,), 6, (1, 6), None, "not of its shape"),
        ((0,), 6, (1, 6), (12,), "not of its shape"),
        ((2,), 5, (1, 5), (12,), "parts of 5 elements"),
        ((2,), 6, (2, 6), (12,), "more than one part"),
    ]
    for grid, numel, lengths, shape, why in one_by_one(cases):
        chunks: Chunks = [(Box((0, 0), lengths), Extent("data", 0, 4 * numel))]
        with pytest.raises(CorruptError, match=why):
            regridded("key", TensorSpec((*grid, numel), "float32"), chunks, shape)
