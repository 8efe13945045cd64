"""Loaders of several ranks, saved to a store and loaded from it on other layouts."""

from __future__ import annotations

import itertools
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from reknit.engine.stored.verify import verify
from reknit.errors import CheckpointNotFoundError, MismatchError, StorageError
from reknit.format.paths import parse_path
from reknit.frameworks.registry import collect, wanted
from reknit.options import LoadOptions
from reknit.testing.faulty_storage import Fault, FaultyStorage
from reknit.testing.world import run_ranks
from tests.dataloader.corpora import Ledger, loader, token_set
from tests.engine.saved import CountingStorage, fresh
from tests.world.jobs import load_rank, save_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.comm.group import Group
    from reknit.dataloader import TokenLoader
    from reknit.storage.base import Storage

SETS = [token_set("web", 300, 12, 3.0), token_set("code", 90, 6)]


def saved(storage: Storage, job: Sequence[TokenLoader]) -> None:
    def act(group: Group) -> None:
        state = {"loader": job[group.rank]}
        save_rank(group, storage, lambda: collect(state, group.rank, group.size), step=1)

    run_ranks(len(job), act)


def resumed(stores: Sequence[Storage], job: Sequence[TokenLoader], *lenient: str) -> None:
    def act(group: Group) -> None:
        state = {"loader": job[group.rank]}
        load_rank(
            group,
            stores[group.rank],
            lambda catalog: wanted(state, catalog, group.rank, group.size),
            items=("loader",),
            lenient=lenient,
        )

    run_ranks(len(job), act)


def shards_read(storage: CountingStorage) -> list[str]:
    """Return the files of ranks' own values that were asked for, as often as they were."""
    named = [(path, parse_path(path)) for path, _, _ in storage.asked]
    return [path for path, name in named if name is not None and name.kind == "own"]


def views(name: str, size: int) -> list[CountingStorage]:
    """Return a store for each rank, which counts for itself the reads of the same files."""
    return [CountingStorage(name) for _ in range(size)]


def test_each_rank_reads_the_files_of_its_own_sources_and_no_others() -> None:
    storage = fresh("loaders")
    job = [loader(SETS, rank, 4, num_workers=2) for rank in range(4)]
    ledger, whole = Ledger(), Ledger()
    whole.enter(loader(SETS))
    for one in job:
        ledger.enter(islice(one, 6))
    saved(storage, job)
    stores = views("loaders", 3)
    after = [loader(SETS, rank, 3) for rank in range(3)]
    resumed(stores, after)
    counts = [len(shards_read(store)) for store in stores]
    assert sum(counts) == 18
    assert max(counts) <= 7
    assert len({path for store in stores for path in shards_read(store)}) == 18
    for one in after:
        ledger.enter(one)
    assert ledger.consumed == whole.consumed


def test_ranks_that_read_the_same_write_once_and_all_load() -> None:
    storage = fresh("replicas")
    job = [loader(SETS, rank // 2, 2, rank % 2) for rank in range(4)]
    for one in job:
        list(islice(one, 5))
    saved(storage, job)
    own = [name for file in storage.list() if (name := parse_path(file.path)) and name.kind == "own"]
    assert len(own) == 18
    assert {name.rank for name in own} == {0, 2}
    after = [loader(SETS, rank // 3, 2, rank % 3) for rank in range(6)]
    resumed(views("replicas", 6), after)
    taken = [[batch.samples.tolist() for batch in one] for one in after]
    assert taken[0] == taken[1] == taken[2] != taken[3] == taken[4] == taken[5]
    assert taken[0] == [batch.samples.tolist() for batch in job[0]]


def test_when_a_rank_saved_no_shards_the_load_fails_on_all_ranks_and_says_whose_are_missing() -> None:
    storage = fresh("astray")
    saved(storage, [loader(SETS, 0, 2), loader(SETS, 1, 2, replica=1)])
    after = [loader(SETS, rank, 2) for rank in range(2)]
    with pytest.raises(MismatchError, match="of 18 sources the checkpoint has none of"):
        resumed(views("astray", 2), after)
    resumed(views("astray", 2), after, "loader*")  # and then the loaders are as they were
    assert next(after[0]).samples[0].tolist()[3] == 0


def test_a_shard_that_cannot_be_written_fails_the_save_and_leaves_nothing() -> None:
    kind: Any
    for kind, at in itertools.product(("error", "lost"), (1, 9, 19)):
        storage = fresh("faulty-loader")
        faulty = FaultyStorage(storage, plan=[Fault(kind, at, "finish")])
        with pytest.raises(StorageError, match="loader/"):
            saved(faulty, [loader(SETS)])
        assert [file.path for file in storage.list()] == []
        with pytest.raises(CheckpointNotFoundError):
            verify(storage, "data", LoadOptions())
