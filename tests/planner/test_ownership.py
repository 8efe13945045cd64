from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.planner.save import (
    APART_NBYTES,
    FROZEN_FILE_NBYTES,
    PART_NBYTES,
    TINY_NBYTES,
    owned_parts,
    plan_save,
)
from reknit.types.box import Box
from reknit.types.shard import Shard, TensorSpec
from tests.running.examples import examples
from tests.tables import table


def shard(
    fqn: str,
    shape: tuple[int, ...],
    replicas: tuple[int, ...],
    dtype: str = "float32",
    *,
    frozen: bool = False,
) -> Shard:
    return Shard("model", fqn, TensorSpec(shape, dtype), Box.whole(shape), replicas, None, frozen)


shapes = st.lists(st.integers(0, 200), max_size=3).map(tuple)
dtypes = st.sampled_from(["uint8", "bfloat16", "float32", "complex128"])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[Shard]]:
    size = draw(st.integers(1, 6))
    sets = st.sets(st.integers(0, size - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    kinds = draw(st.lists(st.tuples(shapes, sets, dtypes), max_size=12))
    return size, [shard(f"t{n}", shape, replicas, dtype) for n, (shape, replicas, dtype) in enumerate(kinds)]


@given(worlds())
def test_replicas_that_decide_alone_write_every_element_exactly_once(world: tuple[int, list[Shard]]) -> None:
    size, shards = world
    covered = {s.fqn: np.zeros(s.box.numel, np.int64) for s in shards}
    parts: defaultdict[str, int] = defaultdict(int)
    for rank in range(size):
        held = [s for s in shards if rank in (s.replicas or ())][:: -1 if rank % 2 else 1]
        for part in owned_parts(held, rank):
            covered[held[part.shard].fqn][part.first : part.first + part.numel] += 1
            parts[held[part.shard].fqn] += 1
    assert all((count == 1).all() for count in covered.values())
    assert all(parts[s.fqn] >= 1 for s in shards), "empty tensors are written too"
    assert all(parts[s.fqn] == 1 for s in shards if s.box.numel == 0)


@settings(max_examples=examples(50))
@given(
    st.integers(2, 7), st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=30)
)
def test_each_replica_writes_its_share_within_one_per_cent(size: int, kinds: list[tuple[int, int]]) -> None:
    replicas = tuple(range(size))
    shards = [shard(f"t{n}", shape, replicas) for n, shape in enumerate(kinds)]
    total = sum(s.nbytes for s in shards)
    written = [plan_save(shards, rank, 1 << 40).nbytes for rank in range(size)]
    assert sum(written) == total
    if total < TINY_NBYTES * size:
        assert sorted(written) == [0] * (size - 1) + [total]
    else:
        assert all(abs(w - total / size) <= 0.01 * total / size for w in written)


def test_small_replica_sets_are_spread_over_their_ranks() -> None:
    owners = set()
    for n in range(40):
        shards = [shard(f"norm.{n}", (16,), (0, 1, 2, 3))]
        owners |= {rank for rank in range(4) if owned_parts(shards, rank)}
    assert owners == {0, 1, 2, 3}


def test_a_box_that_a_rank_holds_twice_is_written_once() -> None:
    shards = [
        shard("a", (3, 2), (0,)),
        shard("a", (3, 2), (0,)),
        shard("b", (0,), (0,)),
        shard("b", (0,), (0,)),
    ]
    assert [part.shard for part in owned_parts(shards, 0)] == [0, 2]


def test_a_cut_prefers_whole_tensors_and_rows_where_they_are_near() -> None:
    shards = [shard("a", (1000, 100), (0, 1)), shard("b", (999, 100), (0, 1))]
    for rank in (0, 1):
        assert [p.numel for p in owned_parts(shards, rank)] == [shards[rank].box.numel]
    plan = plan_save([shard("w", (1001, 1000), (0, 1))], 0, 1 << 40)
    assert [entry.box for entry in plan.files[0].entries] == [Box((0, 0), (501, 1000))]


def test_the_parts_of_a_box_lie_inside_of_it() -> None:
    box = Box((2, 7), (5, 60_001))  # of few and long rows, so that every part is several boxes
    shards = [Shard("model", "w", TensorSpec((9, 70_000), "float32"), box, (0, 1, 2), None)]
    plans = [plan_save(shards, rank, 1 << 40) for rank in range(3)]
    entries = [entry for plan in plans for file in plan.files for entry in file.entries]
    assert sum(entry.numel for entry in entries) == box.numel
    assert len(entries) == 7
    assert all(box.intersect(entry.box) == entry.box for entry in entries)
    places = [np.ravel_multi_index(e.box.relative_to(box.offsets).offsets, box.lengths) for e in entries]
    assert [entry.first for entry in entries] == places
    covered = np.zeros((9, 70_000), np.int64)
    for entry in entries:
        covered[entry.box.slices()] += 1
    assert (covered[box.slices()] == 1).all()


@given(worlds(), st.integers(1, 1 << 16))
def test_planned_entries_are_aligned_without_holes_and_within_the_size_limit(
    world: tuple[int, list[Shard]], limit: int
) -> None:
    size, shards = world
    for rank in range(size):
        held = [s for s in shards if rank in (s.replicas or ())]
        files = plan_save(held, rank, limit).files
        assert [file.part for file in files] == list(range(len(files)))
        for file in files:
            position = 0
            for entry in file.entries:
                assert entry.start == position
                assert entry.start % held[entry.shard].spec.itemsize == 0
                assert (
                    entry.nbytes
                    == entry.numel * held[entry.shard].spec.itemsize
                    == (entry.box.numel * held[entry.shard].spec.itemsize)
                )
                position += entry.nbytes
            assert position == file.nbytes
            assert file.nbytes <= limit or len([e for e in file.entries if e.nbytes]) == 1


def lying_in(shards: list[Shard], rank: int = 0) -> list[tuple[bool, list[str]]]:
    """Return the files of a rank: whether they hold only frozen tensors, and the names of their tensors."""
    files = plan_save(shards, rank, 1 << 40).files
    held = [[shards[entry.shard] for entry in file.entries] for file in files]
    return [(all(shard.frozen for shard in some), [shard.fqn for shard in some]) for some in held]


def test_what_is_frozen_lies_in_files_of_its_own_before_the_others() -> None:
    large = (1000, 1000)
    shards = [
        shard("a", large, (0,), frozen=True),
        shard("b", large, (0,)),
        shard("c", (3, 3), (0,), frozen=True),
        shard("d", large, (0,), "float64", frozen=True),
        shard("e", (3, 3), (0, 1), frozen=True),
    ]
    assert lying_in(shards)[:2] == [(True, ["d", "a", "c"]), (False, ["b"])]
    wanted_by_many = [names for frozen, names in lying_in(shards) + lying_in(shards[4:], 1) if "e" in names]
    assert wanted_by_many == [["e"]]


def test_too_little_that_is_frozen_lies_with_the_rest() -> None:
    numel = APART_NBYTES // 4
    for less, apart in ((0, True), (1, False)):
        shards = [shard("a", (numel - less,), (0,), frozen=True), shard("b", (numel,), (0,))]
        assert any(frozen for frozen, _ in lying_in(shards)) == apart


def test_frozen_files_are_small_and_others_as_large_as_they_may_be() -> None:
    numel = FROZEN_FILE_NBYTES // 4
    shards = [shard(f"{kind}{n}", (numel,), (0,), frozen=kind == "f") for kind in "ft" for n in range(3)]
    assert lying_in(shards) == [(True, ["f0"]), (True, ["f1"]), (True, ["f2"]), (False, ["t0", "t1", "t2"])]


@table(("num_parts", "names"), [(1, ["abcdef"]), (2, ["abc", "def"]), (64, ["ab", "cd", "ef"])])
def test_a_file_ends_when_it_has_its_share_of_the_bytes(num_parts: int, names: list[str]) -> None:
    shards = [shard(name, (PART_NBYTES // 8,), (0,)) for name in "abcdef"]
    files = plan_save(shards, 0, 1 << 40, num_parts).files
    assert ["".join(shards[entry.shard].fqn for entry in file.entries) for file in files] == names
    assert [file.part for file in files] == list(range(len(files)))


def test_tensors_without_elements_need_no_file_of_their_own() -> None:
    for num_parts in (1, 64):
        assert len(plan_save([shard(name, (0,), (0,)) for name in "abc"], 0, 1 << 40, num_parts).files) <= 1


@given(worlds(), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_ranks_that_disagree_about_what_is_frozen_still_write_every_element_once(
    world: tuple[int, list[Shard]], one: set[int], other: set[int]
) -> None:
    size, shards = world
    covered = {s.fqn: np.zeros(s.spec.shape, np.int64) for s in shards}
    for rank in range(size):
        said = other if rank % 2 else one
        held = [
            shard(s.fqn, s.spec.shape, s.replicas or (), s.spec.dtype, frozen=n in said)
            for n, s in enumerate(shards)
            if rank in (s.replicas or ())
        ]
        for file in plan_save(held, rank, 1 << 40).files:
            for entry in file.entries:
                covered[held[entry.shard].fqn][entry.box.slices()] += 1
    assert all((count == 1).all() for count in covered.values())
