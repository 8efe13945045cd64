from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reknit
from reknit.dataloader import ReaderPlace, TokenLoader, TokenSet
from reknit.errors import StateError, UsageError
from reknit.frameworks.registry import collect, wanted
from tests.dataloader.corpora import BUDGET, equal, loader, rows, token_set
from tests.frameworks.checkpoint import assemble, load, save
from tests.running.examples import examples

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.dataloader import Batch

WEB, CODE = token_set("web", 120, 6, 3.0), token_set("code", 40, 3)


def tokens_of(batches: list[Batch]) -> dict[tuple[int, ...], list[int]]:
    """Return the whole samples that were consumed, by set, source, epoch, position and number."""
    found: dict[tuple[int, ...], list[int]] = {}
    for batch in batches:
        for n, row in enumerate(batch.samples.tolist()):
            piece = batch.tokens[batch.bounds[n] : batch.bounds[n + 1]].tolist()
            found.setdefault(tuple(row[:5]), []).extend(piece)
    return found


@given(st.integers(0, 50), st.integers(1, 7), st.integers(0, 90), st.integers(1, 3), st.booleans())
@settings(max_examples=examples(60))
def test_an_epoch_is_every_sample_with_its_tokens_and_no_batch_is_over_budget(
    num_samples: int, partitions: int, longest: int, epochs: int, shuffle: bool
) -> None:
    one = token_set("web", num_samples, partitions, longest=longest)
    batches = list(loader([one], epochs=epochs, shuffle=shuffle, num_workers=2, padding=-1))
    for batch in batches:
        assert len(batch.tokens) == BUDGET
        assert 0 <= batch.num_tokens <= BUDGET
        assert (batch.tokens[batch.num_tokens :] == -1).all()
    samples = rows(**one.arguments)
    found = tokens_of(batches)
    assert Counter((key[2], key[4]) for key in found) == Counter(
        (epoch, n) for epoch in range(epochs) for n in range(num_samples)
    )
    assert all(found[key] == samples[key[4]].tolist() for key in found)


def test_batches_are_full_while_there_is_enough_to_choose_from() -> None:
    batches = list(loader([token_set("web", 400, 4, longest=20)]))
    assert sum(batch.num_tokens for batch in batches[:-8]) > 0.9 * BUDGET * len(batches[:-8])


def test_token_sets_keep_their_ratios_of_tokens_also_after_the_job_has_changed() -> None:
    sets = [token_set("web", 600, 8, 3.0), token_set("code", 600, 8, 1.0)]
    jobs = [loader(sets, rank, 3, epochs=None) for rank in range(3)]
    shares = []
    for size in (3, 2):
        counted = Counter[int]()
        for one in jobs:
            for batch in islice(one, 150):
                for row, length in zip(batch.samples.tolist(), np.diff(batch.bounds).tolist(), strict=True):
                    counted[row[0]] += length
        shares.append(counted[0] / counted.total())
        checkpoint = assemble([collect({"l": one}, n, size) for n, one in enumerate(jobs)])
        jobs = [loader(sets, rank, 2, epochs=None) for rank in range(2)]
        for rank, one in enumerate(jobs):
            load({"l": one}, checkpoint, rank, 2)
    assert shares == pytest.approx([0.75, 0.75], abs=0.02)


def test_epochs_differ_in_order_and_the_order_depends_on_the_seed_alone() -> None:
    one = token_set("web", 50, 1)

    def order(seed: int, **more: Any) -> list[tuple[int, int]]:
        batches = loader([one], seed=seed, epochs=2, **more)
        return list(dict.fromkeys((row[2], row[4]) for b in batches for row in b.samples.tolist()))

    first, second = order(0)[:50], order(0)[50:]
    assert [n for _, n in first] != [n for _, n in second]
    assert order(0) == order(0, num_workers=3)
    assert order(0) != order(1)
    assert [n for _, n in order(0, shuffle=False)] == [*range(50), *range(50)]


def test_a_loader_goes_on_bit_for_bit_whatever_was_made_ahead() -> None:
    for num_workers in (0, 1, 3):
        whole = list(loader([WEB, CODE], num_workers=num_workers))
        one = loader([WEB, CODE], num_workers=num_workers, prefetch=5)
        assert equal(list(islice(one, 20)), whole[:20])
        checkpoint = save({"l": one})
        other = loader([WEB, CODE], num_workers=num_workers)
        next(other)
        load({"l": other}, checkpoint)
        assert equal(list(other), whole[20:]), num_workers
        assert equal(list(one), whole[20:]), "saving changed nothing"


def test_ranks_that_read_for_ever_need_a_source_each() -> None:
    with pytest.raises(UsageError, match="4 ranks cannot read 2 sources for ever"):
        loader([token_set("web", 10, 2)], 0, 4, epochs=None)


def test_another_order_of_the_data_and_other_data_are_refused_before_anything_changes() -> None:
    checkpoint = save({"l": loader([WEB])})
    changes: list[tuple[list[TokenSet], dict[str, Any], str]] = [
        ([WEB], {"seed": 7}, "seed = 0, and this one 7"),
        ([WEB], {"shuffle": False}, "shuffle = True, and this one False"),
        ([WEB], {"dtype": "int64"}, "dtype = 'int32'"),
        ([WEB], {"token_budget": BUDGET // 2}, "keep the token budget"),
        ([CODE], {}, "token_sets"),
        ([WEB, CODE], {}, "token_sets"),
        ([token_set("web", 121, 6)], {}, "token_sets"),
        ([token_set("web", 120, 5)], {}, "token_sets"),
    ]
    for sets, change, reported in changes:
        other = loader(sets, **change)
        want = wanted({"l": other}, checkpoint.catalog(), 0, 1)
        assert [reported in why for _, _, why in want.mismatched] == [True], (sets, change)
        assert equal(list(other), list(loader(sets, **change)))


def test_data_begin_anew_where_an_exception_leaves_a_loader_out(tmp_path: Path) -> None:
    one = loader([WEB])
    list(islice(one, 3))
    reknit.save(tmp_path / "x", {"loader": one, "progress": {"step": 3}})
    other, progress = loader([CODE]), {"step": 0}
    with pytest.raises(reknit.MismatchError):
        reknit.load(tmp_path / "x", {"loader": other, "progress": progress})
    reknit.load(tmp_path / "x", {"loader": other, "progress": progress}, strict=["!loader*"])
    assert progress == {"step": 3}
    assert equal(list(other), list(loader([CODE])))


def test_ratios_epochs_and_a_larger_budget_may_change() -> None:
    one = loader([WEB, CODE])
    seen = tokens_of(list(islice(one, 10)))
    other = loader([token_set("web", 120, 6, 1.0), CODE], token_budget=2 * BUDGET)
    load({"l": other}, save({"l": one}))
    rest = tokens_of(list(other))
    assert {key[:1] + key[4:] for key in [*seen, *rest]} == {(0, n) for n in range(120)} | {
        (1, n) for n in range(40)
    }


def test_replicas_save_nothing_and_a_missing_rank_is_told() -> None:
    pair = [loader([WEB], replica=replica) for replica in range(2)]
    holdings = [collect({"l": one}, n, 2) for n, one in enumerate(pair)]
    assert [sum(blob.coordinate is not None for blob in each.blobs) for each in holdings] == [6, 0]
    alone = assemble(holdings[1:])
    want = wanted({"l": pair[0]}, alone.catalog(), 0, 1)
    assert "of 6 sources the checkpoint has none of 0, 1, 2, 3, 4, 5" in want.mismatched[0][2]


def test_two_loaders_in_one_item_are_kept_apart() -> None:
    one = {"train": loader([WEB], num_workers=2), "test": loader([CODE])}
    taken = {name: list(islice(each, n)) for (name, each), n in zip(one.items(), (7, 3), strict=True)}
    assert taken
    other = {"train": loader([WEB], num_workers=2), "test": loader([CODE])}
    load({"l": other}, save({"l": one}))
    assert all(equal(list(one[name]), list(other[name])) for name in one)


def test_a_loader_that_another_object_was_saved_in_place_of_is_told_as_missing() -> None:
    want = wanted({"l": loader([WEB])}, save({"l": {"epoch": 1}}).catalog(), 0, 1)
    assert [name for _, name, _ in want.missing] == ["~l"]


class Stream:
    """A loader that has one position for all ranks."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def stream_state(self) -> dict[str, int]:
        return {"position": self.position}

    def load_stream(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_stream_that_differs_between_ranks_is_refused_on_another_number_of_them() -> None:
    checkpoint = assemble([collect({"l": Stream(n)}, n, 4) for n in range(4)])
    want = wanted({"l": Stream()}, checkpoint.catalog(), 0, 3)
    assert "it differed between the 4 ranks that saved it" in want.missing[0][2]


class Mesh:
    """A device mesh as seen by rank 11 of 2 x 3 x 4."""

    mesh_dim_names, shape = ("pp", "dp", "tp"), (2, 3, 4)

    def get_coordinate(self) -> list[int]:
        return [0, 2, 3]


def test_a_place_on_a_mesh_counts_data_parallel_ranks_and_the_others_apart() -> None:
    assert ReaderPlace.on_mesh(Mesh(), "dp") == ReaderPlace(2, 3, 3)
    assert ReaderPlace.on_mesh(Mesh(), "pp", "dp") == ReaderPlace(2, 6, 3)
    with pytest.raises(UsageError, match="no place along cp"):
        ReaderPlace.on_mesh(Mesh(), "cp")


def test_a_loader_that_cannot_be_is_refused() -> None:
    numbers = {"token_budget": 0, "epochs": 0, "buffer_tokens": 0, "save_every": 0, "num_workers": -1}
    wrong: list[dict[str, Any]] = [{name: number} for name, number in numbers.items()]
    for options in (*wrong, {"place": ReaderPlace(2, 2)}):
        with pytest.raises(UsageError):
            TokenLoader([WEB], **{"token_budget": 8, **options})
    with pytest.raises(UsageError, match="different names"):
        loader([WEB, WEB])
    with pytest.raises(UsageError, match="a ratio above 0"):
        TokenSet(name="web", open=rows, ratio=0.0)


def test_tokens_that_do_not_fit_into_the_batch_type_are_refused_and_not_cut() -> None:
    large = TokenSet(name="web", open=lambda: [np.array([1, 40_000])], num_partitions=1)
    assert next(loader([large], dtype="uint16")).tokens[:2].tolist() == [1, 40_000]
    with pytest.raises(StateError, match="sample 0 of 'web' has tokens that are not int16"):
        next(loader([large], dtype="int16"))


def test_a_shard_whose_items_do_not_fit_into_a_batch_is_refused() -> None:
    one = loader([WEB])
    next(one)
    shards = one.sharded_state()
    broken = next(shard for shard in shards if shard.num_items)
    broken.value["items"]["length"][0] += 1
    with pytest.raises(StateError, match="do not fit"):
        loader([WEB]).load_shards(one.replicated_state(), shards)
