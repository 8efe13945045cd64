"""Tensors that are made of several shards on a rank, and tensors whose parts have no recorded place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import reknit
from reknit.errors import StateError
from reknit.frameworks.registry import collect, wanted
from tests.frameworks.checkpoint import save
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = torch.arange(24.0).reshape(4, 6)
CUTS = [[(0, 0, 4, 2), (0, 2, 2, 4)], [(2, 2, 2, 4), (4, 0, 0, 6)]]
"""For each of two ranks: first row and column, and how many, of the shards that it has."""


class Keeper:
    """An object whose state is a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["t"]


def pieces(whole: torch.Tensor) -> list[tuple[tuple[int, int], torch.Tensor]]:
    cuts = CUTS[dist.get_rank()]
    return [((r, c), whole[r : r + n, c : c + m].clone()) for r, c, n, m in cuts]


def sharded(whole: torch.Tensor) -> Any:
    shards = [
        LocalShard.from_tensor_and_offsets(tensor, list(at), dist.get_rank())
        for at, tensor in pieces(whole)
        if tensor.numel()
    ]
    return init_from_local_shards(shards, list(whole.shape))


def wrapped(whole: torch.Tensor) -> Any:
    held = pieces(whole)
    local = LocalShardsWrapper([tensor for _, tensor in held], [at for at, _ in held])
    mesh = init_device_mesh("cpu", (2,))
    form: Any = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **form)


def empty_on_one(whole: torch.Tensor) -> Any:
    held = [] if dist.get_rank() else [((0, 0), whole.clone())]
    local = LocalShardsWrapper([tensor for _, tensor in held], [at for at, _ in held])
    form: Any = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False, **form)


def local(tensor: Any) -> list[torch.Tensor]:
    if isinstance(tensor, DTensor):
        inner: Any = tensor._local_tensor
        return list(inner.local_shards())
    return [one.tensor for one in tensor.local_shards()]


def _back_and_forth(folder: str, build: Any, dtype: torch.dtype) -> list[bool]:
    whole = WHOLE.to(dtype)
    model = nn.Module()
    model.register_buffer("b", build(whole))
    state = {"t": build(whole), "m": model, "k": Keeper(build(whole))}
    reknit.save(f"{folder}/sharded", state)
    names = ("t", "m/b", "k/t")
    plain: dict[str, Any] = {"t": torch.zeros_like(whole), "m": {"b": torch.zeros_like(whole)}}
    reknit.load(f"{folder}/sharded", plain)
    found = [torch.equal(plain["t"], whole), torch.equal(plain["m"]["b"], whole)]
    zeros = torch.zeros_like(whole)
    model = nn.Module()
    model.register_buffer("b", build(zeros))
    target = {"t": build(zeros), "m": model, "k": Keeper(before := build(zeros))}
    report = reknit.load(f"{folder}/sharded", target)
    assert set(names) <= set(report.restored) or dist.get_rank()
    for tensor in (target["t"], model.b, target["k"].tensor):
        true = local(build(whole))
        found += [torch.equal(*pair) for pair in zip(local(tensor), true, strict=True)]
    found += [not tensor.any() for tensor in local(before)]
    found += [tensor._version > 0 for tensor in local(target["t"]) if tensor.numel()]
    return found


@table(
    ("build", "dtype"), [(sharded, torch.float32), (wrapped, torch.bfloat16), (empty_on_one, torch.float32)]
)
def test_a_tensor_of_several_shards_goes_to_a_whole_one_and_back(
    tmp_path: Path, build: Any, dtype: torch.dtype
) -> None:
    for found in run(2, _back_and_forth, str(tmp_path), build, dtype):
        assert len(found) >= 2
        assert all(found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@table("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_by_name_wherever_it_is(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    model = nn.Linear(2, 2)
    model.register_buffer("b", nested)
    for state in ({"x": nested}, {"x": [1, {"y": nested}]}, {"x": Keeper(nested)}, {"x": model}):
        with pytest.raises(StateError, match=r"x.* is a nested tensor"):
            collect(state, 0, 1)
    with pytest.raises(StateError, match=r"x.* holds a .*Tensor of float32"):
        collect({"x": reknit.PerRank({"y": nested})}, 0, 1)
    with pytest.raises(StateError, match=r"x is a nested tensor"):
        wanted({"x": nested}, save({"x": torch.ones(2)}).catalog(), 0, 1)
    wanted({"x": Keeper(nested)}, save({"x": Keeper(torch.ones(2))}).catalog(), 0, 1)


def _misfits() -> list[str]:
    errors = []
    tensor = DTensor.from_local(
        LocalShardsWrapper([torch.ones(2), torch.ones(2).half()], [(0,), (2,)]),
        init_device_mesh("cpu", (1,)),
        [Shard(0)],
        run_check=False,
        shape=torch.Size([4]),
        stride=(1,),
    )
    other = sharded_alone(torch.ones(4))
    for act in (
        lambda: collect({"x": tensor}, 0, 1),
        lambda: collect({"x": tensor._local_tensor}, 0, 1),
        lambda: wanted({"x": Keeper(other)}, save({"x": Keeper(torch.ones(5))}).catalog(), 0, 1),
        lambda: collect({"x": reknit.PerRank({"y": other})}, 0, 1),
    ):
        with pytest.raises(StateError) as caught:
            act()
        errors.append(str(caught.value))
    return errors


def sharded_alone(whole: torch.Tensor) -> Any:
    return init_from_local_shards([LocalShard.from_tensor_and_offsets(whole, [0], 0)], list(whole.shape))


def test_shards_that_do_not_make_a_tensor_are_refused_by_name() -> None:
    (errors,) = run(1, _misfits)
    assert "x has shards of float16 and float32" in errors[0]
    assert "x is a LocalShardsWrapper, which keeps its values somewhere else" in errors[1]
    assert "a ShardedTensor of shape [4] stands where float32[5] was saved" in errors[2]
    assert "holds a ShardedTensor of float32" in errors[3]
