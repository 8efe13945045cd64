"""Tensors of a target that are looked at together have the views that they have alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reknit
from reknit.errors import MismatchError, StateError
from reknit.frameworks.torch.signature import TorchSigner
from reknit.frameworks.torch.tensor import TorchArrays
from reknit.frameworks.walk.walk import Place, World
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def declared() -> torch.Tensor:
    tensor: Any = torch.zeros(2)
    tensor.global_shape, tensor.global_offsets = (4,), ((2,),)
    tensor.local_offsets, tensor.local_sizes = ((0,),), ((2,),)
    return tensor  # type: ignore[no-any-return]


def marked() -> torch.Tensor:
    tensor: Any = torch.zeros(2)
    tensor.tag = "mine"
    return tensor  # type: ignore[no-any-return]


USUAL = {
    "a tensor": torch.zeros(2, 3),
    "a number": torch.tensor(1.0),
    "an empty tensor": torch.zeros(0, 3),
    "a parameter": nn.Parameter(torch.zeros(2, 3)),
    "a trained tensor": torch.zeros(2, requires_grad=True),
    "a part of another": torch.zeros(4, 2)[1:3],
    "a tensor with an attribute": marked(),
    "half precision": torch.zeros(2, dtype=torch.bfloat16),
}
ODD = {
    "a transposed tensor": torch.zeros(2, 3).T,
    "an expanded tensor": torch.zeros(1).expand(3),
    "a complex tensor": torch.zeros(2, dtype=torch.complex64),
    "a negative view": torch._neg_view(torch.zeros(2)),
    "a sparse tensor": torch.zeros(2, 2).to_sparse(),
    "a tensor without memory": torch.zeros(2, device="meta"),
    "a tensor of declared parts": declared(),
}


def trained(number: int, shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """Return a model with parameters of a shape, and an optimizer that took a step."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(number))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones(shape)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def looked_at(tensors: list[Any], size: int = 1, rank: int = 0) -> tuple[list[Any], World]:
    world = World(rank, size, tuple(range(size)))
    places = [Place("item", str(number)) for number in range(len(tensors))]
    return TorchSigner().views(tensors, places, world), world


def found(view: Any) -> Any:
    parts = [
        (box, part.data_ptr(), part.shape, part.stride(), part.requires_grad) for box, part in view.parts
    ]
    return view.spec, parts, view.replicas, view.memory, view.settle, view.fresh, view.holders


def alone(tensor: Any, world: World) -> Any:
    return found(TorchArrays().view(tensor, Place("item", "alone"), world, fill=True))


def test_each_of_many_tensors_has_the_view_that_it_has_alone() -> None:
    tensors = [*USUAL.values(), *ODD.values(), *USUAL.values()]
    views, world = looked_at(tensors)
    for view, tensor in zip(views, tensors, strict=True):
        assert (view is None) == any(tensor is odd for odd in ODD.values())
        assert view is None or found(view) == alone(tensor, world)


def look_at_distributed() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    whole = torch.arange(12.0).view(4, 3)
    tensors = [
        distribute_tensor(whole, mesh, [Shard(0)]),
        distribute_tensor(whole, mesh, [Shard(1)]),
        distribute_tensor(whole, mesh, [Replicate()]),
        DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False),
        nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])),
        distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)]),
        torch.tensor(1.0),
    ]
    views, world = looked_at(tensors, 2, torch.distributed.get_rank())
    assert world.coordinate == {"dp": world.rank}
    pairs = list(zip(views, tensors, strict=True))
    empty = [view is None for view, _ in pairs]
    assert empty == [isinstance(one, DTensor) and not one.to_local().numel() for one in tensors]
    return [view is None or found(view) == alone(one, world) for view, one in pairs]


def test_distributed_tensors_that_are_cut_alike_have_the_views_that_they_have_alone() -> None:
    for rank, same in enumerate(run(2, look_at_distributed)):
        assert same == [True] * 7, rank


def test_tensors_of_one_memory_are_one_tensor_wherever_they_are_in_the_target(tmp_path: Path) -> None:
    tied = torch.arange(3.0)
    reknit.save(tmp_path / "x", {"a": {"w": tied, "v": torch.ones(3)}, "b": [tied]})
    target = torch.zeros(3)
    state = {"a": {"w": target, "v": torch.zeros(3)}, "b": [target.view(3)]}
    assert reknit.load(tmp_path / "x", state).restored == ("a/w", "a/v")
    assert target.tolist() == [0.0, 1.0, 2.0]
    apart = {"a": {"w": torch.arange(3.0), "v": torch.ones(3)}, "b": [torch.ones(3)]}
    reknit.save(tmp_path / "y", apart)
    with pytest.raises(MismatchError, match="it differs from"):
        reknit.load(tmp_path / "y", state)
    assert target.tolist() == [0.0, 1.0, 2.0]


def test_a_tensor_that_cannot_be_filled_is_refused_by_its_name_among_others(tmp_path: Path) -> None:
    saved = {"m": {f"t{number}": torch.ones(2, 2) for number in range(4)}}
    reknit.save(tmp_path / "x", saved)
    target = {name: torch.zeros(2, 2) for name in saved["m"]}
    target["t2"] = torch.zeros(2, 2).to_sparse()
    with pytest.raises(StateError, match="m/t2 is a sparse_coo tensor"):
        reknit.load(tmp_path / "x", {"m": target})
    assert not target["t0"].any()


# In a process of its own: beside DeepSpeed, which other tests import, tensors are looked at alone.
def test_an_optimizer_that_took_a_step_keeps_its_states_where_they_are(tmp_path: Path) -> None:
    run(1, keep_states, tmp_path, joined=False)


def keep_states(folder: Path) -> None:
    saved = trained(2)
    reknit.save(folder / "x", saved)
    state = trained(2)
    optimizer = state["optimizer"]
    for held in optimizer.state.values():
        for tensor in held.values():
            tensor.zero_()
    dicts = [*optimizer.state.values()]
    tensors = [[*held.items()] for held in dicts]
    reknit.load(folder / "x", state)
    assert all(now is before for now, before in zip(optimizer.state.values(), dicts, strict=True))
    for held, before, other in zip(dicts, tensors, saved["optimizer"].state.values(), strict=True):
        for (name, tensor), (name_before, tensor_before) in zip(held.items(), before, strict=True):
            assert name == name_before
            assert tensor is tensor_before
            assert torch.equal(tensor, other[name])


def narrow(held: dict[str, Any]) -> None:
    held["exp_avg"] = torch.zeros(2, 4)[:, ::2]


def transposed(held: dict[str, Any]) -> None:
    held["exp_avg"] = torch.zeros(2, 2).T


def missing(held: dict[str, Any]) -> None:
    del held["exp_avg"]


def further(held: dict[str, Any]) -> None:
    held["more"] = torch.zeros(2, 2)


@table("change", [narrow, transposed, missing, further])
def test_states_that_are_not_in_the_usual_form_are_loaded_too(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    saved = trained(2, (2, 2))
    reknit.save(tmp_path / "x", saved)
    state = trained(2, (2, 2))
    for held in state["optimizer"].state.values():
        change(held)
    reknit.load(tmp_path / "x", state)
    pairs = zip(state["optimizer"].state.values(), saved["optimizer"].state.values(), strict=True)
    for held, other in pairs:
        assert held.keys() == other.keys()
        assert torch.equal(held["exp_avg"], other["exp_avg"])
        assert held["exp_avg"].is_contiguous() == (change is not narrow)


def test_options_that_differ_within_a_group_of_the_target_are_refused(tmp_path: Path) -> None:
    saved = trained(3)
    optimizer, parameters = saved["optimizer"], [*saved["model"].parameters()]
    first = optimizer.param_groups[0]
    optimizer.param_groups[:] = [
        {**first, "params": parameters[:2]},
        {**first, "params": parameters[2:], "lr": 0.5},
    ]
    reknit.save(tmp_path / "x", saved)
    with pytest.raises(MismatchError, match=r"optimizer/param_groups/~22: its lr is 0\.5"):
        reknit.load(tmp_path / "x", trained(3))


def calls_of(action: Callable[[], object]) -> int:
    """Return the number of calls of Python functions in this thread during an action."""
    found = 0

    def count(frame: Any, event: str, arg: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def calls_for_each(sizes: tuple[int, int], state: Callable[[int], dict[str, Any]], folder: Path) -> float:
    """Return the calls of a load for each further tensor."""
    counts = []
    for size in sizes:
        held, path = state(size), folder / str(size)
        reknit.save(path, held)
        reknit.load(path, held)
        counts.append(calls_of(lambda path=path, held=held: reknit.load(path, held)))  # type: ignore[misc]
    return (counts[1] - counts[0]) / (sizes[1] - sizes[0])


def many_tensors(number: int) -> dict[str, Any]:
    return {"model": {f"layers.{each}.weight": torch.zeros(4) for each in range(number)}}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions compile comprehensions otherwise")
def test_a_load_calls_few_functions_for_each_tensor(tmp_path: Path) -> None:
    (many,) = run(1, calls_for_each, (64, 192), many_tensors, tmp_path / "many", joined=False)
    (of_parameter,) = run(1, calls_for_each, (64, 192), trained, tmp_path / "trained", joined=False)
    assert many < 7
    assert of_parameter < 4 * 25  # it has four tensors
