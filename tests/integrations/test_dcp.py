"""torch's own calls of `torch.distributed.checkpoint` write and read reknit, in the cases of its tests."""

from __future__ import annotations

import io
import os
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import reknit
from reknit.integrations import dcp as reknit_dcp
from reknit.integrations.dcp import Reader, Writer
from tests.integrations.random_death import death
from tests.ranks import run
from tests.running.examples import at_night, is_night
from tests.torchrun import pieces
from tests.torchrun.models import build, state, train_step, truth

if TYPE_CHECKING:
    from tests.torchrun.models import Trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def _require_equal(one: Any, other: Any) -> None:
    for item in one:
        assert one[item].keys() == other[item].keys()
        for name, value in one[item].items():
            assert _equal(value, other[item][name]), f"{item}/{name}"


def _state_dict(trained: Trained) -> dict[str, Any]:
    """Return the state dict that users of DCP make: by names, joined over the parts of a pipeline."""
    found: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
    for part, optimizer in zip(trained.parts, trained.optimizers, strict=True):
        found["model"].update(get_model_state_dict(part))
        options = get_optimizer_state_dict(part, optimizer)
        found["optimizer"]["state"].update(options["state"])
        found["optimizer"]["param_groups"] += options["param_groups"]
    found["progress"] = trained.progress
    return found


def _set(trained: Trained, found: dict[str, Any]) -> None:
    for part, optimizer in zip(trained.parts, trained.optimizers, strict=True):
        set_model_state_dict(part, found["model"], options=StateDictOptions(strict=False))
        set_optimizer_state_dict(part, optimizer, found["optimizer"])
    trained.progress.update(found["progress"])


def _saved(layout: str, path: str, how: str) -> Any:
    trained = build(layout)
    if how == "reknit":
        reknit.save(path, state(trained)).result()
    elif how == "async":
        apart = dist.new_group()  # as torch demands it of jobs that go on with the default group
        found = _state_dict(trained)
        future: Any = dcp.async_save(found, storage_writer=Writer(path), process_group=apart)
        expected = truth(trained)
        for part in trained.parts:
            for parameter in part.parameters():
                parameter.data.zero_()  # the state is copied by now
        metadata = future.result()
        assert "model.head.weight" in metadata.state_dict_metadata
        return expected
    else:
        dcp.save(_state_dict(trained), storage_writer=Writer(path))
    return truth(trained)


def _loaded(layout: str, path: str, how: str) -> Any:
    trained = build(layout, steps=0, seed=1)
    if how == "reknit":
        reknit.load(path, state(trained), items=["model", "optimizer", "progress"])
    else:
        found = _state_dict(trained)
        dcp.load(found, storage_reader=Reader(path))
        _set(trained, found)
    assert trained.progress == {"step": 2, "losses": [0.0, 0.5]}
    return truth(trained)


LAYOUTS = [
    ("fsdp2-2", 2, "async", [("fsdp2xtp-2x2", 4, "dcp"), ("single", 1, "dcp")]),
    ("fsdp2xtp-2x2", 4, "dcp", [("tp-2", 2, "reknit")]),
    ("single", 1, "dcp", [("fsdp2-2", 2, "dcp")]),
    ("hsdp-2x2", 4, "reknit", [("fsdp2-2", 2, "dcp")]),
    ("pp-2xfsdp2-2", 4, "dcp", [("fsdp2-2", 2, "dcp")]),
]


@pytest.mark.parametrize(("before", "world", "how", "after"), LAYOUTS if is_night() else LAYOUTS[:2])
def test_state_dicts_of_models_and_optimizers_load_into_other_layouts_by_both_doors(
    tmp_path: Path, before: str, world: int, how: str, after: list[tuple[str, int, str]]
) -> None:
    path = str(tmp_path / "step-2")
    expected = run(world, _saved, before, path, how)[0]
    with reknit.open(path) as checkpoint:
        assert checkpoint.step == (None if how == "reknit" else 2)
    assert reknit.verify(path, "data").ok
    for layout, size, door in after:
        for found in run(size, _loaded, layout, path, door):
            _require_equal(expected, found)


def _resharded(path: str) -> None:
    """Save and load DTensors and ShardedTensors uneven, in one and two dimensions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(35.0).reshape(7, 5)
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{one}/cpu" for one in range(world)])
    rows = sharded_tensor.zeros(spec, 7, 5)
    for shard in rows.local_shards():
        first = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(whole[first : first + shard.tensor.shape[0]])
    saved = {
        "line": distribute_tensor(whole, line, [Shard(0)]),
        "grid": distribute_tensor(whole + 1, grid, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(whole + 2, grid, [Replicate(), Shard(1)]),
        "rows": rows,
        "plain": whole + 4,
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(5),
    }
    dcp.save({"t": saved}, storage_writer=Writer(path))
    zeros = torch.zeros(7, 5)
    target = {
        "line": distribute_tensor(zeros, grid, [Shard(1), Shard(1)]),
        "grid": distribute_tensor(zeros, line, [Shard(1)]),
        "copies": distribute_tensor(zeros, line, [Shard(0)]),
        "rows": distribute_tensor(zeros, grid, [Replicate(), Shard(0)]),
        "plain": distribute_tensor(zeros, line, [Shard(0)]),
        "empty": torch.ones(0, 3),
        "number": torch.tensor(0),
    }
    dcp.load({"t": target}, storage_reader=Reader(path))
    found = pieces.wholes(target)
    for number, name in enumerate(["line", "grid", "copies"]):
        assert torch.equal(found[name], whole + number), name
    assert torch.equal(found["rows"], whole)
    assert torch.equal(found["plain"], whole + 4)
    assert found["number"] == 5

    again = sharded_tensor.zeros(spec, 7, 5)
    whole_again = torch.zeros(7, 5)
    dcp.load({"t": {"grid": again, "rows": whole_again}}, storage_reader=Reader(path))
    for shard in again.local_shards():
        first = shard.metadata.shard_offsets[0]
        assert torch.equal(shard.tensor, whole[first : first + shard.tensor.shape[0]] + 1)
    assert torch.equal(whole_again, whole)

    half = dist.new_group([0, 1])
    if rank < 2:
        part = {"part": whole}
        dcp.save(part, storage_writer=Writer(f"{path}-half", group=half), process_group=half)
        with pytest.raises(CheckpointException, match="pass the same process group to Writer"):
            dcp.save(part, storage_writer=Writer(f"{path}-half"), process_group=half)
        part = {"part": torch.zeros_like(whole)}
        with pytest.raises(CheckpointException, match=r"pass the same process group .* Reader, as group="):
            dcp.load(part, storage_reader=Reader(f"{path}-half"), process_group=half)
        dcp.load(part, storage_reader=Reader(f"{path}-half", group=half), process_group=half)
        assert torch.equal(part["part"], whole)
    dist.barrier()
    mine = {"mine": {str(rank): torch.full((2,), float(rank))}} if rank % 2 else {}
    for _ in range(2):  # the second with the plans of the first
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(mine, storage_writer=Writer(f"{path}-mine"), planner=planner)
    wanted = {"mine": {"3": torch.zeros(2)}} if rank == 0 else {}
    dcp.load(wanted, storage_reader=Reader(f"{path}-mine"))
    assert rank or wanted["mine"]["3"][0] == 3
    own = {"own": torch.full((2,), float(rank))}
    dcp.save(own, storage_writer=Writer(f"{path}-of-{rank}"), no_dist=True)
    dcp.load(own, storage_reader=Reader(f"{path}-of-{rank}"), no_dist=True)
    assert own["own"][0] == rank


def test_tensors_change_their_sharding_and_their_kind(tmp_path: Path) -> None:
    run(4, _resharded, str(tmp_path / "saved"))


class Counter:
    """An object with a state, as torch calls it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _stream(value: Any) -> io.BytesIO:
    torch.save(value, stream := io.BytesIO())
    return stream


def test_values_of_every_kind_come_back_as_torch_loads_them(tmp_path: Path) -> None:
    saved = {
        "tensor": Counter(torch.ones(2)),
        "number": Counter(4),
        "stream": _stream([1.5]),
        "pair": (torch.arange(3.0), 2),
        "list": [1, {"a": 2}],
        "nested": {"none": None, "list": [{"b": torch.ones(1)}, torch.zeros(2)], "dtype": torch.bfloat16},
        "size": torch.Size([1, 2]),
        "step": 7,
    }
    target: dict[str, Any] = {
        "tensor": Counter(torch.zeros(2)),
        "number": Counter(None),
        "stream": io.BytesIO(),
        "pair": (torch.zeros(3), 0),
        "list": [],
        "nested": {"none": 1, "list": [{"b": torch.zeros(1)}, torch.ones(2)], "dtype": None},
        "size": None,
        "step": 0,
    }
    reknit_dcp.save(saved, checkpoint_id=tmp_path / "saved")
    reknit_dcp.load(target, checkpoint_id=tmp_path / "saved")
    assert torch.equal(target["tensor"].value, torch.ones(2))
    assert target["number"].value == 4
    assert torch.load(target["stream"]) == [1.5]
    assert torch.equal(target["pair"][0], torch.arange(3.0))
    assert target["pair"][1] == 2
    assert target["list"] == [1, {"a": 2}]
    assert target["nested"]["none"] is None
    assert target["nested"]["dtype"] is torch.bfloat16
    assert torch.equal(target["nested"]["list"][0]["b"], torch.ones(1))
    assert torch.equal(target["nested"]["list"][1], torch.zeros(2))
    assert target["size"] == torch.Size([1, 2])
    assert target["step"] == 7
    whole = _load_state_dict_from_keys(storage_reader=Reader(tmp_path / "saved"))
    assert whole["step"] == 7
    assert torch.equal(whole["nested"]["list"][0]["b"], torch.ones(1))
    assert list(_load_state_dict_from_keys("number", storage_reader=Reader(tmp_path / "saved"))) == ["number"]


def test_a_plain_state_dict_is_that_of_a_model_by_both_doors(tmp_path: Path) -> None:
    model, other, third = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    dcp.save(model.state_dict(), storage_writer=Writer(tmp_path / "a"))
    dcp.load(found := other.state_dict(), storage_reader=Reader(tmp_path / "a"))
    assert torch.equal(found["weight"], model.weight)
    reknit.load(tmp_path / "a", {"model": third})
    assert torch.equal(third.bias, model.bias)
    reknit.save(tmp_path / "b", {"model": model, "step": 1})
    dcp.load(found := torch.nn.Linear(2, 3).state_dict(), storage_reader=Reader(tmp_path / "b", item="model"))
    assert torch.equal(found["bias"], model.bias)


def test_a_state_dict_that_names_parameters_is_that_of_a_live_optimizer_by_both_doors(tmp_path: Path) -> None:
    trained, second, third = build("single"), build("single", seed=1), build("single", seed=2)
    dcp.save(_state_dict(trained), storage_writer=Writer(tmp_path / "a"))
    reknit.load(tmp_path / "a", state(second), items=["model", "optimizer"])
    _require_equal(truth(trained), truth(second))
    reknit.save(tmp_path / "b", state(trained))
    dcp.load(found := _state_dict(third), storage_reader=Reader(tmp_path / "b"))
    _set(third, found)
    _require_equal(truth(trained), truth(third))


@pytest.mark.parametrize("how", ["numbered", "flattened"])
def test_other_forms_of_an_optimizers_state_dict_come_back_in_their_form(tmp_path: Path, how: str) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def made(seed: int) -> tuple[Any, Any]:
        trained = build("single", seed=seed)
        optimizer = trained.optimizers[0]
        if how == "numbered":
            return trained, optimizer.state_dict()
        return trained, get_optimizer_state_dict(trained.parts[0], optimizer, options=flat)

    (trained, saved), (other, found) = made(0), made(1)
    dcp.save({"o": saved, "m": trained.parts[0].state_dict()}, storage_writer=Writer(tmp_path / "saved"))
    dcp.load({"o": found}, storage_reader=Reader(tmp_path / "saved"))
    if how == "numbered":
        other.optimizers[0].load_state_dict(found)
    else:
        set_optimizer_state_dict(other.parts[0], other.optimizers[0], found, options=flat)
    assert truth(other)["optimizer"].keys() == truth(trained)["optimizer"].keys()
    for name, value in truth(trained)["optimizer"].items():
        assert _equal(value, truth(other)["optimizer"][name]), name


def test_a_load_takes_a_part_converts_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    dcp.save({"a": {"b": 1, "c": torch.ones(2), "d": torch.ones(2)}}, storage_writer=Writer(path))
    part = {"a": {"c": torch.zeros(2, dtype=torch.bfloat16)}}
    dcp.load(part, storage_reader=Reader(path))
    assert part["a"]["c"].tolist() == [1, 1]
    value = {"a": {"b": 0}}
    dcp.load(value, storage_reader=Reader(path))
    assert value == {"a": {"b": 1}}
    lenient = {"a": {"b": 0, "x": 5, "c": torch.zeros(2)}}
    dcp.load(lenient, storage_reader=Reader(path), planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert (lenient["a"]["b"], lenient["a"]["x"]) == (1, 5)
    for wrong, text in [
        ({"a": {"x": 1}}, "Missing key"),
        ({"a": {"c": torch.zeros(3)}}, "Size mismatch"),
        ({"a": {"c": torch.zeros(2), "d": torch.zeros(2, dtype=torch.int32)}}, "saved dtype float32"),
    ]:
        with pytest.raises(CheckpointException, match=text):
            dcp.load(wrong, storage_reader=Reader(path))
    with pytest.raises(CheckpointException, match="no committed checkpoint"):
        dcp.load({"a": 1}, storage_reader=Reader(tmp_path / "absent"))
    with pytest.raises(CheckpointException, match="allow_pickle"):
        dcp.save({"o": object.__new__(Opaque)}, storage_writer=Writer(tmp_path / "opaque"))
    assert not (tmp_path / "opaque").exists() or not list((tmp_path / "opaque").iterdir())


class Opaque:
    """An object without a state of its own."""


class Halves(dcp.DefaultSavePlanner):
    """Saves tensors in half precision."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.bfloat16() if isinstance(found, torch.Tensor) else found


class Texts(dcp.DefaultSavePlanner):
    """Saves values in a format of its own."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, torch.Tensor) else io.BytesIO(str(object).encode())


class Numbers(dcp.DefaultLoadPlanner):
    """Loads the values of `Texts`, and adds one to each tensor."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict["a"]["n"] = int(value.read())

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor += 1


class Renames(dcp.DefaultLoadPlanner):
    """Loads the item `b` of a state dict from the names of `a`."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"a": state_dict["b"]}, metadata, is_coordinator)


def test_planners_of_users_decide_what_is_saved_and_loaded(tmp_path: Path) -> None:
    path, saved = tmp_path / "saved", {"a": {"w": torch.ones(3, 2), "n": 5}}
    dcp.save(saved, storage_writer=Writer(path), planner=Halves())
    with reknit.open(path) as checkpoint:
        assert checkpoint.tensors["a"]["w"].dtype == "bfloat16"
    found: dict[str, Any] = {"b": {"w": torch.zeros(3, 2), "n": 0}}
    dcp.load(found, storage_reader=Reader(path), planner=Renames())
    assert found["b"]["w"].eq(1).all()
    assert found["b"]["n"] == 5
    dcp.save(saved, storage_writer=Writer(path), planner=Texts())
    found = {"a": {"w": torch.zeros(3, 2), "n": 0}}
    dcp.load(found, storage_reader=Reader(path), planner=Numbers())
    assert found["a"]["w"].eq(2).all()
    assert found["a"]["n"] == 5
    with pytest.raises(CheckpointException, match="a format of its own"):
        dcp.load({"a": {"n": 0}}, storage_reader=Reader(path))
    future: Any = dcp.async_save(saved, storage_writer=Writer(tmp_path / "b"), planner=Halves())
    with pytest.raises(CheckpointException, match="leave planner out"):
        future.result()
    stager = DefaultStager(StagingOptions(False, False, False, False))
    future = dcp.async_save(
        saved, storage_writer=Writer(tmp_path / "c"), planner=Halves(), async_stager=stager
    )
    future.result()
    with reknit.open(tmp_path / "c") as checkpoint:
        assert checkpoint.tensors["a"]["w"].dtype == "bfloat16"
    for flat in (False, True):
        nested: dict[str, Any] = {"m": [{"a": torch.zeros(1)}, torch.ones(2)], "n": {"x": {"y": 0}}}
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        original = {"m": [{"a": torch.ones(1)}, torch.zeros(2)], "n": {"x": {"y": 1}}}
        dcp.save(original, storage_writer=Writer(path), planner=planner)
        dcp.load(nested, storage_reader=Reader(path), planner=dcp.DefaultLoadPlanner(flatten_state_dict=flat))
        assert nested["n"] == {"x": {"y": 1}}
        assert torch.equal(nested["m"][0]["a"], torch.ones(1))


def _in_reverse_order(folder: str) -> list[str]:
    """Save and load a tensor on a mesh whose ranks do not ascend; return the errors of planners of users."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 0]))
    known = torch.arange(8.0).reshape(4, 2)
    cut = distribute_tensor(known, mesh, [Shard(0)])
    dcp.save({"a": {"w": cut}}, storage_writer=Writer(f"{folder}/a"))
    found = {"a": {"w": torch.zeros(4, 2)}}
    reknit.load(f"{folder}/a", found)
    assert torch.equal(found["a"]["w"], known)
    cut.to_local().zero_()
    dcp.load({"a": {"w": cut}}, storage_reader=Reader(f"{folder}/a"))
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    assert torch.equal(cut.to_local(), known[half])
    texts = []
    with pytest.raises(CheckpointException) as saved:
        dcp.save({"a": {"w": cut}}, storage_writer=Writer(f"{folder}/b"), planner=Halves())
    texts.append(str(saved.value))
    with pytest.raises(CheckpointException) as loaded:
        dcp.load({"a": {"w": cut}}, storage_reader=Reader(f"{folder}/a"), planner=Numbers())
    texts.append(str(loaded.value))
    assert torch.equal(cut.to_local(), known[half])
    return texts


def test_on_a_mesh_in_reverse_order_dcp_saves_and_loads_and_a_planner_of_the_user_is_refused(
    tmp_path: Path,
) -> None:
    for texts in run(2, _in_reverse_order, str(tmp_path)):
        for text in texts:
            assert "a.w is a DTensor on a mesh whose ranks do not ascend" in text
            assert "leave out the planner" in text


def _part(rank: int, whole: torch.Tensor, *, columns: bool) -> Any:
    """Return half of a tensor of four rows and columns, as DCP's `CheckpointableTensor`."""
    at = (0, 2 * rank) if columns else (2 * rank, 0)
    part: Any = whole.chunk(2, int(columns))[rank].clone()
    part.global_shape, part.global_offsets = (4, 4), (at,)
    part.local_offsets, part.local_sizes = ((0, 0),), (tuple(part.shape),)
    return part


def _declared(folder: str) -> list[bool]:
    """Save rows by each door; load columns by each."""
    rank, whole = dist.get_rank(), torch.arange(16.0).reshape(4, 4)
    state = {"a": {"w": _part(rank, whole, columns=False)}}
    dcp.save(state, checkpoint_id=f"{folder}/torch")
    dcp.save(state, storage_writer=Writer(f"{folder}/writer"))
    reknit.save(f"{folder}/reknit", state)
    right = []
    for path in ("torch", "writer", "reknit"):
        found = {"a": {"w": _part(rank, torch.zeros(4, 4), columns=True)}}
        reknit.load(f"{folder}/{path}", found)
        right.append(torch.equal(found["a"]["w"], whole.chunk(2, 1)[rank]))
        if path != "torch":
            found["a"]["w"].zero_()
            dcp.load(found, storage_reader=Reader(f"{folder}/{path}"))
            right.append(torch.equal(found["a"]["w"], whole.chunk(2, 1)[rank]))
    return right


@pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="DCP reads this declaration from torch 2.14 on"
)
def test_parts_that_a_plain_tensor_declares_pass_through_every_door(tmp_path: Path) -> None:
    assert run(2, _declared, str(tmp_path)) == [[True] * 5] * 2


def test_the_calls_of_reknit_read_what_torch_wrote(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "torch")
    reknit_dcp.load(found := {"a": torch.zeros(3)}, checkpoint_id=tmp_path / "torch")
    assert found["a"].eq(1).all()
    future = reknit_dcp.async_save({"a": torch.full((3,), 2.0)}, checkpoint_id=tmp_path / "step-1")
    future.result()
    reknit_dcp.load(found, checkpoint_id=tmp_path / "step-1")
    assert found["a"].eq(2).all()
    reknit_dcp.save({"a": torch.full((3,), 3.0)}, storage_writer=Writer(), checkpoint_id=tmp_path / "3")
    reknit_dcp.load(found, storage_reader=Reader(tmp_path / "3"), no_dist=True)
    assert found["a"].eq(3).all()
    with pytest.raises(reknit.UsageError, match="has no path"):
        reknit_dcp.load(found)
    with pytest.raises(reknit.UsageError, match="before it names a path"):
        dcp.async_save(found, storage_writer=Writer(), checkpoint_id=tmp_path / "step-2")


def _one_fails(path: str) -> str:
    bad = Opaque() if dist.get_rank() == 1 else 1
    with pytest.raises(CheckpointException, match="rank 1") as caught:
        dcp.save({"a": torch.ones(2), "b": bad}, storage_writer=Writer(path))
    assert reknit.latest(str(path)) is None
    own = {"same": 1, "own": dist.get_rank()}
    dcp.save({"v": own, "t": torch.ones(1)}, storage_writer=Writer(path))
    found = {"v": {"same": 0, "own": None}, "t": torch.zeros(1)}
    dcp.load(found, storage_reader=Reader(path))
    assert found["v"] == own
    return str(caught.value)


def _fewer(path: str) -> None:
    found = {"v": {"same": 0}, "t": torch.zeros(1)}
    dcp.load(found, storage_reader=Reader(path))
    assert found["v"] == {"same": 1}
    with pytest.raises(CheckpointException, match=r"v/own: .* for this rank"):
        dcp.load({"v": {"own": None}, "t": torch.zeros(1)}, storage_reader=Reader(path))


def test_an_error_of_one_rank_is_raised_on_all_and_own_values_return_to_their_ranks(tmp_path: Path) -> None:
    assert len(run(2, _one_fails, str(tmp_path / "x"))) == 2
    run(1, _fewer, str(tmp_path / "x"))


def _train(root: str, layout: str, steps: int, seed: int | None) -> Any:
    """Resume from the newest committed step, train to `steps`, and save after each step."""
    trained = build(layout, steps=0, seed=5)
    dies = death(seed, 2, 4) if seed is not None and dist.get_rank() == 1 else lambda _: None
    newest = reknit.latest(root, pending="wait")
    if newest is not None:
        found = _state_dict(trained)
        dcp.load(found, storage_reader=Reader(newest))
        _set(trained, found)
    apart = dist.new_group()
    future: Any = None
    for number in range(trained.progress["step"], steps):
        try:
            train_step(trained, number)
            dies(number)
            if future is not None:
                future.result()
            saved = _state_dict(trained)
            writer = Writer(f"{root}/step-{number + 1}")
            future = dcp.async_save(saved, storage_writer=writer, process_group=apart)
        except (RuntimeError, CheckpointException):
            if seed is None:
                raise
            os._exit(1)  # the peer is dead; agents go on
    if future is not None:
        future.result()
    return newest, truth(trained)


@at_night("runs of transformers and ByteCheckpoint die by day")
def test_a_run_that_is_killed_resumes_from_the_newest_committed_step(tmp_path: Path) -> None:
    whole, root = str(tmp_path / "whole"), str(tmp_path / "root")
    expected = run(2, _train, whole, "fsdp2-2", 6, None)[0][1]
    run(2, _train, root, "fsdp2-2", 60, 3, some_die=True)
    reknit.latest(root, pending="wait", timeout_s=60)
    committed = [step.step or 0 for step in reknit.steps(root)]
    assert committed
    newest, found = run(2, _train, root, "fsdp2-2", 6, None)[0]
    assert newest.endswith(f"step-{max(committed)}")
    _require_equal(expected, found)
    assert run(1, _train, root, "single", 6, None)[0][0].endswith("step-6")


def _example(folder: str, steps: int) -> Any:
    path = Path(__file__).parents[2] / "examples" / "trainers" / "dcp.py"
    return runpy.run_path(str(path))["train"](folder, steps)


def test_the_example_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    assert run(2, _example, str(tmp_path), 4)[0][0] == 0
    assert run(1, _example, str(tmp_path), 6)[0][0] == 4
