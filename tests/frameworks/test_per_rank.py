from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import reknit
from reknit.errors import MismatchError, StateError, UsageError
from reknit.frameworks.per_rank import PerRank, RngState
from reknit.frameworks.registry import collect, wanted
from reknit.frameworks.walk.walk import World
from tests.frameworks.checkpoint import Checkpoint, assemble, fill, load, save
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

KEPT = ": each rank keeps its present value"


def save_as(size: int, make: Any) -> Checkpoint:
    """Save the state `make(rank)` for every rank of a world."""
    return assemble([collect(make(rank), rank, size) for rank in range(size)])


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def _random_state_kept() -> Any:
    state = RngState().state_dict()
    yield
    RngState().load_state_dict(state)


def test_random_numbers_go_on_where_each_rank_was() -> None:
    def make(rank: int) -> dict[str, Any]:
        seed(rank)
        drawn()
        return {"rng": RngState(), "step": 3}

    checkpoint = save_as(3, make)
    assert {place for place in checkpoint.own} == {("rng", (("rank", rank),)) for rank in range(3)}
    for rank in (2, 0, 1):
        seed(rank)
        drawn()
        expected = drawn()
        seed(99)
        want = wanted({"rng": RngState(), "step": 0}, checkpoint.catalog(), rank, 3)
        assert want.missing == want.notes == ()
        assert drawn() != expected
        fill(want, checkpoint)
        assert drawn() == expected


def test_the_random_state_of_other_ranks_is_left_alone_and_noted() -> None:
    checkpoint = save_as(4, lambda rank: {"rng": RngState()})
    seed(5)
    expected = drawn()
    seed(5)
    want = wanted({"rng": RngState()}, checkpoint.catalog(), 0, 2)
    fill(want, checkpoint)
    assert want.notes == (("rng", "", "random states of 4 ranks cannot be restored on 2 ranks" + KEPT),)
    assert want.missing == ()
    assert drawn() == expected


def test_given_coordinates_have_to_be_as_many_as_the_ranks() -> None:
    def make(rank: int) -> dict[str, Any]:
        return {"a": PerRank(rank, coordinate={"host": rank})}

    checkpoint = save_as(2, make)
    target = make(1)
    target["a"].value = None
    fill(wanted(target, checkpoint.catalog(), 0, 2), checkpoint)
    assert target["a"].value == 1
    for rank, size in ((0, 1), (1, 4), (3, 4)):
        target = make(rank)
        want = wanted(target, checkpoint.catalog(), rank, size)
        here = "1 rank" if size == 1 else f"{size} ranks"
        assert want.notes == (("a", "", f"values of 2 ranks cannot be restored on {here}" + KEPT),)
    other = {"a": PerRank(0)}
    (note,) = wanted(other, checkpoint.catalog(), 0, 2).notes
    assert note[2] == "values of ranks with other coordinates cannot be restored on 2 ranks" + KEPT


def test_what_no_rank_saved_is_missing() -> None:
    checkpoint = save_as(2, lambda rank: {"a": {"x": PerRank(rank)}})
    for size in (2, 3):
        want = wanted({"a": {"y": PerRank(0)}}, checkpoint.catalog(), 0, size)
        assert [fqn for _, fqn, _ in want.missing] == ["y"]


def test_a_value_of_a_rank_without_a_place_in_the_target_stays_in_the_checkpoint(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"a": {"x": 1, "y": PerRank([5])}})
    state = {"a": {"x": 0}}
    report = reknit.load(tmp_path / "c", state)
    assert state == {"a": {"x": 1}}
    assert report.unexpected == ()


def on_a_mesh(shape: tuple[int, ...], names: tuple[str, ...], checkpoint: Checkpoint | None) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    value = PerRank(f"of {rank}", mesh=mesh["dp"] if names == ("dp", "tp") else mesh)
    if checkpoint is None:
        return collect({"a": value}, rank, size)
    want = wanted({"a": value}, checkpoint.catalog(), rank, size)
    fill(want, checkpoint)
    return value.value, [what for _, _, what in want.notes]


def test_ranks_of_one_place_on_a_mesh_share_a_value_that_any_world_with_those_places_takes() -> None:
    everyone = run(4, on_a_mesh, (2, 2), ("dp", "tp"), None)
    assert [b.coordinate for holdings in everyone for b in holdings.blobs] == [{"dp": 0}] * 2 + [
        {"dp": 1}
    ] * 2
    checkpoint = Checkpoint(("a",), own={("a", (("dp", n),)): {"": f"dp {n}"} for n in range(2)})
    assert run(4, on_a_mesh, (2, 2), ("dp", "tp"), checkpoint) == [("dp 0", [])] * 2 + [("dp 1", [])] * 2
    assert run(2, on_a_mesh, (2,), ("dp",), checkpoint) == [("dp 0", []), ("dp 1", [])]
    kept = run(3, on_a_mesh, (3,), ("dp",), checkpoint)
    assert kept[2] == ("of 2", ["values of 2 ranks cannot be restored on 3 ranks" + KEPT])


def test_a_mesh_needs_names() -> None:
    mesh = SimpleNamespace(get_coordinate=lambda: [0], mesh_dim_names=None, shape=(1,))
    with pytest.raises(StateError, match="mesh_dim_names"):
        collect({"a": PerRank(1, mesh=mesh)}, 0, 1)


def test_a_coordinate_is_names_and_integers_and_excludes_a_mesh() -> None:
    wrong: tuple[Any, ...] = ({}, {"dp": "1"}, {"dp": True}, {1: 1})
    for coordinate in wrong:
        with pytest.raises(UsageError):
            PerRank(1, coordinate=coordinate)
    with pytest.raises(UsageError):
        PerRank(1, coordinate={"a": 1}, mesh=object())


@table(
    ("saved", "present"),
    [
        (0.1, torch.tensor(0.5)),
        (0.5, torch.tensor(0)),
        (True, torch.tensor(0)),
        (1, torch.tensor(False)),
        (torch.tensor(1), True),
        (torch.tensor(True), 1),
        (torch.tensor(0.5), 1),
    ],
)
def test_a_number_that_does_not_fit_the_value_of_a_rank_is_mismatched(
    saved: Any, present: Any, tmp_path: Path
) -> None:
    reknit.save(tmp_path / "saved", {"m": PerRank(saved)})
    target = PerRank(present)
    with pytest.raises(MismatchError, match="in the checkpoint"):
        reknit.load(tmp_path / "saved", {"m": target})
    reknit.load(tmp_path / "saved", {"m": target}, strict=False)
    assert target.value is present


@table(
    ("saved", "present"),
    [(torch.tensor([1.5]), torch.zeros(1, dtype=torch.int64)), (np.array([1.1]), np.zeros(1, np.float32))],
)
def test_a_value_of_its_own_is_never_rounded_to_the_dtype_of_the_present_one(
    saved: Any, present: Any
) -> None:
    target = PerRank(present)
    load({"x": target}, save({"x": PerRank(saved)}))
    assert target.value.dtype == saved.dtype
    assert (target.value == saved).all()


def test_a_coordinate_on_a_mesh_has_the_name_of_each_dimension() -> None:
    mesh = SimpleNamespace(get_coordinate=lambda: [1, 2], mesh_dim_names=("dp", "tp"), shape=(2, 3))
    value, world = PerRank(0, mesh=mesh), World(5, 6, tuple(range(6)))
    assert value.place_of(world) == {"dp": 1, "tp": 2}
    places = value.places(world)
    assert places is not None
    assert len(places) == 6
    assert frozenset({("dp", 1), ("tp", 2)}) in places


def test_values_of_ranks_say_in_a_line_what_they_are_and_whose() -> None:
    assert repr(PerRank(np.ones(1 << 20))) == "<PerRank value: ndarray, of each rank>"
    mesh = SimpleNamespace(get_coordinate=None, mesh_dim_names=["dp"] * 5000)
    shown = repr(RngState(mesh=mesh))
    assert shown.startswith("<RngState of each place on ")
    assert len(shown) < 200
    assert repr(object.__new__(RngState)).startswith("<RngState")
