"""Optimizers with state dicts of their own, as packages of optimizers have them: they go on as torch's do."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reknit
from reknit.errors import ReknitError
from reknit.frameworks.registry import collect, wanted
from reknit.frameworks.torch import own_state
from tests.frameworks.checkpoint import Checkpoint, assemble, fill, load, portable, save
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: Any, first: int, steps: int = 3) -> None:
    for number in range(first, first + steps):
        x = torch.rand(8, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


class HalfMoments(torch.optim.Optimizer):
    """Moments in bf16 beside parameters in fp32, which a hook makes bf16 again after torch's own load."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.register_load_state_dict_post_hook(lambda one: one.halve())  # type: ignore[attr-defined]

    def halve(self) -> None:
        for state in self.state.values():
            state["moment"] = state["moment"].bfloat16()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"step": 0, "moment": torch.zeros_like(parameter, dtype=torch.bfloat16)}
            state["step"] += 1
            state["moment"].lerp_(parameter.grad.bfloat16(), 0.5)
            parameter -= 0.1 * state["moment"].float()


class Wrapped(torch.optim.SGD):
    """States that its state dict shows inside another dict, and options that it leaves out of it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.param_groups[0]["_cache"] = object()

    def state_dict(self) -> dict[str, Any]:
        given = super().state_dict()
        given["state"] = {number: {"inside": dict(state)} for number, state in given["state"].items()}
        for group in given["param_groups"]:
            group.pop("_cache", None)
        return given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {number: state["inside"] for number, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": states})


class Slow(torch.optim.Optimizer):
    """An optimizer around another, with slow weights that its state dict has under pairs of numbers."""

    def __init__(self, parameters: Any) -> None:
        self.inside = torch.optim.AdamW(parameters, lr=0.1)
        super().__init__(self.inside.param_groups, {})
        self.param_groups = self.inside.param_groups
        self.state: Any = defaultdict(dict)
        for parameter in self._each():
            self.state[parameter]["slow"] = parameter.detach().clone()

    def _each(self) -> list[Any]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inside.step()
        for parameter in self._each():
            self.state[parameter]["slow"].lerp_(parameter, 0.25)
            parameter.lerp_(self.state[parameter]["slow"], 0.5)

    def state_dict(self) -> dict[str, Any]:
        slow = {(0, number): self.state[one]["slow"] for number, one in enumerate(self._each())}
        return {"slow": slow, "inside": self.inside.state_dict(), "k": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inside.load_state_dict(state_dict["inside"])
        self.param_groups = self.inside.param_groups
        for number, parameter in enumerate(self._each()):
            self.state[parameter] = {"slow": state_dict["slow"][0, number].clone()}


class Projector:
    """A plain object that holds a matrix."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.matrix: Any = None
        self.shapes = {0.5: torch.Size([2, 3])}
        self.inner: Any = None


class Projected(torch.optim.Optimizer):
    """An optimizer with such objects in its states, and a matrix in the order of LAPACK's results."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "projector" not in state:
                state["projector"] = Projector(0.5)
                state["projector"].inner = Projector(0.25)
            state["basis"] = torch.linalg.qr(parameter.grad.reshape(len(parameter), -1)).Q.mT.contiguous().mT
            projector = state["projector"]
            projector.matrix = (projector.matrix if projector.matrix is not None else 0) + state["basis"]
            parameter -= projector.scale * projector.inner.scale * parameter.grad


ALL: dict[str, Any] = {"half": HalfMoments, "wrapped": Wrapped, "slow": Slow, "projected": Projected}


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@table("kind", ALL)
@table("before", [0, 2])
def test_a_run_that_was_resumed_ends_like_one_that_never_stopped(kind: str, before: int) -> None:
    model, target = net(), net(1)
    one, other = ALL[kind](model.parameters()), ALL[kind](target.parameters())
    train(model, one, 0)
    train(target, other, 7, before)
    load({"m": target, "o": other}, save({"m": model, "o": one}))
    train(model, one, 3)
    train(target, other, 3)
    assert same(model, target)


def test_objects_in_states_come_back_as_they_were() -> None:
    model, target = net(), net(1)
    one, other = Projected(model.parameters()), Projected(target.parameters())
    train(model, one, 0)
    load({"m": target, "o": other}, save({"m": model, "o": one}))
    for left, right in zip(model.parameters(), target.parameters(), strict=True):
        was, found = one.state[left]["projector"], other.state[right]["projector"]
        assert type(found) is type(found.inner) is Projector
        assert torch.equal(found.matrix, was.matrix)
        assert (found.scale, found.shapes, found.inner.matrix) == (0.5, {0.5: torch.Size([2, 3])}, None)
        assert found is not was
        basis = other.state[right]["basis"]
        ordered = basis.is_contiguous() == one.state[left]["basis"].is_contiguous()
        assert ordered, "results of products depend on the order in memory"


def test_a_present_state_of_another_order_in_memory_is_replaced() -> None:
    model = net()
    weight = next(model.parameters())
    orders = [torch.rand(6, 4), torch.rand(4, 6).mT, torch.rand(3, 2, 5).permute(2, 0, 1)]
    for saved in orders:
        for present in orders:
            one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
            one.state[weight], other.state[weight] = {"basis": saved}, {"basis": present.clone()}
            load({"m": model, "o": other}, save({"m": model, "o": one}))
            assert torch.equal(other.state[weight]["basis"], saved)
            assert other.state[weight]["basis"].stride() == saved.stride()


class Careful:
    """A class whose objects do something when they end."""

    ended: ClassVar[list[str]] = []

    def __del__(self) -> None:
        Careful.ended.append("it ran")


def test_only_plain_classes_of_the_optimizer_s_own_package_are_made() -> None:
    model = net()
    one, other = Projected(model.parameters()), Projected(model.parameters())
    train(model, one, 0, 1)
    checkpoint = save({"m": model, "o": one})
    wrong: tuple[Any, ...] = ([__name__, "Careful"], ["os", "stat_result"], ["x"], 5)
    for named in wrong:
        checkpoint.shared["o", "state/0.weight/projector"]["~class"] = named
        want = wanted({"m": model, "o": other}, checkpoint.catalog(), 0, 1)
        refused = [fqn for _, fqn, why in want.mismatched if "not a plain class" in why]
        assert refused == ["state/0.weight/projector"], named
    assert Careful.ended == []
    assert not own_state.packages(torch.optim.AdamW(model.parameters()))


def test_an_object_that_may_be_more_than_its_attributes_is_refused_before_a_byte_is_written(
    tmp_path: Path,
) -> None:
    model = net()
    for found in (Careful(), nn.Module, object(), lambda: 5):
        one = Projected(model.parameters())
        one.state[next(model.parameters())]["projector"] = found
        with pytest.raises(ReknitError, match="cannot be saved"):
            reknit.save(tmp_path / "c", {"m": model, "o": one})
        assert not reknit.latest(tmp_path)
    Careful.ended.clear()


def test_states_that_are_not_by_parameters_are_refused_for_other_parameters() -> None:
    model = net()
    checkpoint = save({"m": model, "o": Slow(model.parameters())})
    before = net(1)
    for parameters in (list(before.parameters())[::-1], list(before.parameters())[:2]):
        other = Slow(parameters)
        want = wanted({"m": before, "o": other}, checkpoint.catalog(), 0, 1)
        assert {fqn for _, fqn, _ in want.mismatched} == {"more/slow", "more/inside", "more/k"}
        assert all("names, order and shapes" in why for _, _, why in want.mismatched)
    plain = wanted({"m": model, "o": torch.optim.AdamW(model.parameters())}, checkpoint.catalog(), 0, 1)
    assert plain.missing
    assert not plain.mismatched


def _sharded(kind: str, first: int, checkpoint: Checkpoint | None) -> Any:
    """Train a model that FSDP2 shards: from a checkpoint, or to make one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = net(first)
    fully_shard(model, mesh=mesh)
    optimizer = ALL[kind](model.parameters())
    state = {"m": model, "o": optimizer}
    rank, size = dist.get_rank(), dist.get_world_size()
    if checkpoint is not None:
        want = wanted(state, checkpoint.catalog(), rank, size)
        if want.mismatched:
            return [why for _, _, why in want.mismatched]
        assert want.missing == ()
        fill(want, checkpoint)
    train(model, optimizer, first)
    if checkpoint is None:
        saved = portable(collect(state, rank, size))
        train(model, optimizer, first + 3)
        return saved, [parameter.full_tensor() for parameter in model.parameters()]
    return [parameter.full_tensor() for parameter in model.parameters()]


@table("kind", ["half", "wrapped", "slow"])
def test_own_state_dicts_of_sharded_models_go_on_and_reshard_if_they_are_by_parameters(kind: str) -> None:
    saved = run(2, _sharded, kind, 0, None)
    checkpoint = assemble([holdings for holdings, _ in saved])
    for found in run(2, _sharded, kind, 3, checkpoint):
        assert all(map(torch.equal, found, saved[0][1]))
    (alone,) = run(1, _sharded, kind, 3, checkpoint)
    if kind == "slow":
        assert "not by parameters" in alone[0]
    else:
        torch.testing.assert_close(alone, saved[0][1])


def test_a_selection_of_states_of_such_an_optimizer_is_loaded() -> None:
    model, target = net(), net(1)
    one, other = HalfMoments(model.parameters()), HalfMoments(target.parameters())
    train(model, one, 0)
    train(target, other, 5)
    kept = {p: state["moment"].clone() for p, state in other.state.items()}
    checkpoint = save({"m": model, "o": one})
    catalog = checkpoint.catalog()
    chosen = replace(catalog, terms=replace(catalog.terms, only=("o/state/*/step",)))
    fill(wanted({"m": target, "o": other}, chosen, 0, 1), checkpoint)
    assert {state["step"] for state in other.state.values()} == {3}
    assert all(torch.equal(state["moment"], kept[p]) for p, state in other.state.items())
