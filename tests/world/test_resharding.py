"""Any layout into any other: ranks as threads, the real engine, random layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from reknit.engine.saving.part import SAMPLE_NBYTES
from reknit.errors import StateError
from reknit.options import LoadOptions
from reknit.planner.save import TINY_NBYTES
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from tests.running.examples import examples
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import load_rank, save_rank
from tests.world.layouts import Model, held, wants

if TYPE_CHECKING:
    from reknit.comm.group import Group
    from reknit.engine.reports import LoadReport, SaveReport
    from reknit.storage.base import Storage
    from reknit.types.manifest import Catalog
    from reknit.types.shard import Shard
    from reknit.types.wanted import Wanted
    from tests.world.layouts import Part

EXACT = LoadOptions(threads=2, verify="off", gap_nbytes=0, timeout_s=30)


def save_on(model: Model, layout: dict[str, list[Part]], size: int, storage: Storage) -> list[SaveReport]:
    def rank(group: Group) -> SaveReport:
        shards = model.shards(layout, group.rank, filled=True, seed=group.rank)
        return save_rank(group, storage, lambda: held(shards), overwrite=True)

    return run_ranks(size, rank)


def load_on(
    model: Model, layout: dict[str, list[Part]], size: int, storage: Storage, options: LoadOptions
) -> list[tuple[list[Shard], LoadReport]]:
    def rank(group: Group) -> tuple[list[Shard], LoadReport]:
        shards = model.shards(layout, group.rank, filled=False, seed=7 * group.rank)
        return shards, load_rank(group, storage, lambda _: wants(shards), options)

    return run_ranks(size, rank)


def assert_equal(model: Model, shards: list[Shard]) -> None:
    for shard in shards:
        expected = np.ascontiguousarray(model.arrays[shard.fqn][shard.box.slices()])
        assert np.ascontiguousarray(shard.data).tobytes() == expected.tobytes(), shard


seeds = st.integers(0, 1 << 30)
sizes = st.integers(1, 6)


@settings(max_examples=examples(60))
@given(seeds, seeds, seeds, sizes, sizes, st.integers(1, 6))
def test_saving_on_one_layout_and_loading_on_another_and_back_gives_equal_bytes(
    content: int, a: int, b: int, size_a: int, size_b: int, num_tensors: int
) -> None:
    model = Model(content, num_tensors)
    layout_a, layout_b = model.spread(a, size_a), model.spread(b, size_b)
    ProcessMemory.clear("there")
    ProcessMemory.clear("back")
    there, back = ProcessMemory("there"), ProcessMemory("back")
    save_on(model, layout_a, size_a, there)
    for shards, report in load_on(model, layout_b, size_b, there, EXACT):
        assert_equal(model, shards)
        unique = {(s.fqn, s.box) for s in shards}
        boxes_are_disjoint = len(unique) == len(shards)
        if boxes_are_disjoint:
            assert report.nbytes_read == report.nbytes_wanted, "only the needed bytes are read"
    save_on(model, layout_b, size_b, back)
    for shards, _ in load_on(model, layout_a, size_a, back, LoadOptions(timeout_s=30)):
        assert_equal(model, shards)


@settings(max_examples=examples(60))
@given(seeds, seeds, st.integers(2, 5), st.integers(1, 4), st.booleans(), st.data())
def test_of_copies_that_differ_each_rank_keeps_its_own_or_all_ranks_are_told(
    content: int, spread: int, size: int, num_tensors: int, vouched: bool, data: st.DataObject
) -> None:
    model = Model(content, num_tensors)
    layout = model.spread(spread, size)
    copies = [
        (fqn, number, rank)
        for fqn, parts in layout.items()
        for number, (box, ranks) in enumerate(parts)
        for rank in ranks
        if box.numel and len(ranks) > 1
    ]
    if not copies:
        return
    fqn, number, other = data.draw(st.sampled_from(copies))
    box, holders = layout[fqn][number]
    nbytes = box.numel * model.arrays[fqn].itemsize
    byte = data.draw(st.integers(0, min(nbytes, SAMPLE_NBYTES) - 1 if vouched else nbytes - 1))
    ProcessMemory.clear("differs")
    storage = ProcessMemory("differs")

    def flipped(shard: Shard) -> Shard:
        flat = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8).copy()
        flat[byte] ^= 1
        shard.data[...] = flat.view(shard.data.dtype).reshape(shard.data.shape)
        return shard

    def saving(group: Group) -> dict[str, bytes] | StateError:
        shards = model.shards(layout, group.rank, filled=True, seed=group.rank)
        shards = [flipped(s) if (s.fqn, s.box, group.rank) == (fqn, box, other) else s for s in shards]
        held_bytes = {s.fqn: np.ascontiguousarray(s.data).tobytes() for s in shards}
        if not vouched:
            shards = [structs.replace(s, replicas=None) for s in shards]
        try:
            save_rank(group, storage, lambda: held(shards), overwrite=True)
        except StateError as error:
            return error
        return held_bytes

    saved = run_ranks(size, saving)
    whole = box.lengths == model.arrays[fqn].shape
    if not whole or (vouched and nbytes > SAMPLE_NBYTES):
        for error in saved:
            assert isinstance(error, StateError)
            assert f"model/{fqn} (ranks {', '.join(map(str, holders))})" in str(error)
        assert not list(storage.list())
        return

    def loading(group: Group) -> None:
        shards = model.shards(layout, group.rank, filled=False)

        def wanted(catalog: Catalog) -> Wanted:
            assert fqn not in catalog.tensors["model"]
            kept = catalog.own("model", {"rank": group.rank})
            mine = saved[group.rank]
            assert isinstance(mine, dict)
            expected = {fqn: mine[fqn]} if fqn in mine else {}
            assert {name: value.tobytes() for name, value in kept.items()} == expected
            return wants([shard for shard in shards if shard.fqn != fqn])

        load_rank(group, storage, wanted, EXACT)
        assert_equal(model, [shard for shard in shards if shard.fqn != fqn])

    run_ranks(size, loading)


@settings(max_examples=examples(15))
@given(seeds, seeds, st.integers(2, 6))
def test_every_replica_writes_its_share(content: int, spread: int, size: int) -> None:
    model = Model(content, 6, largest=40)
    layout = {
        fqn: [(part[0], tuple(range(size)))]
        for fqn, parts in model.spread(spread, 1).items()
        for part in parts[:1]
    }
    layout = {fqn: parts for fqn, parts in layout.items() if parts[0][0].numel == model.arrays[fqn].size}
    total = sum(model.arrays[fqn].nbytes for fqn in layout)
    if total < TINY_NBYTES * size:
        return
    ProcessMemory.clear("share")
    storage = ProcessMemory("share")
    reports = save_on(model, layout, size, storage)
    headers = 64 << 10
    for report in reports:
        assert abs(report.nbytes - total / size) <= 0.01 * total / size + headers


@pytest.mark.parametrize("size", [2, 64])
def test_scalars_of_all_ranks_cost_no_blocks(size: int) -> None:
    """The layout is that of an optimizer under FSDP2: large tensors cut by rows, and many step counters."""
    model = Model(0, 0)
    layout: dict[str, list[Part]] = {}
    wide = (3 << 20) if size <= 8 else (1 << 19)
    for number in range(6):
        model.arrays[f"layers.{number}.exp_avg"] = np.full((size, wide), number, np.uint8)
        layout[f"layers.{number}.exp_avg"] = [(Box((r, 0), (1, wide)), (r,)) for r in range(size)]
    for number in range(200):
        model.arrays[f"layers.{number}.step"] = np.array(float(number), np.float32)
        layout[f"layers.{number}.step"] = [(Box((), ()), tuple(range(size)))]
    storage = ProcessMemory("small")
    save_on(model, layout, size, storage)
    loaded = load_on(model, layout, size, storage, LoadOptions(threads=2, share="never", timeout_s=60))
    for shards, _ in loaded:
        assert_equal(model, shards)
    wanted = sum(report.nbytes_wanted for _, report in loaded)
    assert sum(report.nbytes_read for _, report in loaded) <= 1.01 * wanted
    ProcessMemory.clear("small")
