"""The contract of custom frameworks, as tests: subclass `FrameworkSuite`, make values, run pytest."""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import reknit
from reknit.engine.memory.elements import bits, stage
from reknit.errors import MismatchError
from reknit.frameworks.registry import collect
from reknit.plugins.format import full_name
from reknit.plugins.framework import Place, registered, same_value
from reknit.testing.world import run_ranks
from reknit.transforms import names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from reknit.plugins.framework import CustomFramework, TensorSpec
    from reknit.plugins.trainer import Group
    from reknit.types.shard import Holdings, Shard

ITEM = "value"
STRANGERS: tuple[Any, ...] = (
    None,
    1,
    2.5,
    "text",
    b"bytes",
    [1],
    (1, 2),
    {},
    {"a": 1},
    np.zeros(3),
    object(),
)


class FrameworkSuite(ABC):
    """The contract of `reknit.frameworks.custom.CustomFramework`.

    `contents` reads values without the framework, so that a framework that is consistently wrong does not
    pass.
    """

    sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    """Numbers of ranks among which values can be divided."""

    @abstractmethod
    def framework(self) -> CustomFramework:
        """Return the framework under test."""

    @abstractmethod
    def make(self, rank: int, size: int, seed: int) -> Any:
        """Return the part of `rank` of `size` ranks in a value, whose contents depend on `seed` alone.

        Contents of other seeds differ in all tensors and values, and not in their shapes.
        """

    @abstractmethod
    def contents(self, parts: Sequence[Any]) -> Mapping[str, Any]:
        """Return the contents of a value by the framework's names; `parts` are the parts of all ranks.

        Whole arrays (copies, put together without the framework) and plain values.
        """

    @pytest.fixture(autouse=True)
    def known(self) -> Iterator[None]:
        """Register the framework for one test."""
        with registered(self.framework()):
            yield

    def parts(self, size: int, seed: int) -> list[Any]:
        """Return a whole value, by rank."""
        return [self.make(rank, size, seed) for rank in range(size)]

    def holdings(self, parts: Sequence[Any]) -> list[Holdings]:
        """Return the holdings of each rank."""
        return [collect({ITEM: part}, rank, len(parts)) for rank, part in enumerate(parts)]

    def save(self, path: Path, parts: Sequence[Any]) -> None:
        """Save a value, each part as a rank of its own."""

        def rank(group: Group) -> None:
            reknit.save(path, {ITEM: parts[group.rank]}, group=group).result()

        run_ranks(len(parts), rank)

    def load(self, path: Path, parts: Sequence[Any], **options: Any) -> list[reknit.LoadReport]:
        """Load into a value, each part as a rank of its own."""

        def rank(group: Group) -> reknit.LoadReport:
            wanted = reknit.LoadOptions(timeout_s=60, progress=False, **options)
            return reknit.load(path, {ITEM: parts[group.rank]}, group=group, options=wanted)

        return run_ranks(len(parts), rank)

    def test_it_takes_its_own_values_and_no_others(self) -> None:
        """`matches` is asked of every value in every state."""
        framework = self.framework()
        assert framework.matches(self.make(0, 1, 0)) is True
        assert not any(framework.matches(stranger) for stranger in STRANGERS)

    def test_values_of_two_seeds_differ_in_everything(self) -> None:
        """Otherwise the other tests would not see any difference."""
        one, other = (self.contents(self.parts(1, seed)) for seed in (0, 1))
        assert one
        assert one.keys() == other.keys()
        assert not [name for name in one if same_value(one[name], other[name])]
        for size in self.sizes:
            assert_same(self.contents(self.parts(size, 0)), one)

    def test_collecting_changes_nothing_and_finds_the_same_again(self) -> None:
        """A training job goes on after its state was collected."""
        for size in self.sizes:
            parts = self.parts(size, 0)
            before = self.contents(parts)
            first = [summary(each) for each in self.holdings(parts)]
            assert first == [summary(each) for each in self.holdings(parts)]
            assert_same(self.contents(parts), before)

    def test_names_are_the_same_on_any_number_of_ranks(self) -> None:
        """A checkpoint is loaded by its names, which do not depend on the number of ranks that saved it."""
        found = []
        for size in self.sizes:
            everyone = self.holdings(self.parts(size, 0))
            tensors = {(s.item, s.fqn): s.spec for each in everyone for s in each.shards}
            found.append((tensors, {(b.item, b.fqn) for each in everyone for b in each.blobs}))
        assert all(each == found[0] for each in found)

    def test_no_rank_gives_a_name_twice(self) -> None:
        """One name is one tensor, in boxes that do not overlap, or one value."""
        for size in self.sizes:
            for each in self.holdings(self.parts(size, 0)):
                values = [(blob.item, blob.fqn) for blob in each.blobs]
                assert len(values) == len(set(values))
                assert not set(values) & {(shard.item, shard.fqn) for shard in each.shards}
                for number, shard in enumerate(each.shards):
                    for other in each.shards[:number]:
                        if (other.item, other.fqn) == (shard.item, shard.fqn):
                            assert other.box.intersect(shard.box) is None, f"{shard.fqn} twice at {shard.box}"

    def test_the_boxes_of_all_ranks_are_the_whole_and_copies_are_equal(self) -> None:
        """A hole would be found when the checkpoint is committed, a wrong copy never."""
        for size in self.sizes:
            wholes: dict[str, NDArray[np.uint8]] = {}
            seen: dict[str, NDArray[np.bool_]] = {}
            for each in self.holdings(self.parts(size, 0)):
                for shard in each.shards:
                    elements = elements_of(shard)
                    form = (*shard.spec.shape, shard.spec.itemsize)
                    whole = wholes.setdefault(shard.fqn, np.zeros(form, np.uint8))
                    done = seen.setdefault(shard.fqn, np.zeros(shard.spec.shape, np.bool_))
                    at = shard.box.slices()
                    assert np.array_equal(whole[at][done[at]], elements[done[at]]), (
                        f"copies of {shard.fqn}{shard.box} differ"
                    )
                    whole[at], done[at] = elements, True
            holes = [name for name, done in seen.items() if not done.all()]
            assert not holes, f"no rank of {size} holds all of {holes}"
            for name, true in self.contents(self.parts(size, 0)).items():
                if fqn_of(name) in wholes:
                    whole = wholes.pop(fqn_of(name))
                    assert whole.tobytes() == np.ascontiguousarray(true).tobytes(), (
                        f"{name} is something else"
                    )
            assert not wholes, f"{list(wholes)} are tensors that the value does not have"

    def test_all_that_a_value_has_is_given_under_its_name(self) -> None:
        """A forgotten value would not be saved."""
        for size in self.sizes:
            parts = self.parts(size, 0)
            everyone = self.holdings(parts)
            names = {shard.fqn for each in everyone for shard in each.shards}
            names |= {blob.fqn for each in everyone for blob in each.blobs}
            assert names == set(map(fqn_of, self.contents(parts)))

    def test_ranks_that_are_said_to_hold_a_box_hold_it(self) -> None:
        """A rank that is named as a replica may be chosen to write for the others."""
        for size in self.sizes:
            everyone = self.holdings(self.parts(size, 0))
            held = [{(s.fqn, s.box): s.replicas for s in each.shards} for each in everyone]
            for rank, each in enumerate(held):
                for key, replicas in each.items():
                    if replicas is not None:
                        assert rank in replicas
                        assert list(replicas) == sorted(set(replicas))
                        assert all(held[other].get(key) == replicas for other in replicas)

    def test_a_checkpoint_loads_on_any_number_of_ranks(self, tmp_path: Path) -> None:
        """Saved and loaded by each number of ranks, everything is as it was."""
        true = self.contents(self.parts(1, 0))
        for size in self.sizes:
            path = tmp_path / f"from-{size}"
            self.save(path, self.parts(size, 0))
            for other in self.sizes:
                target = self.parts(other, 1)
                for report in self.load(path, target):
                    assert not report.missing
                assert_same(self.contents(target), true)

    def test_saving_leaves_the_value_as_it_is(self, tmp_path: Path) -> None:
        """While it is written, too."""
        for size in self.sizes:
            parts = self.parts(size, 0)
            before = self.contents(parts)
            self.save(tmp_path / str(size), parts)
            assert_same(self.contents(parts), before)

    def test_a_name_that_the_checkpoint_lacks_is_refused_and_nothing_changes(self, tmp_path: Path) -> None:
        """For each name in turn, under which the checkpoint has something else then."""
        size = max(self.sizes)
        self.save(tmp_path / "x", self.parts(size, 0))
        target = self.parts(size, 1)
        before = self.contents(target)
        for name in names_of(self.holdings(target)):
            with pytest.raises(MismatchError, match="nothing was changed"):
                self.load(tmp_path / "x", target, transforms=[names({name: f"{name}-of-old"})])
            assert_same(self.contents(target), before)

    def test_what_is_not_to_be_loaded_stays(self, tmp_path: Path) -> None:
        """One name after the other, alone: `restore` gets the wanted names and no more."""
        size = max(self.sizes)
        self.save(tmp_path / "x", self.parts(size, 0))
        target = self.parts(size, 1)
        expected, saved = dict(self.contents(target)), self.contents(self.parts(size, 0))
        for name in saved:
            self.load(tmp_path / "x", target, only=(glob.escape(full_name(ITEM, fqn_of(name))),))
            expected[name] = saved[name]
            assert_same(self.contents(target), expected)


def fqn_of(name: str) -> str:
    """Return the name that a checkpoint has for a name that a framework gives."""
    return Place(ITEM).child(*name.split("/")).fqn if name else ""


def assert_same(found: Mapping[str, Any], true: Mapping[str, Any]) -> None:
    """Fail with the names that differ."""
    assert found.keys() == true.keys()
    wrong = [name for name in true if not same_value(found[name], true[name])]
    assert not wrong, f"{wrong} have changed"


def names_of(everyone: Sequence[Holdings]) -> list[str]:
    """Return the full names of all tensors and values."""
    every: list[Any] = [one for each in everyone for one in (*each.shards, *each.blobs)]
    return sorted({full_name(one.item, one.fqn) for one in every})


def summary(holdings: Holdings) -> tuple[Any, ...]:
    """Return a rank's holdings with their bytes, in a form that tests can compare."""
    shards: list[tuple[str, TensorSpec, Any, Any, bytes]] = [
        (s.fqn, s.spec, s.box, s.replicas, elements_of(s).tobytes()) for s in holdings.shards
    ]
    return shards, [(blob.fqn, repr(blob.value)) for blob in holdings.blobs]


def elements_of(shard: Shard) -> NDArray[np.uint8]:
    """Return the bytes of each element of a box, as one more dimension."""
    found = np.zeros((*shard.box.lengths, shard.spec.itemsize), np.uint8)
    stage(bits(shard.data), 0, shard.box.numel, found.reshape(-1))
    return found
