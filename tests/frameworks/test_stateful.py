from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from reknit.errors import FormatError
from reknit.frameworks.per_rank import PerRank
from reknit.frameworks.registry import collect, wanted
from reknit.types.shard import Tagged
from reknit.types.wanted import Terms
from tests.frameworks.checkpoint import fill, gathered, load, save
from tests.ranks import run
from tests.tables import table
from tests.torchrun import pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.types.wanted import Wanted


class Keeper:
    """An object that keeps its state dict, and shows its live memory in it."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loads += 1


def test_memory_that_an_object_shares_is_not_written_through() -> None:
    model = nn.Linear(2, 2)
    shadow = Keeper({"w": model.weight})  # not averaged yet: still the model's own memory
    other = nn.Linear(2, 2)
    source = {"model": other, "ema": Keeper({"w": torch.full((2, 2), 9.0)})}
    load({"model": model, "ema": shadow}, save(source))
    assert torch.equal(model.weight, other.weight)
    assert shadow.state["w"].tolist() == [[9, 9], [9, 9]]


def test_a_saved_tensor_that_the_target_does_not_have_yet_comes_anew() -> None:
    target = Keeper({"scale": None, "w": torch.zeros(2, dtype=torch.float64)})
    load({"k": target}, save({"k": Keeper({"scale": torch.ones(3), "w": torch.ones(4)})}))
    assert target.state["scale"].tolist() == [1, 1, 1]
    assert (target.state["w"].tolist(), target.state["w"].dtype) == ([1] * 4, torch.float32)


def test_an_object_is_not_touched_before_delivery_nor_when_a_tensor_is_missing() -> None:
    checkpoint = save({"k": Keeper({"w": torch.ones(2)})})
    target = Keeper({"w": torch.zeros(2)})
    want = wanted({"k": target}, checkpoint.catalog(), 0, 1)
    assert (target.loads, target.state["w"].tolist()) == (0, [0, 0])
    del checkpoint.specs["k", "w"]
    want = wanted({"k": target}, checkpoint.catalog(), 0, 1)
    assert want.missing == (("k", "w", "the checkpoint does not have it"),)
    fill(want, checkpoint)
    assert target.loads == 0


@table("hostile", [3, {}, {"library": 1, "path": "w"}, {"library": "torch"}])
def test_a_placeholder_that_names_no_tensor_is_a_format_error(hostile: Any) -> None:
    checkpoint = save({"k": Keeper({"w": 1})})
    checkpoint.shared["k", "~s"] = [Tagged("tensor", hostile)]
    with pytest.raises(FormatError):
        wanted({"k": Keeper(None)}, checkpoint.catalog(), 0, 1)


class Counted(Keeper):
    """A keeper that counts how often its state is asked for."""

    asked = 0

    def state_dict(self) -> Any:
        self.asked += 1
        return self.state


class Stream(Counted):
    """An object like a data loader: it can be iterated."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


class Frank(Stream):
    """An iterable object that declares that its state may be asked for."""

    state_dict_has_effects = False


class Shy(Counted):
    """An object that declares the opposite."""

    state_dict_has_effects = True


@table(
    ("kind", "state", "asked"),
    [
        (Counted, {"n": 1}, 0),
        (Counted, {"w": torch.ones(2)}, 1),
        (Stream, {"w": torch.ones(2)}, 0),
        (Frank, {"w": torch.ones(2)}, 1),
        (Frank, {"n": 1}, 0),
        (Shy, {"w": torch.ones(2)}, 0),
    ],
)
def test_the_present_state_is_asked_for_where_a_tensor_comes_and_that_has_no_effects(
    kind: type[Counted], state: Any, asked: int
) -> None:
    target = kind({"w": torch.zeros(2)})
    load({"k": target}, save({"k": Keeper(state)}))
    assert (target.asked, target.loads) == (asked, 1)
    assert repr(target.state) == repr(state)


def part(target: Any, *only: str) -> Wanted:
    catalog = save({"k": Keeper({"v": torch.ones(2), "w": torch.ones(2), "n": 1})}).catalog()
    return wanted({"k": target}, replace(catalog, terms=Terms(only)), 0, 1)


@table("kind", [Counted, Stream])
def test_a_load_of_other_names_does_not_ask_for_the_present_state(kind: type[Counted]) -> None:
    target = kind({"w": torch.zeros(2)})
    want = part(target, "model/*", "other")
    assert (target.asked, want.shards, want.mismatched) == (0, (), ())


@table("only", [["k/w"], ["k/~s", "k/w"]])
def test_a_part_of_an_object_needs_its_present_state(only: list[str]) -> None:
    frank, shy = Frank({"v": torch.zeros(2), "w": torch.zeros(2), "n": 0}), Shy({"w": torch.zeros(2)})
    assert [shard.fqn for shard in part(frank, *only).shards] == ["w"]
    want = part(shy, *only)
    assert (shy.asked, want.shards) == (0, ())
    ((*place, why),) = want.mismatched
    assert (place, why[:34]) == (["k", ""], "only a part of it is to be loaded,")


def test_a_loader_of_nodes_with_a_tensor_in_its_state_goes_on_where_it_was() -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    class Drawn(nodes.BaseNode):  # type: ignore[name-defined,misc]
        def reset(self, state: Any = None) -> None:
            super().reset(state)
            self.at = torch.zeros((), dtype=torch.int64) if state is None else state["at"].clone()

        def next(self) -> int:
            if self.at == 9:
                raise StopIteration
            self.at += 1
            return int(self.at)

        def get_state(self) -> dict[str, Any]:
            return {"at": self.at.clone()}

    for num_read in (0, 3):
        source, target = nodes.Loader(Drawn()), nodes.Loader(Drawn())
        rest = iter(source)
        for _ in range(num_read):
            next(rest)
        load({"k": target}, save({"k": source}))
        assert list(target) == list(rest)


def test_a_scaler_that_is_disabled_and_one_that_is_not_do_not_fit() -> None:
    on, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    want = wanted({"k": on}, save({"k": off}).catalog(), 0, 1)
    assert want.mismatched == (
        ("k", "", "a disabled scaler was saved, without values, and this one is enabled"),
    )
    own = wanted({"k": PerRank(on)}, save({"k": PerRank(off)}).catalog(), 0, 1)
    assert "a disabled scaler was saved" in own.mismatched[0][2]
    want = wanted({"k": off}, save({"k": on}).catalog(), 0, 1)
    assert want.notes == (("k", "", "this scaler is disabled, and takes none of the saved values"),)


class Averages(Keeper):
    """An iterable object with shards, that holds a data loader too."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.loaders = [Stream({})]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.state)


def average() -> Any:
    """Save and load an object that keeps shards: a moving average of distributed weights."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))

    def make(factor: float) -> Keeper:
        return Averages({"w": distribute_tensor(torch.arange(10.0).reshape(5, 2) * factor, mesh, [Shard(0)])})

    checkpoint = gathered(collect({"ema": make(3.0)}, rank, 2))
    target = make(1.0)
    before = target.state["w"].to_local()
    want = wanted({"ema": target}, checkpoint.catalog(), rank, 2)
    fill(want, checkpoint)
    shards = [s.box.lengths for s in want.shards]
    return shards, pieces.whole(target.state["w"]), before is target.state["w"].to_local(), want.notes


def test_shards_in_a_state_stay_shards() -> None:
    first, second = run(2, average)
    assert (first[0], second[0]) == ([(3, 2)], [(2, 2)])
    for _, whole, shared, ((*_, note),) in (first, second):
        assert note.startswith("its state_dict() was called")
        assert torch.equal(whole, torch.arange(10.0).reshape(5, 2) * 3)
        assert not shared
