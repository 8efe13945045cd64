"""Ranks that read together, as threads: the real engine, random layouts, and a count of all reads."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.options import LoadOptions
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.shard import Holdings, Shard, TensorSpec
from tests.running.examples import examples, is_night
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import save_rank
from tests.world.layouts import Model, cut_with_counters
from tests.world.sharing import BLOCK_NBYTES, World, random_hosts, reblock, unique_nbytes
from tests.world.test_resharding import assert_equal, save_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from reknit.engine.reports import SaveReport
    from tests.world.layouts import Part

OFF = LoadOptions(threads=2, share="always", verify="off", gap_nbytes=0, timeout_s=30)
TOUCHED = LoadOptions(threads=2, share="always", timeout_s=30)
ALONE = LoadOptions(threads=2, share="never", verify="off", gap_nbytes=0, timeout_s=30)
NAME = "sharing"
MANY = 10_000 if is_night() else 3_000

seeds = st.integers(0, 1 << 30)
sizes = st.integers(1, 6)


def saved(model: Model, layout: dict[str, list[Part]], size: int, *, small_blocks: bool = False) -> None:
    """Save a model in a layout to a fresh store."""
    ProcessMemory.clear(NAME)
    save_on(model, layout, size, ProcessMemory(NAME))
    if small_blocks:
        reblock(NAME)


def targets(model: Model, layout: dict[str, list[Part]], size: int) -> list[list[Shard]]:
    """Return the wanted shards of each rank in a layout, in memory of any order."""
    return [model.shards(layout, rank, filled=False, seed=7 * rank) for rank in range(size)]


def of_arrays(**arrays: Any) -> Model:
    """Return a model of given arrays."""
    model = Model(0, 0)
    model.arrays.update(arrays)
    return model


def replicated(model: Model, size: int) -> dict[str, list[Part]]:
    """Return the layout in which every rank has everything."""
    return {fqn: [(Box.whole(a.shape), tuple(range(size)))] for fqn, a in model.arrays.items()}


def patterned(numel: int, dtype: str = "float32") -> Any:
    """Return an array in which no two elements are alike."""
    return np.arange(numel, dtype=dtype)


# Any layouts.


@settings(max_examples=examples(80))
@given(seeds, seeds, seeds, sizes, sizes, st.integers(1, 6), seeds, st.booleans())
def test_ranks_that_read_together_get_what_they_want_and_no_byte_leaves_the_store_twice(
    content: int, a: int, b: int, size_a: int, size_b: int, num_tensors: int, hosts: int, tight: bool
) -> None:
    model = Model(content, num_tensors)
    saved(model, model.spread(a, size_a), size_a)
    # In cells of 4 MiB all goes in one exchange; a bucket of 100 bytes makes an exchange of each few reads.
    world = World(random_hosts(size_b, hosts), NAME, bucket_nbytes=100 if tight else 32 << 20)
    shards = targets(model, model.spread(b, size_b), size_b)
    reports = world.load(shards, OFF)
    for each, report in zip(shards, reports, strict=True):
        assert_equal(model, each)
        assert report.nbytes_wanted == sum(shard.box.numel * shard.spec.itemsize for shard in each)
    assert sum(report.nbytes_read for report in reports) == world.nbytes
    # Runs far apart, in columns of tensors, are read by each rank alone.
    if not world.num_strided:
        assert world.nbytes == unique_nbytes(shards)
        assert world.most <= 1


@settings(max_examples=examples(30))
@given(seeds, seeds, seeds, sizes, st.integers(2, 6), seeds, st.booleans())
def test_ranks_that_verify_what_they_read_together_take_each_block_once(
    content: int, a: int, b: int, size_a: int, size_b: int, hosts: int, tight: bool
) -> None:
    model = Model(content, 5, largest=24)
    saved(model, model.spread(a, size_a), size_a, small_blocks=True)
    bucket = BLOCK_NBYTES if tight else 32 << 20
    world = World(random_hosts(size_b, hosts), NAME, cell_nbytes=2 * BLOCK_NBYTES, bucket_nbytes=bucket)
    shards = targets(model, model.spread(b, size_b), size_b)
    reports = world.load(shards, TOUCHED)
    for each in shards:
        assert_equal(model, each)
    assert world.most <= 1
    assert sum(report.nbytes_read for report in reports) == world.nbytes
    assert all(start % BLOCK_NBYTES == 0 and nbytes <= 2 * BLOCK_NBYTES for _, start, nbytes in world.reads)


@settings(max_examples=examples(30))
@given(seeds, seeds, seeds, st.integers(2, 6), seeds, seeds)
def test_ranks_of_hosts_that_nothing_connects_share_on_their_host_only(
    content: int, a: int, b: int, size: int, hosts: int, order: int
) -> None:
    model = Model(content, 5)
    saved(model, model.spread(a, 2), 2)
    places = random_hosts(size, hosts)
    world = World(places, NAME)
    layout = model.spread(b, size)
    shards = targets(model, layout, size)
    world.load(shards, OFF, carries=False)
    for each in shards:
        assert_equal(model, each)
    assert world.hub.num_swaps == 0
    assert world.most <= len(set(places)) or world.num_strided


# Everything on every rank.


@pytest.mark.parametrize("options", [OFF, TOUCHED], ids=["off", "touched"])
@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 0, 0]])
def test_four_replicas_read_a_quarter_each_and_get_the_rest(hosts: list[int], options: LoadOptions) -> None:
    cell = 16 << 10
    model = of_arrays(**{f"w{k}": patterned(40_000 + 7 * k) for k in range(8)}, small=patterned(3))
    layout = replicated(model, 4)
    saved(model, layout, 4, small_blocks=True)
    world = World(hosts, NAME, cell_nbytes=cell, bucket_nbytes=2 * cell)
    shards = targets(model, layout, 4)
    reports = world.load(shards, options)
    for each in shards:
        assert_equal(model, each)
    total = unique_nbytes(shards)
    if options is OFF:
        assert world.nbytes == total
    else:
        assert total <= world.nbytes <= total + 8 * (BLOCK_NBYTES + (64 << 10)), "headers, no byte twice"
    assert world.most == 1
    for report, store in zip(reports, world.stores, strict=True):
        assert abs(report.nbytes_read - world.nbytes / 4) <= cell
        assert report.nbytes_read == sum(n for path, _, n in store.asked if path.endswith(".safetensors"))
        assert report.nbytes_received == world.nbytes - report.nbytes_read
        assert report.nbytes_wanted == total
    assert (world.hub.num_swaps > 4) == (len(set(hosts)) > 1)


def test_replicas_of_hosts_of_any_number_read_equal_shares() -> None:
    model = of_arrays(w=patterned(500_000))
    saved(model, replicated(model, 1), 1)
    world = World([0, 0, 0, 1, 2, 1, 0], NAME, cell_nbytes=64 << 10)
    reblock(NAME)
    shards = targets(model, replicated(model, 7), 7)
    for report in world.load(shards, OFF):
        assert abs(report.nbytes_read - 2_000_000 / 7) <= 64 << 10
    assert world.nbytes == 2_000_000


@pytest.mark.parametrize("hosts", [[0, 1], [n // 4 for n in range(16)]], ids=["1+1", "4x4"])
def test_ranks_in_the_layout_of_the_save_pass_each_other_only_what_they_have_in_common(
    hosts: list[int],
) -> None:
    size = len(hosts)
    model, layout = cut_with_counters(size, rows=1 << 10)
    saved(model, layout, size)
    world = World(hosts, NAME)
    shards = targets(model, layout, size)
    reports = world.load(shards, TOUCHED)
    for each in shards:
        assert_equal(model, each)
    small = 8 << 10  # the counters, and the header of their file
    assert sum(report.nbytes_read for report in reports) <= unique_nbytes(shards) + size * small
    assert 0 < sum(report.nbytes_received for report in reports) <= size * small


# Ranks that want different things.


def test_a_rank_that_wants_nothing_reads_nothing_and_keeps_nobody_waiting() -> None:
    model = of_arrays(w=patterned(100_000))
    saved(model, replicated(model, 2), 2)
    for hosts in ([0, 0, 0], [0, 1, 2]):
        world = World(hosts, NAME)
        shards = targets(model, replicated(model, 3), 3)
        shards[1] = []
        reports = world.load(shards, OFF)
        for each in shards:
            assert_equal(model, each)
        assert world.nbytes == 400_000
        assert (reports[1].nbytes_read, reports[1].nbytes_received) == (0, 0)


def test_ranks_that_load_different_items_share_those_that_they_have_in_common() -> None:
    model = of_arrays(**{item: patterned(50_000) + k for k, item in enumerate("abcd")})

    def shards(items: str, *, filled: bool) -> list[Shard]:
        spec, box = TensorSpec((50_000,), "float32"), Box.whole((50_000,))
        values = {
            item: model.arrays[item].copy() if filled else np.zeros(50_000, np.float32) for item in items
        }
        return [Shard(item, item, spec, box, None, value) for item, value in values.items()]

    ProcessMemory.clear(NAME)

    def save_items(group: Group) -> SaveReport:
        holdings = Holdings(tuple("abcd"), tuple(shards("abcd", filled=True)), ())
        return save_rank(group, ProcessMemory(NAME), lambda: holdings, overwrite=True)

    run_ranks(2, save_items)
    reblock(NAME)
    # Each rank numbers only the files of its own items.
    items = ["d", "bd", "abc", "cd", "ad"]
    for hosts in ([0] * 5, [0, 0, 1, 1, 1], [0, 1, 2, 0, 1]):
        world = World(hosts, NAME, cell_nbytes=16 << 10, bucket_nbytes=32 << 10)
        targets = [shards(names, filled=False) for names in items]
        reports = world.load(targets, OFF)
        for each, report in zip(targets, reports, strict=True):
            assert_equal(model, each)
            assert report.nbytes_read + report.nbytes_received == report.nbytes_wanted
        assert world.nbytes == 4 * 200_000


def test_ranks_that_want_overlapping_parts_share_what_they_have_in_common() -> None:
    model = of_arrays(w=patterned(90_000))
    saved(model, replicated(model, 1), 1)
    parts = [(0, 50_000), (20_000, 50_000), (49_999, 40_001), (89_000, 1_000)]
    world = World([0, 0, 1, 1], NAME, cell_nbytes=BLOCK_NBYTES, bucket_nbytes=3 * BLOCK_NBYTES)
    reblock(NAME)
    layout: dict[str, list[Part]] = {
        "w": [(Box((start,), (n,)), (rank,)) for rank, (start, n) in enumerate(parts)]
    }
    shards = targets(model, layout, 4)
    world.load(shards, OFF)
    for each in shards:
        assert_equal(model, each)
    assert world.nbytes == 360_000


@pytest.mark.parametrize(("hosts", "never"), [([0, 0, 0], 0), ([0, 1, 2], 2)])
def test_where_one_rank_will_not_share_every_rank_reads_alone(hosts: list[int], never: int) -> None:
    model = of_arrays(w=patterned(30_000))
    saved(model, replicated(model, 2), 2)
    world = World(hosts, NAME)
    shards = targets(model, replicated(model, 3), 3)
    options = [ALONE if rank == never else OFF for rank in range(3)]
    for each, report in zip(shards, world.load(shards, options), strict=True):
        assert_equal(model, each)
        assert (report.nbytes_read, report.nbytes_received) == (120_000, 0)


def test_ranks_that_verify_differently_read_alone() -> None:
    model = of_arrays(w=patterned(30_000))
    saved(model, replicated(model, 2), 2)
    world = World([0, 0], NAME)
    shards = targets(model, replicated(model, 2), 2)
    for each, report in zip(shards, world.load(shards, [OFF, TOUCHED]), strict=True):
        assert_equal(model, each)
        assert report.nbytes_received == 0


# Targets that cannot simply be copied to.


@pytest.mark.parametrize(
    ("hosts", "options"), [([0, 0, 1], OFF), ([0, 0, 0], TOUCHED)], ids=["off", "touched"]
)
def test_casts_transposed_targets_and_columns_go_along_with_shared_reads(
    hosts: list[int], options: LoadOptions
) -> None:
    rng = np.random.default_rng(3)
    model = of_arrays(
        cast=rng.standard_normal((70, 90)).astype(np.float32),
        turned=rng.standard_normal((64, 100)).astype(np.float32),
        columns=rng.integers(0, 1 << 30, (900, 64)).astype(np.int64),
        whole=rng.integers(0, 255, 9_999).astype(np.uint8),
    )
    saved(model, replicated(model, 1), 1, small_blocks=True)
    cell = 2 * BLOCK_NBYTES
    world = World(hosts, NAME, cell_nbytes=cell, bucket_nbytes=cell)
    shards = []
    for rank in range(3):
        # Ranks 0 and 1 want the same two of 64 columns, rank 2 others.
        box = Box((0, 5 if rank < 2 else 40), (900, 2))
        data = {
            "cast": np.zeros((70, 90), np.float64),
            "turned": np.zeros((100, 64), np.float32).T,
            "columns": np.zeros((900, 2), np.int64),
            "whole": np.zeros(9_999, np.uint8),
        }
        shards.append(
            [
                Shard(
                    "model",
                    name,
                    TensorSpec(model.arrays[name].shape, array.dtype.name),
                    box if name == "columns" else Box.whole(array.shape),
                    None,
                    array,
                )
                for name, array in data.items()
            ]
        )
    reports = world.load(shards, replace(options, cast=True))
    for each, report in zip(shards, reports, strict=True):
        for shard in each:
            expected = model.arrays[shard.fqn][shard.box.slices()]
            assert np.array_equal(shard.data, expected), shard.fqn
        assert report.cast == ("model/cast",)
        assert report.nbytes_received > 0
    if options is OFF:
        # Each of three ranks reads two columns alone, as runs, which no other rank wants in that form.
        once = sum(model.arrays[name].nbytes for name in ("cast", "turned", "whole"))
        assert world.nbytes == once + 3 * 900 * 2 * 8


# Very many.


def test_thousands_of_tiny_tensors_are_shared_in_moments() -> None:
    model = of_arrays(**{f"t{k:05}": patterned(10) + k for k in range(MANY)})
    saved(model, replicated(model, 4), 4)
    shards = targets(model, replicated(model, 4), 4)
    world = World([0, 0, 1, 1], NAME)
    world.load(shards, OFF)
    for each in shards:
        assert_equal(model, each)
    assert world.nbytes == 40 * MANY


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 0, 1, 1]])
def test_thousands_of_holes_are_thousands_of_shared_reads_and_nobody_waits_long(hosts: list[int]) -> None:
    names = [f"t{k:05}" for k in range(MANY)]
    model = of_arrays(**{name: patterned(10) + k for k, name in enumerate(names)})
    saved(model, replicated(model, 1), 1)
    layout = replicated(model, 4)
    shards = targets(model, {name: layout[name] for name in names[::2]}, 4)
    world = World(hosts, NAME)
    world.load(shards, OFF, lenient=("*",))
    for each in shards:
        assert_equal(model, each)
    assert world.nbytes == 20 * MANY


def test_random_subsets_of_many_tensors_on_each_rank() -> None:
    rng = random.Random(5)
    names = [f"t{k:04}" for k in range(600)]
    model = of_arrays(**{name: patterned(10) + k for k, name in enumerate(names)})
    saved(model, replicated(model, 3), 3)
    wanted: dict[str, Sequence[int]] = {n: sorted(rng.sample(range(5), rng.randint(0, 5))) for n in names}
    layout: dict[str, list[Part]] = {
        name: [(Box.whole((10,)), tuple(ranks))] for name, ranks in wanted.items() if ranks
    }
    reblock(NAME)
    world = World([0, 0, 1, 1, 2], NAME, cell_nbytes=BLOCK_NBYTES, bucket_nbytes=500)
    shards = targets(model, layout, 5)
    world.load(shards, OFF, lenient=("*",))
    for each in shards:
        assert_equal(model, each)
    assert world.nbytes == 40 * len(layout)
