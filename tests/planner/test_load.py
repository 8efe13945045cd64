from __future__ import annotations

import random
from itertools import product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reknit.planner.load import Granularity, plan_load
from reknit.types.box import Box
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import TensorSpec
from tests.planner.test_tiling import cut

FILES = 3


def saved(shapes: list[tuple[int, ...]], rng: random.Random) -> tuple[Index, list[int], list[np.ndarray]]:
    """Lay random chunks of int16 tensors out in files; return index, file sizes, and which element each pair
    of bytes is.
    """
    width = max([len(s) for s in shapes] + [1])
    chunks = [
        (t, box) for t, shape in enumerate(shapes) if prod(shape) for box in cut(shape, rng, rng.randrange(6))
    ]
    chunks.sort(key=lambda c: (c[0], c[1].offsets))
    ends = [64] * FILES
    rows = []
    for t, box in chunks:
        file = rng.randrange(FILES)
        start = ends[file] + 2 * rng.randrange(3)
        ends[file] = start + 2 * box.numel
        pad = width - box.ndim
        rows.append((t, box.offsets + (0,) * pad, box.lengths + (1,) * pad, file, start, 2 * box.numel))
    columns = [np.array([row[k] for row in rows], np.int64) for k in range(6)]
    columns[1], columns[2] = columns[1].reshape(-1, width), columns[2].reshape(-1, width)
    tensors = tuple(
        TensorEntry("m", f"t{n:03d}", TensorSpec(shape, "int16")) for n, shape in enumerate(shapes)
    )
    content = [np.full(end // 2, -1, np.int64) for end in ends]
    for t, offsets, lengths, file, start, nbytes in rows:
        ndim = len(shapes[t])
        elements = np.arange(prod(shapes[t])).reshape(shapes[t]) + 1_000_000 * t
        part = elements[Box(offsets[:ndim], lengths[:ndim]).slices()].reshape(-1)
        content[file][start // 2 : (start + nbytes) // 2] = part
    return Index(tensors, tuple(f"f{k}" for k in range(FILES)), *columns), ends, content


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], list[tuple[int, Box]], int]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), min_size=1, max_size=4))
    wanted = []
    for _ in range(draw(st.integers(0, 5))):
        t = draw(st.integers(0, len(shapes) - 1))
        offsets = tuple(draw(st.integers(0, n)) for n in shapes[t])
        lengths = tuple(draw(st.integers(0, n - o)) for n, o in zip(shapes[t], offsets, strict=True))
        wanted.append((t, Box(offsets, lengths)))
    return shapes, wanted, draw(st.integers(0, 1 << 30))


granularities = st.sampled_from(
    [Granularity(1, 0, 1 << 20), Granularity(1, 6, 64), Granularity(16, 0, 32), Granularity(1, 0, 16)]
)


@given(cases(), granularities)
def test_the_reads_hold_every_wanted_element_where_the_plan_says(
    case: tuple[list[tuple[int, ...]], list[tuple[int, Box]], int], cut_to: Granularity
) -> None:
    shapes, wanted, seed = case
    index, sizes, content = saved(shapes, random.Random(seed))
    plan = plan_load(index, wanted, sizes, cut_to)
    got = [np.full(box.lengths, -1, np.int64) for _, box in wanted]
    reads = list(
        zip(plan.read_file.tolist(), plan.read_start.tolist(), plan.read_nbytes.tolist(), strict=True)
    )
    for number, (file, start, nbytes) in enumerate(reads):
        assert 0 <= start < start + nbytes <= sizes[file]
        assert nbytes <= cut_to.nbytes
        assert start % cut_to.align == 0
        assert (start + nbytes) % cut_to.align == 0 or start + nbytes == sizes[file]
        if number and reads[number - 1][0] == file:
            assert reads[number - 1][1] + reads[number - 1][2] <= start
        for p in plan.use_piece[plan.use_first[number] : plan.use_first[number + 1]].tolist():
            w, chunk = int(plan.wanted[p]), int(plan.chunk[p])
            assert index.file[chunk] == file
            assert plan.low[p] < start + nbytes
            assert plan.high[p] > start
            ndim = len(shapes[wanted[w][0]])
            lengths = index.lengths[chunk, :ndim]
            for at in product(*(range(n) for n in plan.lengths[p, :ndim].tolist())):
                place = plan.in_chunk[p, :ndim] + at
                flat = int(np.ravel_multi_index(tuple(place), tuple(lengths))) if ndim else 0
                byte = int(index.start[chunk]) + 2 * flat
                assert plan.low[p] <= byte < plan.high[p]
                if start <= byte < start + nbytes:
                    got[w][tuple(plan.in_wanted[p, :ndim] + at)] = content[file][byte // 2]
    for (t, box), array in zip(wanted, got, strict=True):
        expected = (np.arange(prod(shapes[t])).reshape(shapes[t]) + 1_000_000 * t)[box.slices()]
        assert np.array_equal(array, expected)


@given(cases())
def test_without_alignment_and_gaps_only_wanted_bytes_are_read(
    case: tuple[list[tuple[int, ...]], list[tuple[int, Box]], int],
) -> None:
    shapes, wanted, seed = case
    index, sizes, _ = saved(shapes, random.Random(seed))
    plan = plan_load(index, wanted, sizes, Granularity(1, 0, 1 << 20))
    needed = set()
    for t, box in wanted:
        flat = np.arange(prod(shapes[t])).reshape(shapes[t])[box.slices()].reshape(-1)
        needed |= {(t, int(e)) for e in flat}
    assert plan.nbytes == 2 * len(needed)


def test_a_column_slice_of_a_wide_tensor_is_read_in_rows_and_a_dense_one_at_once() -> None:
    spec = TensorSpec((64, 1 << 20), "float32")
    column = [np.array([v], np.int64) for v in (0, 0, 4096, spec.nbytes)]
    index = Index(
        (TensorEntry("m", "w", spec),),
        ("f",),
        column[0],
        np.zeros((1, 2), np.int64),
        np.array([spec.shape], np.int64),
        column[1],
        column[2],
        column[3],
    )
    slice_of_16 = [(0, Box((0, 32), (64, 16)))]
    sizes = [4096 + spec.nbytes]
    sparse = plan_load(index, slice_of_16, sizes, Granularity(1, 256 << 10, 8 << 20))
    assert sparse.nbytes == 64 * 16 * 4
    dense = plan_load(index, slice_of_16, sizes, Granularity(1, 8 << 20, 1 << 40))
    assert len(dense.read_file) == 1
