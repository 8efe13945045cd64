from __future__ import annotations

import random
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reknit.planner.load import Granularity, plan_load
from reknit.types.box import Box
from reknit.types.manifest import Index, TensorEntry
from reknit.types.shard import TensorSpec
from tests.planner.test_tiling import cut

if TYPE_CHECKING:
    from reknit.types.shard import LoadPlan

FILES = 3
Case = tuple[list[tuple[int, ...]], list[tuple[int, Box]], int]
"""Shapes of tensors, the boxes of them that are wanted, and a seed."""


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
def cases(draw: st.DrawFn) -> Case:
    # The test checks every byte, so all tensors are small.
    shape = st.lists(st.integers(0, 9), max_size=4).map(tuple).filter(lambda lengths: prod(lengths) <= 1000)
    shapes = draw(st.lists(shape, max_size=4))
    wanted = [(t, Box.whole(shape)) for t, shape in enumerate(shapes) if draw(st.booleans())]
    for _ in range(draw(st.integers(0, 5)) if shapes else 0):
        t = draw(st.integers(0, len(shapes) - 1))
        offsets = tuple(draw(st.integers(0, n)) for n in shapes[t])
        lengths = tuple(draw(st.integers(0, n - o)) for n, o in zip(shapes[t], offsets, strict=True))
        wanted.append((t, Box(offsets, lengths)))
    return shapes, wanted, draw(st.integers(0, 1 << 30))


granularities = st.sampled_from(
    [
        Granularity(1, 0, 1 << 20, 0.0),
        Granularity(1, 6, 64),
        Granularity(1, 1 << 10, 64, 0.3),
        Granularity(1, 1 << 10, 1 << 20, 0.05),
        Granularity(1, 4, 32, 0.5),
        Granularity(1, 0, 16, 0.0),
        Granularity(16, 0, 32),
        Granularity(2, 0, 8),
    ]
)
EXACT = [
    Granularity(1, 1 << 40, 1 << 20, 0.05),
    Granularity(1, 8, 32, 0.05),
    Granularity(1, 1 << 40, 64, 0.3),
]


def bytes_of_strided(index: Index, plan: LoadPlan, number: int) -> list[int]:
    """Return the offset of every byte that a strided read takes from its file, by its columns."""
    strided = plan.strided
    piece, run = strided.piece[number], int(strided.run_nbytes[number])
    chunk = plan.chunk[piece]
    lengths = index.lengths[chunk]
    size = int(index.nbytes[chunk] // lengths.prod())
    # Every element of the piece in row-major order; a run begins at the first that no run before reaches.
    grid = np.indices(plan.lengths[piece]).reshape(len(lengths), -1).T + plan.in_chunk[piece]
    at = (int(index.start[chunk]) + size * np.ravel_multi_index(tuple(grid.T), tuple(lengths))).tolist()
    starts: list[int] = []
    for byte in at:
        if not starts or byte >= starts[-1] + run:
            starts.append(byte)
    mine = starts[int(strided.first[number]) :][: int(strided.num[number])]
    assert len(mine) == strided.num[number] > 1
    assert mine[0] == strided.start[number]
    assert mine[-1] + run == strided.start[number] + strided.nbytes[number]
    return [byte for first in mine for byte in range(first, first + run)]


class Take(NamedTuple):
    """Bytes of a file that a read or a strided read takes, and the pieces that they are for."""

    file: int
    held: list[int]
    pieces: list[int]


def takes(index: Index, plan: LoadPlan) -> list[Take]:
    found = [
        Take(int(file), list(range(start, start + nbytes)), plan.use_piece[first:end].tolist())
        for file, start, nbytes, first, end in zip(
            plan.read_file,
            plan.read_start.tolist(),
            plan.read_nbytes.tolist(),
            plan.use_first[:-1],
            plan.use_first[1:],
            strict=True,
        )
    ]
    for c, (piece, file) in enumerate(
        zip(plan.strided.piece.tolist(), plan.strided.file.tolist(), strict=True)
    ):
        found.append(Take(file, bytes_of_strided(index, plan, c), [piece]))
    return found


def needed_bytes(index: Index, plan: LoadPlan) -> set[tuple[int, int]]:
    """Return (file, byte) of everything that any piece wants."""
    needed = set()
    for chunk, in_chunk, lengths in zip(plan.chunk, plan.in_chunk, plan.lengths, strict=True):
        grid = np.indices(lengths).reshape(len(lengths), -1).T + in_chunk
        size = int(index.nbytes[chunk] // index.lengths[chunk].prod())
        flat = np.ravel_multi_index(tuple(grid.T), tuple(index.lengths[chunk]))
        for byte in (int(index.start[chunk]) + size * flat).tolist():
            needed |= {(int(index.file[chunk]), byte + k) for k in range(size)}
    return needed


def check_reads(index: Index, plan: LoadPlan, sizes: list[int], cut_to: Granularity) -> None:
    """Check that reads keep to cells and blocks, and ascend."""
    assert cut_to.align == 1 or not len(plan.strided.piece), "verified bytes are read in blocks"
    strided = plan.strided
    starts = np.concatenate((plan.read_start, strided.start))
    stops = starts + np.concatenate((plan.read_nbytes, strided.nbytes))
    assert (stops > starts).all()
    assert (starts // cut_to.nbytes == (stops - 1) // cut_to.nbytes).all()
    assert (starts >= 0).all()
    assert (stops <= np.array(sizes)[np.concatenate((plan.read_file, strided.file))]).all()
    reads = list(
        zip(plan.read_file.tolist(), plan.read_start.tolist(), plan.read_nbytes.tolist(), strict=True)
    )
    for before, (file, start, nbytes) in zip([(-1, 0, 0), *reads], reads, strict=False):
        assert start % cut_to.align == 0
        assert (start + nbytes) % cut_to.align == 0 or start + nbytes == sizes[file]
        assert (before[0], before[1] + before[2]) <= (file, start)
    assert plan.files == sorted({file for file, held, _ in takes(index, plan) if held})


@given(cases(), granularities)
def test_the_reads_hold_every_wanted_element_where_the_plan_says(case: Case, cut_to: Granularity) -> None:
    shapes, wanted, seed = case
    index, sizes, content = saved(shapes, random.Random(seed))
    plan = plan_load(index, wanted, sizes, cut_to)
    check_reads(index, plan, sizes, cut_to)
    got = [np.full(box.lengths, -1, np.int64) for _, box in wanted]
    for file, bytes_held, pieces in takes(index, plan):
        held = set(bytes_held)
        for p in pieces:
            w, chunk = int(plan.wanted[p]), int(plan.chunk[p])
            assert index.file[chunk] == file
            assert plan.low[p] <= max(held)
            assert plan.high[p] > min(held)
            ndim = len(shapes[wanted[w][0]])
            lengths = index.lengths[chunk, :ndim]
            for at in product(*(range(n) for n in plan.lengths[p, :ndim].tolist())):
                place = plan.in_chunk[p, :ndim] + at
                flat = int(np.ravel_multi_index(tuple(place), tuple(lengths))) if ndim else 0
                byte = int(index.start[chunk]) + 2 * flat
                assert plan.low[p] <= byte < plan.high[p]
                if byte in held:
                    got[w][tuple(plan.in_wanted[p, :ndim] + at)] = content[file][byte // 2]
    for (t, box), array in zip(wanted, got, strict=True):
        expected = (np.arange(prod(shapes[t])).reshape(shapes[t]) + 1_000_000 * t)[box.slices()]
        assert np.array_equal(array, expected)


@given(cases(), st.sampled_from(EXACT))
def test_no_byte_is_read_twice_and_few_that_nobody_wants(case: Case, cut_to: Granularity) -> None:
    shapes, wanted, seed = case
    index, sizes, _ = saved(shapes, random.Random(seed))
    plan = plan_load(index, wanted, sizes, cut_to)
    read = [(file, byte) for file, held, _ in takes(index, plan) for byte in held]
    assert len(set(read)) == len(read) == plan.nbytes
    needed = needed_bytes(index, plan)
    assert needed <= set(read)
    assert len(read) <= (1 + cut_to.waste) * len(needed)
    without_gaps = plan_load(index, wanted, sizes, Granularity(1, 0, 1 << 20))
    assert without_gaps.nbytes == len(needed), "only wanted bytes are read"


@given(cases(), st.sampled_from([2, 16, 32]))
def test_with_blocks_only_those_that_hold_something_wanted_are_read(case: Case, block: int) -> None:
    shapes, wanted, seed = case
    index, sizes, _ = saved(shapes, random.Random(seed))
    plan = plan_load(index, wanted, sizes, Granularity(block, 0, 4 * block))
    touched = {(file, byte // block) for file, byte in needed_bytes(index, plan)}
    read = {
        (int(file), byte // block)
        for file, start, nbytes in zip(plan.read_file, plan.read_start, plan.read_nbytes, strict=True)
        for byte in range(start, start + nbytes)
    }
    assert read == touched
    assert plan.nbytes <= block * len(touched)


DISK = Granularity(1, 256 << 10, 8 << 20, 0.05)


def one_chunk(shape: tuple[int, ...], at: int = 4096) -> tuple[Index, list[int]]:
    """Return the index of one float32 tensor that is one chunk."""
    spec = TensorSpec(shape, "float32")
    file, start, nbytes = (np.array([v], np.int64) for v in (0, at, spec.nbytes))
    offsets, lengths = np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64)
    tensors = (TensorEntry("m", "w", spec),)
    return Index(tensors, ("f",), file, offsets, lengths, file, start, nbytes), [at + spec.nbytes]


def test_a_column_slice_is_read_exactly_and_by_few_reads() -> None:
    index, sizes = one_chunk((65536, 4096))
    plan = plan_load(index, [(0, Box((0, 512), (65536, 512)))], sizes, DISK)
    assert plan.nbytes == 65536 * 2048
    num_cells = sizes[0] // (8 << 20)
    assert len(plan.strided.piece) == num_cells
    assert len(plan.read_file) <= num_cells, "only runs across the border of a cell are read alone"
    assert len(plan.chunk) <= num_cells + 1


def test_runs_that_end_with_their_cell_are_part_of_its_strided_read() -> None:
    index, sizes = one_chunk((65536, 4096), at=0)
    for columns in (0, 3584):
        plan = plan_load(index, [(0, Box((0, columns), (65536, 512)))], sizes, DISK)
        assert len(plan.read_file) == 0
        assert plan.strided.num.tolist() == [512] * 128


def test_runs_across_a_border_are_read_alone_and_few_of_a_cell_are_too() -> None:
    index, sizes = one_chunk((4096, 4096), at=1 << 20)
    plan = plan_load(index, [(0, Box((0, 0), (4096, 3000)))], sizes, DISK._replace(gap=0, nbytes=100_000))
    assert plan.nbytes == 4096 * 12_000
    assert len(plan.read_file) > 0
    assert (plan.strided.num >= 4).all()
    lonely = plan_load(index, [(0, Box((0, 0), (4096, 30)))], sizes, DISK._replace(gap=0, nbytes=3 * 16384))
    assert not len(lonely.strided.piece)
    assert lonely.read_nbytes.tolist() == [120] * 4096


def test_bytes_between_runs_that_are_read_alone_are_left_to_strided_reads() -> None:
    index, sizes = one_chunk((256, 1024), at=0)
    plan = plan_load(index, [(0, Box((0, 0), (256, 700)))], sizes, DISK._replace(nbytes=25_000))
    assert len(plan.read_file)
    assert len(plan.strided.piece)
    read = [byte for _, held, _ in takes(index, plan) for byte in held]
    assert len(read) == len(set(read)) == 256 * 2800


def test_holes_within_pieces_and_between_them_count_together() -> None:
    index, sizes = one_chunk((1000, 1000))
    halves = [(0, Box((0, 0), (500, 960))), (0, Box((520, 0), (480, 960)))]
    plan = plan_load(index, halves, sizes, DISK)
    assert 980 * 960 * 4 < plan.nbytes <= 1.05 * 980 * 960 * 4


def test_holes_that_pieces_share_are_not_counted_for_each() -> None:
    index, sizes = one_chunk((400, 100))
    pairs = [(0, Box((row, 0), (2, 95))) for row in range(399)]
    plan = plan_load(index, pairs, sizes, DISK)
    assert plan.nbytes <= 1.05 * 400 * 95 * 4


def test_columns_that_overlap_are_read_once_and_those_between_them_not_at_all() -> None:
    index, sizes = one_chunk((1000, 4096))
    overlapping = [(0, Box((0, 100), (1000, 200))), (0, Box((500, 200), (300, 300)))]
    plan = plan_load(index, overlapping, sizes, DISK._replace(gap=0))
    assert plan.nbytes == 4 * (1000 * 200 + 300 * 200)
    interleaved = [(0, Box((0, 100), (1000, 200))), (0, Box((0, 400), (1000, 200)))]
    plan = plan_load(index, interleaved, sizes, DISK)
    assert plan.nbytes == 4 * 1000 * 400
    assert len(plan.strided.piece) == 4, "two columns in two cells each"


def test_a_hole_is_read_over_only_where_that_wastes_little() -> None:
    index, sizes = one_chunk((64, 1000))
    narrow, wide = [(0, Box((0, 0), (64, 900)))], [(0, Box((0, 0), (64, 960)))]
    exact = plan_load(index, narrow, sizes, DISK)
    assert exact.nbytes == 64 * 900 * 4
    over = plan_load(index, wide, sizes, DISK)
    assert over.nbytes == (64 * 1000 - 40) * 4
    assert len(over.read_file) == 1
    assert not len(over.strided.piece)
    assert plan_load(index, wide, sizes, Granularity(1, 159, 8 << 20, 0.05)).nbytes == 64 * 960 * 4
    dense = plan_load(index, narrow, sizes, Granularity(1, 400, 8 << 20))
    assert len(dense.read_file) == 1
    assert not len(dense.strided.piece)


def test_columns_that_together_make_whole_rows_are_read_in_one() -> None:
    index, sizes = one_chunk((64, 1000))
    columns = [(0, Box((0, start), (64, 250))) for start in (0, 250, 500, 750)]
    plan = plan_load(index, columns, sizes, DISK)
    assert plan.nbytes == index.nbytes[0]
    assert len(plan.read_file) == 1
    assert len(plan.chunk) == 4


def test_many_single_columns_of_a_long_tensor_are_planned_small() -> None:
    index, sizes = one_chunk((1 << 24, 64))
    wanted = [(0, Box((0, 3), (1 << 24, 1)))]
    plan = plan_load(index, wanted, sizes, DISK)
    assert plan.nbytes == 4 << 24
    assert len(plan.strided.piece) <= 513
    assert len(plan.read_file) <= 513
