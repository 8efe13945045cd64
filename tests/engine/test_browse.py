"""Reading whole items of a checkpoint without a target."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import reknit
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from tests.devices import on_cuda
from tests.forged import rewritten, with_value
from tests.ranks import run
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


class Model(nn.Module):
    """A model with a tie, a counter, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)

    def get_extra_state(self) -> Any:
        return {"dtype": torch.bfloat16}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Average:
    """An object with tensors in its state dict."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {"w": torch.arange(3.0)}, "decay": 0.5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded into an object")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("browse") / "x"
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.embed(torch.arange(3)).sum().backward()
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "average": Average(),
        "progress": {"step": 7, "seen": ["a"], "when": np.arange(3)},
        "rng": reknit.RngState(),
        "rate": 0.25,
    }
    reknit.save(path, state)
    return path


def test_a_module_comes_back_as_a_state_dict_that_can_be_assigned(path: Path) -> None:
    with reknit.open(path) as checkpoint:
        read = checkpoint.read_all(["model"])
    assert list(read) == ["model"]
    with torch.device("meta"):
        model = Model()
    model.load_state_dict(read["model"], assign=True)
    assert model.extra == {"dtype": torch.bfloat16}
    assert not any(p.is_meta for p in model.parameters())
    assert isinstance(read["model"]["norm.num_batches_tracked"], torch.Tensor)
    reknit.load(path, {"model": (target := Model())})
    for name, tensor in target.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(model.state_dict()[name], tensor), name


def test_all_items_are_read_with_values_and_tensors_and_ties(path: Path) -> None:
    read = reknit.open(path).read_all()
    assert list(read) == ["model", "optimizer", "average", "progress", "rng", "rate"]
    assert read["rng"] == {}, "values of single ranks are left out"
    assert read["rate"] == {"": 0.25}, "an item that is itself a value"
    assert read["model"]["embed.weight"] is read["model"]["head.weight"]
    assert read["progress"]["step"] == 7
    assert read["progress"]["when"].tolist() == [0, 1, 2]
    assert read["average"]["shadow/w"].tolist() == [0, 1, 2]
    assert read["average"]["~s"] == {"shadow": {"w": read["average"]["shadow/w"]}, "decay": 0.5}
    assert read["optimizer"]["state/embed.weight/exp_avg"].shape == (10, 4)
    assert read["optimizer"]["param_groups/embed.weight"]["lr"] == 1e-3


def test_patterns_choose_among_the_names(path: Path) -> None:
    checkpoint = reknit.open(path)
    read = checkpoint.read_all(only=("model/norm.*", "progress/step"))
    assert set(read["model"]) == {
        f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert read["progress"] == {"step": 7}
    assert read["optimizer"] == {}
    with pytest.raises(reknit.MismatchError, match=r"'model/nrm\.\*', which matches nothing"):
        checkpoint.read_all(only=("model/norm.*", "model/nrm.*"))
    with pytest.raises(reknit.MismatchError, match="no item 'modle'"):
        checkpoint.read_all(["modle"])
    for wrong in ({"items": "model"}, {"only": "model/*"}):
        with pytest.raises(reknit.UsageError, match="lists of texts"):
            checkpoint.read_all(**wrong)


def test_tensors_are_made_where_they_are_asked_for(path: Path) -> None:
    with torch.device("meta"):
        read = reknit.open(path).read_all(["model"], device=torch.device("cpu"))
        default = reknit.open(path).read_all(["model"])
    for tensors in (read, default):
        assert tensors["model"]["embed.weight"].device.type == "cpu"


@on_cuda
def test_tensors_are_made_on_a_gpu(path: Path) -> None:
    checkpoint = reknit.open(path)
    here = checkpoint.read_all(["model"])["model"]
    there = checkpoint.read_all(["model"], device="cuda")["model"]
    for name, tensor in here.items():
        if isinstance(tensor, torch.Tensor):
            assert there[name].is_cuda
            assert torch.equal(there[name].cpu(), tensor)


def test_what_cannot_be_made_is_refused(path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"framework": "jax"},
        {"framework": "numpy", "device": "cuda"},
        {"framework": "numpy", "sharding": {}},
        {"sharding": (1, 2)},
        {"sharding": {"model/head.bias": "mesh"}},
        {"sharding": lambda name, shape: shape},
    ]
    for wrong in one_by_one(cases):
        with pytest.raises(reknit.UsageError):
            reknit.open(path).read_all(["model"], **wrong)


def test_everything_is_read_once_whatever_the_number_of_tensors(tmp_path: Path) -> None:
    state = {"m": {f"w{n}": np.arange(n, n + 100) for n in range(200)}}
    reknit.save(tmp_path / "x", state)
    reads: list[tuple[str, int]] = []

    class Counting(LocalStorage):
        def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
            reads.append((path, start))
            super().read_into(path, start, buffers)

    register("counting", lambda url, _: Counting(url.removeprefix("counting://")))
    checkpoint = reknit.open(f"counting://{tmp_path}/x")
    reads.clear()
    read = checkpoint.read_all(framework="numpy")
    assert len(reads) == 1
    assert all(np.array_equal(read["m"][name], array) for name, array in state["m"].items())


def test_memory_is_that_of_the_result_and_of_reads_in_flight(tmp_path: Path) -> None:
    # Transposed, so that nothing can be read straight into the target of a reader that would keep pieces.
    state = {"m": {f"w{n}": np.ones((8, MIB // 8)) for n in range(48)}}
    reknit.save(tmp_path / "x", state)
    del state
    options = reknit.LoadOptions(inflight_nbytes=16 * MIB, threads=1)
    checkpoint = reknit.open(tmp_path / "x", options=options)
    tracemalloc.start()
    try:
        read = checkpoint.read_all(framework="numpy")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < sum(array.nbytes for array in read["m"].values()) + (16 + 4) * MIB


@pytest.mark.parametrize("others", [0, 20])
def test_a_tensor_that_the_files_do_not_cover_is_refused(tmp_path: Path, others: int) -> None:
    state = {"w": torch.arange(2000.0)} | {f"x{n}": torch.ones(n) for n in range(others)}
    reknit.save(tmp_path / "c", {"model": state})
    rewritten(tmp_path / "c", lambda table: with_value(table, "shape", [2001]))
    with reknit.open(tmp_path / "c") as checkpoint:
        for read in (lambda: checkpoint.read("model", "w", slice(1999, 2001)), checkpoint.read_all):
            with pytest.raises(reknit.CorruptError, match="model/w in the index do not cover it exactly"):
                read()
        assert not others or checkpoint.read("model", "x3").sum() == 3


def test_a_checkpoint_that_was_deleted_or_replaced_since_it_was_opened_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    reknit.save(tmp_path / "x", {"m": {"w": np.ones(100)}})
    with reknit.open(tmp_path / "x") as checkpoint:
        reknit.save(tmp_path / "x", {"m": {"w": np.ones(100)}}, overwrite=True)
        with pytest.raises(reknit.CorruptError, match="open it again"):
            checkpoint.read("m", "w")
    with reknit.open(tmp_path / "x") as checkpoint:
        reknit.delete(tmp_path / "x")
        with pytest.raises(reknit.CheckpointNotFoundError, match="was deleted while it was read"):
            checkpoint.read("m", "w")


def cut(path: str) -> dict[str, Any]:
    """Read in several layouts on every rank, and return whether each result is right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    whole = reknit.open(path).read_all(["model"])["model"]
    checkpoint = reknit.open(path)
    found: dict[str, Any] = {}

    def equal(tensor: Any, name: str, placement: Any) -> bool:
        expected = distribute_tensor(whole[name], mesh, [placement])
        return torch.equal(tensor.to_local(), expected.to_local()) and tensor.placements == (placement,)

    rows = checkpoint.read_all(["model"], sharding=(mesh, [Shard(0)]))["model"]
    found["rows"] = equal(rows["embed.weight"], "embed.weight", Shard(0))
    found["scalar"] = equal(rows["norm.num_batches_tracked"], "norm.num_batches_tracked", Replicate())
    found["tied"] = rows["embed.weight"] is rows["head.weight"]
    last = checkpoint.read_all(["model"], sharding=(mesh, [Shard(-1)]))["model"]
    found["last"] = equal(last["embed.weight"], "embed.weight", Shard(1))
    found["last of one"] = equal(last["head.bias"], "head.bias", Shard(0))
    found["last of none"] = equal(last["norm.num_batches_tracked"], "norm.num_batches_tracked", Replicate())
    first = checkpoint.read_all(["model"], sharding=(mesh, [Shard(-2)]))["model"]
    found["second to last"] = equal(first["embed.weight"], "embed.weight", Shard(0))
    found["second to last of one"] = equal(first["head.bias"], "head.bias", Replicate())
    by_name = checkpoint.read_all(["model"], sharding={"model/embed.weight": (mesh, [Shard(1)])})["model"]
    found["columns"] = equal(by_name["embed.weight"], "embed.weight", Shard(1))
    found["plain"] = type(by_name["head.weight"]) is torch.Tensor
    chosen = checkpoint.read_all(
        ["model"], sharding=lambda name, shape: (mesh, [Shard(1)]) if len(shape) > 1 else None
    )["model"]
    found["function"] = equal(chosen["head.weight"], "head.weight", Shard(1))
    try:
        checkpoint.read_all(["model"], device="cuda", sharding=(mesh, [Shard(0)]))
        found["device"] = False
    except reknit.UsageError:
        found["device"] = True
    return found


def test_each_rank_reads_its_part_of_tensors_that_are_cut(path: Path) -> None:
    for found in run(3, cut, str(path)):
        assert all(found.values()), found
