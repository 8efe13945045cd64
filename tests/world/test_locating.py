"""The part of the index that a rank holds while it loads, and the ranks that check the files."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.engine.loading import read
from reknit.errors import CorruptError, ReknitError
from reknit.options import LoadOptions
from reknit.planner.load import plan_load
from reknit.testing.faulty_storage import FaultyStorage
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from tests.storage.process_memory import ProcessMemory
from tests.world.jobs import load_rank
from tests.world.layouts import Model, wants
from tests.world.test_resharding import assert_equal, save_on

if TYPE_CHECKING:
    import pytest

    from reknit.comm.group import Group
    from reknit.types.manifest import Index
    from reknit.types.shard import Shard
    from tests.world.layouts import Part

SIZE = 4
NAMES = ("a", "b", "c")
ROWS = 2 * SIZE

Layout = dict[str, "list[Part]"]


def model() -> Model:
    made = Model(0, 0)
    made.arrays = {name: np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3) for name in NAMES}
    return made


SHARDED: Layout = {name: [(Box((2 * k, 0), (2, 3)), (k,)) for k in range(SIZE)] for name in NAMES}
REPLICATED: Layout = {name: [(Box((0, 0), (ROWS, 3)), tuple(range(SIZE)))] for name in NAMES}
PAIRS: Layout = {
    name: [(Box((4 * k, 0), (4, 3)), (2 * k, 2 * k + 1)) for k in range(SIZE // 2)] for name in NAMES
}


def saved(name: str) -> ProcessMemory:
    """Save on all ranks: the rows of each rank are in a file of its own."""
    ProcessMemory.clear(name)
    save_on(model(), SHARDED, SIZE, ProcessMemory(name))
    return ProcessMemory(name)


def load_all(
    stored: ProcessMemory, layout: Layout, **options: Any
) -> tuple[list[FaultyStorage], list[list[Shard]], list[ReknitError | None]]:
    """Load on all ranks; return the operations of each, its state, and its error."""
    stores = [FaultyStorage(stored) for _ in range(SIZE)]
    targets = [model().shards(layout, rank, filled=False, seed=rank) for rank in range(SIZE)]

    def rank(group: Group) -> ReknitError | None:
        shards, chosen = targets[group.rank], LoadOptions(timeout_s=30, **options)
        try:
            load_rank(group, stores[group.rank], lambda _: wants(shards), chosen)
        except ReknitError as error:
            return error
        return None

    errors = run_ranks(SIZE, rank)
    return stores, targets, errors


def looked_at(stores: list[FaultyStorage]) -> list[Counter[str]]:
    """Return the number of requests of each rank for the size of each data file."""
    return [
        Counter(path for name, path in store.operations if name == "size" and path.endswith(".safetensors"))
        for store in stores
    ]


def test_a_rank_that_wants_its_shards_holds_just_their_rows_and_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[Index] = []

    def planning(index: Index, *rest: Any) -> Any:
        held.append(index)
        return plan_load(index, *rest)

    monkeypatch.setattr(read, "plan_load", planning)
    _, targets, errors = load_all(saved("locating-held"), SHARDED)
    assert errors == [None] * SIZE
    for shards in targets:
        assert_equal(model(), shards)
    assert len(held) == SIZE
    assert [len(index.tensor) for index in held] == [len(NAMES)] * SIZE
    assert len({index.files for index in held}) == SIZE
    assert all(len(index.files) == 1 for index in held)


def test_replicas_divide_the_files_that_they_look_at() -> None:
    stored = saved("locating-replicas")
    files = {listed.path for listed in stored.list() if listed.path.endswith(".safetensors")}
    for share in ("auto", "never"):
        stores, targets, errors = load_all(stored, REPLICATED, share=share)
        assert errors == [None] * SIZE, share
        for shards in targets:
            assert_equal(model(), shards)
        looks = looked_at(stores)
        assert sum(looks, Counter()) == Counter(dict.fromkeys(files, 1)), share
        assert [len(look) for look in looks] == [1] * SIZE, share


def test_ranks_that_want_other_boxes_look_for_themselves() -> None:
    stores, _, errors = load_all(saved("locating-pairs"), PAIRS)
    assert errors == [None] * SIZE
    looks = looked_at(stores)
    assert [len(look) for look in looks] == [1] * SIZE
    assert set(looks[0]) | set(looks[1]) != set(looks[2]) | set(looks[3])


def test_a_missing_or_short_file_is_found_on_all_ranks_before_anything_has_changed() -> None:
    stored = saved("locating-missing")
    path = next(listed.path for listed in stored.list() if listed.path.startswith("model/00002"))
    data = stored.get(path, limit=1 << 20)
    for is_short, layout in itertools.product((False, True), (SHARDED, REPLICATED, PAIRS)):
        stored.delete(path)
        if is_short:
            stored.put(path, data[:-1], if_absent=False)
        before = [model().shards(layout, rank, filled=False, seed=rank) for rank in range(SIZE)]
        _, targets, errors = load_all(stored, layout)
        assert all(isinstance(error, CorruptError) and path in error.message for error in errors), errors
        for old, new in zip(before, targets, strict=True):
            for one, other in zip(old, new, strict=True):
                assert one.data.tobytes() == other.data.tobytes()
        stored.put(path, data, if_absent=False)


def test_a_file_that_no_rank_needs_may_be_missing() -> None:
    stored = saved("locating-unneeded")
    path = next(listed.path for listed in stored.list() if listed.path.startswith("model/00003"))
    stored.delete(path)
    some: Layout = {name: [(Box((2, 0), (3, 3)), tuple(range(SIZE)))] for name in NAMES}
    _, targets, errors = load_all(stored, some)
    assert errors == [None] * SIZE
    for shards in targets:
        assert_equal(model(), shards)
