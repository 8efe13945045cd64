"""States of sources that are too large for a value: their arrays are tensors of the checkpoint."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import reknit
from reknit.dataloader import process
from reknit.dataloader.sources import LoaderShard
from reknit.errors import MismatchError
from reknit.frameworks.registry import collect
from reknit.testing.world import run_ranks
from reknit.types import shard
from tests.dataloader.corpora import Ledger, equal, loader, token_set

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SETS = [token_set("web", 120, 4, 3.0), token_set("code", 60, 2)]


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a kilobyte be large; worker processes receive the limit from their loader."""
    monkeypatch.setattr(shard, "INLINE_NBYTES", 1024)
    monkeypatch.setattr(process, "INLINE_NBYTES", 1024)


def large(path: Path) -> list[str]:
    """Return the names of the tensors that hold parts of loaders."""
    tensors = reknit.open(path).tensors
    return sorted(fqn for names in tensors.values() for fqn in names if fqn.startswith("~p/"))


class Buffered:
    """A loader of `num_sources` sources with buffers of every kind, for one rank."""

    def __init__(self, num_sources: int, rank: int = 0, size: int = 1) -> None:
        self.numbers = range(rank, num_sources, size)
        self.num_sources, self.rank, self.size = num_sources, rank, size
        self.states = {number: self.state(number) for number in self.numbers}

    @staticmethod
    def state(number: int) -> dict[Any, Any]:
        rng = np.random.default_rng(number)
        return {
            "tokens": rng.integers(0, 30_000, 700, np.int32),
            "image": rng.bytes(900),
            "mixed": [torch.arange(300, dtype=torch.bfloat16), (np.float16(1.5), "text", b"few")],
            "big_endian": np.arange(90, dtype=">i8"),
            ("a", 1): np.arange(200, dtype=np.float32),
            "small": np.arange(3),
        }

    def replicated_state(self) -> Any:
        return {"sources": self.num_sources}

    def sharded_state(self) -> Sequence[LoaderShard]:
        return [LoaderShard(n, self.rank, 0, 1, 1, state) for n, state in self.states.items()]

    def choose_shards(self, replicated: Any, saved: Sequence[LoaderShard]) -> Sequence[LoaderShard]:
        return [one for one in saved if one.source in self.numbers]

    def load_shards(self, replicated: Any, shards: Sequence[LoaderShard]) -> None:
        self.states = {one.source: one.value for one in shards}


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, types and bits included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def test_every_kind_of_large_array_returns_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, lambda group: reknit.save(tmp_path, {"l": Buffered(5, group.rank, 2)}, group=group))
    assert [name.removeprefix("~p/4/") for name in large(tmp_path) if name.startswith("~p/4/")] == [
        "image",
        "mixed/0",
        "mixed/1/2",
        "small",
        "tokens",
    ]
    for size in (1, 3):
        found: dict[int, Any] = {}

        def resume(group: Any, size: int = size, found: dict[int, Any] = found) -> None:
            one = Buffered(5, group.rank, size)
            one.states = {}
            reknit.load(tmp_path, {"l": one}, group=group)
            found.update(one.states)

        run_ranks(size, resume)
        assert all(same(found[number], Buffered.state(number)) for number in range(5))


def test_a_part_of_a_loader_is_refused_and_names_what_it_needs(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"x": {"l": Buffered(1)}})
    with pytest.raises(MismatchError, match=r"x/l/~p/0/image.*Name all of it or nothing"):
        reknit.load(tmp_path, {"x": {"l": Buffered(1)}}, options=reknit.LoadOptions(only=("x/l/~l",)))


def test_a_loader_finds_its_arrays_in_a_renamed_item(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"old": Buffered(2)})
    other = Buffered(2)
    other.states = {}
    options = reknit.LoadOptions(transforms=[reknit.transforms.names({"old/": "new/"})])
    reknit.load(tmp_path, {"new": other}, options=options)
    assert all(same(other.states[number], Buffered.state(number)) for number in range(2))


def test_arrays_up_to_the_limit_stay_in_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "INLINE_NBYTES", 1 << 20)
    assert collect({"l": Buffered(1)}, 0, 1).shards == ()


@pytest.mark.parametrize(("in_process", "wait"), [(True, False), (False, True)])
def test_batches_stay_the_same_through_restarts(tmp_path: Path, in_process: bool, wait: bool) -> None:
    options: dict[str, Any] = {"num_workers": 1, "buffer_tokens": 1200, "in_process": in_process}
    whole = list(loader(SETS, num_workers=1, buffer_tokens=1200))
    found = []
    for k in range(2):
        one = loader(SETS, save_every=6, **options)
        if k:
            reknit.load(tmp_path / str(k - 1), {"loader": one})
        found += list(islice(one, 6))
        reknit.save(tmp_path / str(k), {"loader": one}, wait=wait).result()
        assert "~p/0/items/tokens" in large(tmp_path / str(k))
        next(one)  # made and taken after the save, and gone with the restart
        one.close()
    assert equal(found, whole[:12])


def test_no_sample_is_lost_on_another_number_of_workers(tmp_path: Path) -> None:
    ledger, expected = Ledger(), Ledger()
    expected.enter(loader(SETS))
    before: Path | None = None
    for k, (workers, in_process) in enumerate([(2, False), (0, True), (1, True)]):
        one = loader(SETS, num_workers=workers, buffer_tokens=1500, in_process=in_process)
        if before:
            reknit.load(before, {"loader": one})
        if k == 2:
            ledger.enter(one)
        else:
            ledger.enter(islice(one, 5))
            reknit.save(before := tmp_path / str(k), {"loader": one})
            assert large(before)
        one.close()
    assert ledger.consumed == expected.consumed
