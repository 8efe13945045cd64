"""Modules that do more at a load than take tensors end in the same state as after a load of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DataParallel

import reknit
from reknit.errors import MismatchError, StateError
from reknit.frameworks.registry import wanted
from tests.frameworks.checkpoint import load, save
from tests.ranks import run
from tests.tables import table


class Derived(nn.Linear):
    """A layer that keeps a value computed from its weight at the load."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.zeros(2), persistent=False)
        self.first: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def after(layer: Derived) -> None:
    def derive(module: Any, keys: Any) -> None:
        assert keys == ([], [])
        module.scale = module.weight.detach().sum(0)

    layer.register_load_state_dict_post_hook(derive)  # type: ignore[no-untyped-call]


def before(layer: Derived) -> None:
    def derive(module: Any, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        assert metadata == {"version": 1}
        module.scale = state[f"{prefix}weight"].sum(0)
        module.first = state[f"{prefix}weight"]

    layer.register_load_state_dict_pre_hook(derive)  # type: ignore[no-untyped-call]


def before_alone(layer: Derived) -> None:
    def derive(state: dict[str, Any], prefix: str, *_: Any) -> None:
        layer.scale = state[f"{prefix}weight"].sum(0)

    layer._register_load_state_dict_pre_hook(derive)  # type: ignore[no-untyped-call]


def half(layer: Derived) -> None:
    """A hook that has no counterpart when the state dict is made."""

    def halve(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2

    layer.register_load_state_dict_pre_hook(halve)  # type: ignore[no-untyped-call]


class Taking(Derived):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state, prefix, *args)
        self.scale = self.weight.detach().sum(0)


def plain(layer: Derived) -> None:
    pass


KINDS = {
    "post-hook": (Derived, after),
    "pre-hook": (Derived, before),
    "pre-hook without the module": (Derived, before_alone),
    "pre-hook that changes": (Derived, half),
    "own _load_from_state_dict": (Taking, plain),
}
WRAPPERS: dict[str, Any] = {
    "bare": lambda m: m,
    "inside": lambda m: nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(m)),
    "wrapped": lambda m: torch.compile(checkpoint_wrapper(DataParallel(m)), backend="eager"),
    "wrapped inside": lambda m: DataParallel(nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(m))),
}


@table("wrap", WRAPPERS.values())
@table(("layer", "hook"), KINDS.values())
def test_a_module_does_at_a_load_what_it_does_at_one_of_torch(layer: Any, hook: Any, wrap: Any) -> None:
    source, ours, theirs = layer(), layer(), layer()
    hook(ours)
    hook(theirs)
    weight = ours.weight
    load({"m": wrap(ours)}, save({"m": wrap(source)}))
    wrapped = wrap(theirs)
    wrapped.load_state_dict(copy.deepcopy(wrap(source).state_dict()))
    assert ours.weight is weight
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.scale, theirs.scale)
    x = torch.rand(3, 2)
    assert torch.equal(ours(x), theirs(x))


def test_a_module_may_keep_what_its_hook_is_given() -> None:
    source, target = Derived(), Derived()
    before(target)
    load({"m": nn.Sequential(target)}, save({"m": nn.Sequential(source)}))
    with torch.no_grad():
        target.weight.zero_()
    assert torch.equal(target.first, source.weight)
    assert not target.first.requires_grad


def test_a_hook_around_a_module_sees_and_changes_what_is_in_it() -> None:
    def halve(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}inner.weight"] = state[f"{prefix}inner.weight"] / 2

    source, target = (nn.ModuleDict({"m": nn.ModuleDict({"inner": nn.Linear(2, 2)})}) for _ in range(2))
    target["m"].register_load_state_dict_pre_hook(halve)  # type: ignore[no-untyped-call]
    load({"m": target}, save({"m": source}))
    assert torch.equal(target.state_dict()["m.inner.weight"], source.state_dict()["m.inner.weight"] / 2)


class Whole(Derived):
    """A model with its own `load_state_dict`."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super().load_state_dict(state_dict, *args, **kwargs)
        self.scale = self.weight.detach().sum(0)
        return answer


@table("wrap", [lambda m: m, WRAPPERS["wrapped"]])
def test_a_model_takes_its_state_by_its_own_method_whatever_wraps_it(wrap: Any) -> None:
    source, target = Whole(), Whole()
    load({"m": wrap(target)}, save({"m": source}))
    assert torch.equal(target.scale, source.weight.detach().sum(0))


class Versioned(nn.Linear):
    """A layer that reads a state dict without a version as one of an older kind."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_modules_are_given_the_version_of_their_state_dict() -> None:
    load({"m": DataParallel(nn.Sequential(Versioned(2, 2)))}, save({"m": nn.Sequential(Versioned(2, 2))}))


class Counted(Derived):
    """A layer with extra state, at which its hook looks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.seen, self.calls = count, 0, 0
        self.register_load_state_dict_pre_hook(self._look)  # type: ignore[no-untyped-call]

    @staticmethod
    def _look(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.seen = state[f"{prefix}_extra_state"]

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state
        self.calls += 1


def test_hooks_see_the_extra_state_that_was_saved() -> None:
    target = Counted(1)
    load({"m": nn.Sequential(target)}, save({"m": nn.Sequential(Counted(7))}))
    assert (target.seen, target.count, target.calls) == (7, 7, 1)


def test_hooks_run_on_a_model_that_had_no_memory(tmp_path: Any) -> None:
    source = Derived()
    reknit.save(tmp_path / "x", {"m": nn.Sequential(source)})
    with torch.device("meta"):
        target = Derived()
    before(target)
    reknit.load(tmp_path / "x", {"m": nn.Sequential(target)})
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.scale, source.weight.sum(0))


def test_hooks_stay_still_where_nothing_of_their_module_is_loaded(tmp_path: Any) -> None:
    source, target = Derived(), Derived()
    after(target)
    reknit.save(tmp_path / "x", {"m": source, "n": 1})
    reknit.load(tmp_path / "x", {"m": target, "n": 0}, options=reknit.LoadOptions(only=("n",)))
    assert not target.scale.any()


def test_a_module_that_does_not_take_its_own_state_dict_is_named() -> None:
    def lose(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        del state[f"{prefix}weight"]

    target = Derived()
    target.register_load_state_dict_pre_hook(lose)  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match=r"(?s)m: Sequential.load_state_dict .*Missing key.*0.weight"):
        load({"m": nn.Sequential(target)}, save({"m": nn.Sequential(Derived())}))


def test_what_only_torch_itself_does_at_a_load_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        norm = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        old = nn.utils.spectral_norm(nn.Linear(2, 2))
        return nn.Sequential(nn.BatchNorm1d(2), checkpoint_wrapper(norm), nn.InstanceNorm1d(2), old)

    source, target = build(), build()
    monkeypatch.setattr("reknit.frameworks.torch.own_load.OwnLoad.give", None)
    load({"m": target}, save({"m": source}))
    assert all(map(torch.equal, source.state_dict().values(), target.state_dict().values()))


def _sharded() -> list[Any]:
    """Load into FSDP2 and FSDP1, of which the second has no whole weights for a hook to look at."""
    torch.manual_seed(0)
    checkpoint = save({"m": nn.Sequential(Derived(), nn.Linear(2, 2))})
    weight = checkpoint.tensors["m", "0.weight"]
    layer = Derived()
    before(layer)
    two = nn.Sequential(layer, nn.Linear(2, 2))
    fully_shard(two)
    load({"m": two}, checkpoint, torch.distributed.get_rank(), 2)
    found = [torch.equal(layer.scale.full_tensor(), weight.sum(0))]  # type: ignore[attr-defined]
    layer = Derived()
    after(layer)
    one = FullyShardedDataParallel(
        nn.Sequential(layer, nn.Linear(2, 2)),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    want = wanted({"m": one}, checkpoint.catalog(), torch.distributed.get_rank(), 2)
    return [*found, want.mismatched]


def test_hooks_see_dtensors_and_are_refused_where_parameters_are_not_whole() -> None:
    for loaded, mismatched in run(2, _sharded):
        assert loaded
        ((item, fqn, why),) = mismatched
        assert (item, fqn) == ("m", "0")
        assert "after.<locals>.derive would run at a load, and 0.weight is not whole" in why


def test_a_hook_that_cannot_run_is_a_mismatch_before_anything_changes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Derived(), Derived()
    after(target)
    reknit.save(tmp_path / "x", {"m": source})
    monkeypatch.setattr("reknit.frameworks.torch.own_load._torn", lambda *_: "weight")
    kept = target.weight.clone()
    with pytest.raises(MismatchError, match=r"mismatched: m: .*derive would run"):
        reknit.load(tmp_path / "x", {"m": target})
    assert torch.equal(target.weight, kept)
    reknit.load(tmp_path / "x", {"m": target}, strict=["!m"])
    assert torch.equal(target.weight, source.weight)
    assert not target.scale.any()
