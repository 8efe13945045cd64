from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from reknit.engine.loading import deliver
from reknit.engine.loading.read import RangeReader, granularity
from reknit.engine.memory.workers import Arena
from reknit.errors import CorruptError, UsageError
from reknit.events.phase import Recorder
from reknit.options import LoadOptions
from reknit.planner.load import Granularity
from reknit.storage.base import Reading
from reknit.storage.local.store import LocalStorage
from reknit.types.box import Box
from tests.engine.saved import chunks_of, fresh, saved, spoil
from tests.running.cases import one_by_one
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from reknit.engine.stored.opening import OpenCheckpoint
    from reknit.types.shard import LoadPlan

DTYPES = ("uint8", "int16", "float32", "float64", "complex128", "bool", "bfloat16")
BLOCK = 16
CUTS = st.sampled_from(
    [
        Granularity(BLOCK, 0, BLOCK),
        Granularity(BLOCK, 0, 4 * BLOCK),
        Granularity(BLOCK, 0, 1 << 20),
        Granularity(1, 0, 16, 0.0),
        Granularity(1, 0, 1 << 20, 0.0),
        Granularity(1, 0, 256, 0.0),
        Granularity(1, 64, 128, 0.5),
        Granularity(1, 64, 1 << 20, 0.05),
        Granularity(1, 1 << 20, 96),
    ]
)


class Case(NamedTuple):
    """Arrays that are saved, wanted boxes of them (by number), and a seed for everything else."""

    shapes: list[tuple[int, ...]]
    wanted: list[tuple[int, Box]]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = st.lists(st.integers(0, 9), max_size=4).map(tuple)
    shapes = draw(st.lists(shape, max_size=3))
    wanted = []
    for _ in range(draw(st.integers(0, 4)) if shapes else 0):
        t = draw(st.integers(0, len(shapes) - 1))
        offsets = tuple(draw(st.integers(0, n)) for n in shapes[t])
        lengths = tuple(draw(st.integers(0, n - o)) for n, o in zip(shapes[t], offsets, strict=True))
        wanted.append((t, Box(offsets, lengths)))
    return Case(shapes, wanted, draw(st.integers(0, 1 << 30)))


def content(shapes: Sequence[tuple[int, ...]], rng: random.Random) -> dict[str, NDArray[Any]]:
    """Return arrays of any bit patterns."""
    arrays = {}
    for number, shape in enumerate(shapes):
        dtype = np.dtype(getattr(ml_dtypes, name := rng.choice(DTYPES), name))
        raw = np.frombuffer(rng.randbytes(int(np.prod(shape)) * dtype.itemsize), np.uint8)
        arrays[f"t{number}"] = (raw % 2 if name == "bool" else raw).view(dtype).reshape(shape)
    return arrays


def part(array: NDArray[Any], box: Box) -> NDArray[Any]:
    """Return the elements in a box as an array, also without dimensions."""
    return selected(array, box.slices())


def selected(array: NDArray[Any], slices: Sequence[slice]) -> NDArray[Any]:
    # The ellipsis makes NumPy return an array, not a scalar, if there are no dimensions.
    place: tuple[Any, ...] = (*slices, ...)
    found: NDArray[Any] = array[place]
    return found


def target_of(lengths: tuple[int, ...], dtype: np.dtype[Any], rng: random.Random) -> NDArray[Any]:
    """Return memory for a box in a random order of dimensions, with random margins, or dense."""
    order = list(range(len(lengths)))
    if rng.random() < 0.6:
        rng.shuffle(order)
    margin, step = rng.choice([(0, 1), (0, 1), (1, 1), (2, 2), (0, -1)])
    base = np.zeros([abs(step) * lengths[d] + 2 * margin for d in order], dtype)
    inner = selected(base, [slice(margin, margin + abs(step) * lengths[d], abs(step)) for d in order])
    if step < 0:
        inner = selected(inner, [slice(None, None, -1) for _ in order])
    target: NDArray[Any] = inner.transpose(np.argsort(order)) if order else inner
    assert target.shape == lengths
    return target


def reader_of(
    checkpoint: OpenCheckpoint,
    wanted: Sequence[tuple[int, Box]],
    targets: Sequence[Any],
    cut: Granularity,
    **more: Any,
) -> RangeReader:
    chosen: dict[str, Any] = {
        "threads": 2,
        "verify": "off" if cut.align == 1 else "touched",
        **more.pop("options", {}),
    }
    options = LoadOptions(**chosen)
    boxes = [(tensor, box, target) for (tensor, box), target in zip(wanted, targets, strict=True)]
    checkpoint = structs.replace(checkpoint, replicas=more.pop("replicas", ()))
    return RangeReader(checkpoint, boxes, options, cut=cut, **more)


def equal(got: NDArray[Any], wanted: NDArray[Any]) -> bool:
    """Compare bit by bit."""
    return got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes()


@settings(max_examples=examples(400))
@given(cases(), CUTS, st.sampled_from([1, 24, deliver.DIRECT_NBYTES]))
def test_a_box_of_anything_saved_in_any_way_arrives_in_any_memory_as_numpy_slices_it(
    case: Case, cut: Granularity, direct: int
) -> None:
    rng = random.Random(case.seed)
    arrays = content(case.shapes, rng)
    storage = fresh("read")
    checkpoint = saved(arrays, chunks_of(list(arrays.values()), rng), storage, BLOCK, rng)
    sources = list(arrays.values())
    targets = [target_of(box.lengths, sources[t].dtype, rng) for t, box in case.wanted]
    reader = reader_of(checkpoint, case.wanted, targets, cut)
    with mock.patch.object(deliver, "DIRECT_NBYTES", direct):
        reader.run(Recorder("load"))
    for (t, box), target in zip(case.wanted, targets, strict=True):
        assert equal(target, part(sources[t], box))
    taken = storage.taken
    assert len(taken) == len(set(taken)) == reader.nbytes_read == reader.plan.nbytes, "each byte once"
    if cut.align == 1 and cut.waste == 0:
        assert len(taken) == len(needed(reader.plan, checkpoint)), "and none that nobody wants"


def needed(plan: LoadPlan, checkpoint: OpenCheckpoint) -> set[tuple[int, int]]:
    """Return (file, byte) of every wanted byte."""
    index = checkpoint.index
    found = set()
    for chunk, in_chunk, lengths in zip(plan.chunk, plan.in_chunk, plan.lengths, strict=True):
        size = int(index.nbytes[chunk] // index.lengths[chunk].prod())
        grid = np.indices(lengths).reshape(len(lengths), -1).T + in_chunk
        flat = np.ravel_multi_index(tuple(grid.T), tuple(index.lengths[chunk]))
        for start in (int(index.start[chunk]) + size * flat).tolist():
            found |= {(int(index.file[chunk]), start + k) for k in range(size)}
    return found


def test_small_tensors_take_one_buffer_together_and_large_ones_are_read_straight_into_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(0)
    arrays = {f"t{k:03}": np.full(8, k, np.float32) for k in range(100)}
    arrays["u"] = np.arange(deliver.DIRECT_NBYTES, dtype=np.uint8)
    whole = {name: Box.whole(array.shape) for name, array in arrays.items()}
    chunks = [[box] for box in whole.values()]
    checkpoint = saved(arrays, chunks, fresh("small"), 4096, rng)
    buffers: list[int] = []
    read_into = checkpoint.storage.read_into

    def counted(path: str, start: int, into: list[memoryview]) -> None:
        buffers.extend(buffer.nbytes for buffer in into)
        read_into(path, start, into)

    monkeypatch.setattr(checkpoint.storage, "read_into", counted)
    targets = [np.zeros_like(array) for array in arrays.values()]
    wanted = list(enumerate(whole.values()))
    reader = reader_of(checkpoint, wanted, targets, Granularity(4096, 0, 1 << 20))
    reader.run(Recorder("load"))
    for array, target in zip(arrays.values(), targets, strict=True):
        assert equal(target, array)
    assert deliver.DIRECT_NBYTES in buffers
    assert len(buffers) <= len(reader.plan.read_file) + 2 < 20


@given(cases(), CUTS, st.sampled_from([1, 3, 64]))
def test_bytes_that_others_have_read_are_delivered_like_those_read_here(
    case: Case, cut: Granularity, margin: int
) -> None:
    rng = random.Random(case.seed)
    arrays = content(case.shapes, rng)
    storage = fresh("fetch")
    checkpoint = saved(arrays, chunks_of(list(arrays.values()), rng), storage, BLOCK, rng)
    sources = list(arrays.values())
    targets = [target_of(box.lengths, sources[t].dtype, rng) for t, box in case.wanted]
    reader = reader_of(checkpoint, case.wanted, targets, cut)
    plan = reader.plan
    for number in range(len(plan.read_file)):
        path = checkpoint.index.files[plan.read_file[number]]
        start, stop = int(plan.read_start[number]), int(plan.read_start[number] + plan.read_nbytes[number])
        low = max(start - margin * cut.align, 0)
        high = min(stop + margin * cut.align, checkpoint.files[path].nbytes)
        data = np.empty(high - low, np.uint8)
        reader.fetch(path, low, data)
        reader.deliver(number, low, data, Arena(cut.nbytes))
    for job in reader.jobs([]):
        reader.read(job, Arena(cut.nbytes))
    for (t, box), target in zip(case.wanted, targets, strict=True):
        assert equal(target, part(sources[t], box))


@given(cases(), CUTS)
def test_what_is_converted_is_what_numpy_converts(case: Case, cut: Granularity) -> None:
    rng = random.Random(case.seed)
    arrays = {
        f"t{k}": np.array([rng.uniform(-9, 9) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)
        for k, shape in enumerate(case.shapes)
    }
    checkpoint = saved(arrays, chunks_of(list(arrays.values()), rng), fresh("cast"), BLOCK, rng)
    kinds = [np.dtype(rng.choice(["float64", "float32", "float16"])) for _ in case.wanted]
    targets = [target_of(box.lengths, kind, rng) for (_, box), kind in zip(case.wanted, kinds, strict=True)]
    cast = frozenset(n for n, kind in enumerate(kinds) if kind != np.float32)
    reader_of(checkpoint, case.wanted, targets, cut, cast=cast).run(Recorder("load"))
    for (t, box), target, kind in zip(case.wanted, targets, kinds, strict=True):
        assert equal(target, part(arrays[f"t{t}"], box).astype(kind))


def test_torch_tensors_are_filled_whatever_their_strides() -> None:
    for verify in one_by_one(["touched", "off"]):
        rng = random.Random(0)
        array = np.arange(24 * 18, dtype=np.float32).reshape(24, 18)
        checkpoint = saved({"w": array}, chunks_of([array], rng), fresh("torch"), BLOCK, rng)
        cut = Granularity(1, 0, 64, 0.0) if verify == "off" else Granularity(BLOCK, 0, 64)
        box = Box((2, 3), (20, 12))
        targets = [
            torch.zeros(20, 12),
            torch.zeros(12, 20).t(),
            torch.zeros(40, 24)[::2, 1::2],
            torch.zeros(20, 12, dtype=torch.bfloat16),
            torch.zeros(12, 20, dtype=torch.float64).t(),
        ]
        reader_of(checkpoint, [(0, box)] * 5, targets, cut, cast=frozenset({3, 4})).run(Recorder("load"))
        expected = torch.from_numpy(array[2:22, 3:15].copy())
        for target in targets:
            assert torch.equal(target, expected.to(target.dtype))


def test_runs_in_several_dimensions_and_many_cells_arrive() -> None:
    for cell, cast, order in one_by_one(
        product([128, 1000, 1 << 20], [False, True], [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
    ):
        array = np.arange(13 * 11 * 7, dtype=np.float32).reshape(13, 11, 7)
        storage = fresh("runs")
        checkpoint = saved({"w": array}, [[Box.whole(array.shape)]], storage, BLOCK, random.Random(0))
        box = Box((1, 2, 3), (11, 8, 2))
        dtype = np.float64 if cast else np.float32
        target = np.zeros([box.lengths[d] for d in order], dtype).transpose(np.argsort(order))
        reader = reader_of(
            checkpoint,
            [(0, box)],
            [target],
            Granularity(1, 0, cell, 0.0),
            cast=frozenset({0}) if cast else frozenset(),
        )
        reader.run(Recorder("load"))
        assert equal(target, part(array, box).astype(dtype))
        assert len(reader.plan.strided.piece) > 3 or cell != 1000, "several strided reads of one piece"
        assert len(storage.taken) == len(set(storage.taken)) == 11 * 8 * 2 * 4


def test_a_column_slice_goes_straight_into_its_target_in_few_calls(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    class Spying(LocalStorage):
        def read_runs(self, path: str, starts: NDArray[np.int64], nbytes: int, buffer: memoryview) -> None:
            calls.append((np.frombuffer(buffer, np.uint8).ctypes.data, len(starts)))
            super().read_runs(path, starts, nbytes, buffer)

    array = np.arange(4000 * 512, dtype=np.int32).reshape(4000, 512)
    rng = random.Random(0)
    checkpoint = saved({"w": array}, [[Box.whole(array.shape)]], Spying(tmp_path), 1 << 20, rng)
    target = np.zeros((4000, 64), np.int32)
    cut = granularity(LoadOptions(verify="off"), 1 << 20, checkpoint.storage.reading)
    reader_of(checkpoint, [(0, Box((0, 128), (4000, 64)))], [target], cut).run(Recorder("load"))
    assert np.array_equal(target, array[:, 128:192])
    low, high = target.ctypes.data, target.ctypes.data + target.nbytes
    assert all(low <= address < high for address, _ in calls)
    assert len(calls) <= 2
    assert sum(num for _, num in calls) >= 3990


def test_a_damaged_block_is_named_with_its_tensors_whoever_fetches_it() -> None:
    rng = random.Random(3)
    arrays = {name: np.arange(200, dtype=np.uint8) for name in ("a", "b")}
    storage = fresh("damaged")
    checkpoint = saved(arrays, [[Box.whole((200,))]] * 2, storage, 64, rng)
    index = checkpoint.index
    byte = int(index.start[1]) + 100
    path = index.files[index.file[1]]
    spoil(storage, path, byte)
    target = np.zeros(200, np.uint8)
    wanted = [(1, Box.whole((200,)))]
    reader = reader_of(checkpoint, wanted, [target], Granularity(64, 0, 128))
    with pytest.raises(CorruptError, match="m/b") as caught:
        reader.run(Recorder("load"))
    assert path in str(caught.value)
    assert caught.value.phase == "verify"
    whole = np.empty(checkpoint.files[path].nbytes, np.uint8)
    with pytest.raises(CorruptError, match="m/b"):
        reader_of(checkpoint, [], [], Granularity(64, 0, 128)).fetch(path, 0, whole)
    reader_of(checkpoint, [], [], Granularity(1, 0, 128)).fetch(path, 0, whole)
    assert whole.tobytes() == storage.get(path, limit=1 << 20)


def test_of_several_damaged_blocks_in_one_read_the_first_is_named() -> None:
    array = np.arange(200, dtype=np.uint8)
    storage = fresh("damaged")
    checkpoint = saved({"a": array}, [[Box.whole((200,))]], storage, 64, random.Random(3))
    path = checkpoint.index.files[checkpoint.index.file[0]]
    for byte in (190, 70):
        spoil(storage, path, byte)
    whole = np.empty(checkpoint.files[path].nbytes, np.uint8)
    with pytest.raises(CorruptError, match=r"bytes 64:128 of"):
        reader_of(checkpoint, [], [], Granularity(64, 0, 256)).fetch(path, 0, whole)


def test_bytes_that_are_no_whole_blocks_are_not_passed_off_as_verified() -> None:
    rng = random.Random(3)
    array = np.arange(200, dtype=np.uint8)
    checkpoint = saved({"a": array}, [[Box.whole((200,))]], fresh("part"), 64, rng)
    path = checkpoint.index.files[checkpoint.index.file[0]]
    reader = reader_of(checkpoint, [], [], Granularity(64, 0, 128))
    for start, nbytes in ((1, 63), (0, 63), (64, 65)):
        with pytest.raises(UsageError, match="whole blocks"):
            reader.fetch(path, start, np.empty(nbytes, np.uint8))
    end = checkpoint.files[path].nbytes
    reader.fetch(path, 64, np.empty(end - 64, np.uint8))


def test_the_options_and_the_storage_say_how_reads_are_cut() -> None:
    remote = Reading(gap_nbytes=1 << 20, waste=float("inf"), piece_nbytes=16 << 20)
    off = LoadOptions(verify="off")
    assert granularity(LoadOptions(), 4 << 20, remote) == Granularity(4 << 20, 0, 16 << 20)
    assert granularity(off, 4 << 20, remote) == Granularity(1, 1 << 20, 16 << 20, float("inf"))
    assert granularity(off, 4 << 20) == Granularity(1, 256 << 10, 8 << 20, 0.05)
    assert granularity(LoadOptions(verify="off", gap_nbytes=0), 4 << 20, remote).gap == 0
    assert granularity(LoadOptions(), 32 << 20).nbytes == 32 << 20, "a block is never cut"
