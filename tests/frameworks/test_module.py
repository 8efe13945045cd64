from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

from reknit.errors import StateError
from reknit.frameworks.registry import collect, wanted
from reknit.types.shard import Alias
from tests.frameworks.checkpoint import fill, gathered, load, portable, save
from tests.ranks import run
from tests.tables import table


class Inner(nn.Module):
    """A user's module with a submodule and a parameter both called ``module``, and with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.orig_mod = nn.ModuleDict({"a_orig_mod": nn.Linear(3, 2)})
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("dropped", torch.rand(2), persistent=False)
        self.calls: dict[str, Any] = {"n": 1, "t": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def same_tensors(a: nn.Module, b: nn.Module) -> bool:
    left, right = (
        [t for t in module.state_dict().values() if isinstance(t, torch.Tensor)] for module in (a, b)
    )
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def shard_names(state: dict[str, Any]) -> list[str]:
    return [shard.fqn for shard in collect(state, 0, 1).shards]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


NAMES = ["kept", "module.weight", "module.bias", "orig_mod.a_orig_mod.weight", "orig_mod.a_orig_mod.bias"]


@table(
    "wrap",
    [
        lambda m: m,
        compiled,
        checkpoint_wrapper,
        DataParallel,
        lambda m: compiled(checkpoint_wrapper(DataParallel(compiled(m)))),
    ],
)
def test_wrappers_leave_no_trace_in_names(wrap: Any) -> None:
    model = Inner()
    held = collect({"m": wrap(model)}, 0, 1)
    assert [s.fqn for s in held.shards] == NAMES
    assert [b.fqn for b in held.blobs] == ["_extra_state"]
    target = Inner()
    load({"m": wrap(target)}, save({"m": wrap(model)}))
    assert same_tensors(target, model)
    assert target.calls["n"] == 1
    assert torch.equal(target.calls["t"], torch.ones(2))


def test_a_wrapped_part_deep_inside_keeps_the_name_it_had() -> None:
    model = nn.Sequential(
        nn.Sequential(DataParallel(Inner()), checkpoint_wrapper(nn.Linear(2, 2))), nn.Linear(2, 2)
    )
    model.module = nn.Linear(1, 1)
    assert shard_names({"m": model})[:2] == ["0.0.kept", "0.0.module.weight"]
    assert shard_names({"m": model})[5:] == [
        "0.1.weight",
        "0.1.bias",
        "1.weight",
        "1.bias",
        "module.weight",
        "module.bias",
    ]


def test_a_module_and_its_state_dict_are_the_same_to_save() -> None:
    model = nn.Linear(2, 2)
    for state in (
        {"m": model},
        {"m": model.state_dict()},
        {"m": [model]},
        {"m": dict(model.named_parameters())},
    ):
        assert shard_names(state) == ["weight", "bias"]
    target = nn.Linear(2, 2)
    load({"m": target}, save({"m": model.state_dict()}))
    assert torch.equal(target.weight, model.weight)
    load({"m": target.state_dict()}, save({"m": nn.Linear(2, 2)}))
    assert not torch.equal(target.weight, model.weight)


def test_tensors_are_filled_in_place_and_keep_their_gradients() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    before = (id(model.weight), model.weight.data_ptr(), model.weight.requires_grad)
    source = nn.Linear(2, 2)
    load({"m": model}, save({"m": source}))
    assert (id(model.weight), model.weight.data_ptr(), model.weight.requires_grad) == before
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    assert torch.equal(model.weight, source.weight)


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.emb.weight


def test_tied_weights_are_one_tensor_with_two_names() -> None:
    held = collect({"m": Tied()}, 0, 1)
    assert [s.fqn for s in held.shards] == ["emb.weight"]
    assert held.aliases == (Alias("m", "head.weight", "emb.weight"),)
    target = Tied(tie=False)
    source = Tied()
    load({"m": target}, save({"m": source}))
    assert torch.equal(target.head.weight, source.emb.weight)
    again = Tied()
    want = load({"m": again}, save({"m": {"head.weight": torch.ones(5, 3)}}))
    assert (want.shards[0].fqn, want.aliases) == ("head.weight", ())
    assert torch.equal(again.emb.weight, torch.ones(5, 3))
    want = load({"m": again}, save({"m": source}))
    assert want.aliases == (("m", "head.weight", "m", "emb.weight"),)


def test_pipeline_parts_are_one_item_and_two_tensors_of_one_name_are_refused() -> None:
    a, b = nn.ModuleDict({"0": nn.Linear(1, 2)}), nn.ModuleDict({"1": nn.Linear(2, 1)})
    assert shard_names({"m": [a, b]}) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert shard_names({"m": [a, a]}) == ["0.weight", "0.bias"]
    other = nn.ModuleDict({"0": nn.Linear(1, 2)})
    with pytest.raises(StateError, match=r"m/0.weight is the name of two different things"):
        collect({"m": [a, other]}, 0, 1)
    with pytest.raises(StateError, match="two different things"):
        wanted({"m": [a, other]}, save({"m": a}).catalog(), 0, 1)
    assert shard_names({"m": {"x": a, "y": {"z": [other, 1]}}})[::2] == ["x/0.weight", "y/z/0/0.weight"]


class Hooked(nn.Module):
    """A module whose state dict is not its memory: it stores its weight doubled, beside a note."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.rand(2))
        self.weight = nn.Parameter(torch.rand(2))
        self.note = "new"
        self._register_state_dict_hook(self._double)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._halve)  # type: ignore[no-untyped-call]

    quiet = False

    @staticmethod
    def _double(module: Any, state: dict[str, Any], prefix: str, meta: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2
        if not module.quiet:
            state[f"{prefix}note"] = module.note

    @staticmethod
    def _halve(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        module.note = state.pop(f"{prefix}note", module.note)


@table("quiet", [False, True])
def test_what_hooks_made_of_a_state_dict_goes_back_through_them(quiet: bool) -> None:
    old, new = Hooked(), Hooked()
    old.quiet = new.quiet = quiet
    source, target = nn.ModuleDict({"h": old}), nn.ModuleDict({"h": new})
    old.note = "old"
    checkpoint = save({"m": source})
    assert torch.equal(checkpoint.tensors["m", "h.weight"], old.weight * 2)
    want = wanted({"m": target}, checkpoint.catalog(), 0, 1)
    before = new.weight.clone()
    fill(want, checkpoint)
    assert not torch.equal(new.weight, before)
    assert torch.equal(new.weight, old.weight)
    assert torch.equal(new.plain, old.plain)
    assert new.note == ("new" if quiet else "old")


class OwnStateDict(nn.Linear):
    """A module whose `state_dict` takes no arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"w": self.weight.detach()}


def test_a_module_decides_itself_what_is_saved() -> None:
    source, target = OwnStateDict(2, 2), OwnStateDict(2, 2)
    assert shard_names({"m": source}) == ["w"]
    load({"m": target}, save({"m": source}))
    assert torch.equal(target.weight, source.weight)
    assert not torch.equal(target.bias, source.bias)


class OneWay(nn.Module):
    def get_extra_state(self) -> Any:
        return 1


def test_extra_state_that_cannot_be_given_back_is_refused_before_loading() -> None:
    with pytest.raises(StateError, match="set_extra_state"):
        wanted({"m": OneWay()}, save({"m": OneWay()}).catalog(), 0, 1)


def test_extra_state_may_be_a_tensor() -> None:
    class Bytes(nn.Module):
        data = torch.arange(3, dtype=torch.uint8)

        def get_extra_state(self) -> Any:
            return self.data

        def set_extra_state(self, state: Any) -> None:
            self.data = state

    target = Bytes()
    target.data = torch.zeros(3, dtype=torch.uint8)
    load({"m": checkpoint_wrapper(target)}, save({"m": Bytes()}))
    assert target.data.tolist() == [0, 1, 2]


def batch_norm() -> Any:
    """Train batch norm under DDP on data that differs, so that running statistics do too."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    ddp = DistributedDataParallel(model)
    ddp(torch.rand(4, 3, generator=torch.Generator().manual_seed(rank))).sum().backward()
    holdings = portable(collect({"m": ddp, "deep": {"m": ddp}}, rank, 2))
    checkpoint = gathered(holdings)
    target = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    want = wanted({"m": target, "deep": {"m": model}}, checkpoint.catalog(), rank, 2)
    fill(want, checkpoint)
    return holdings, target.module.state_dict(), checkpoint


def test_statistics_under_ddp_are_those_of_the_first_rank_for_all() -> None:
    (first, after_first, checkpoint), (second, after_second, _) = run(2, batch_norm)
    stats = ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    assert [s.replicas for s in first.shards if s.fqn in stats] == [(0,)] * 3
    assert not [s for s in second.shards if s.fqn in stats]
    assert {s.replicas for s in second.shards if s.item == "m"} == {(0, 1)}
    assert not torch.equal(checkpoint.tensors["m", stats[0]], torch.zeros(3))
    for name in stats:
        assert torch.equal(after_first[name], checkpoint.tensors["m", name])
        assert torch.equal(after_second[name], checkpoint.tensors["m", name])


def ddp_of_a_part() -> Any:
    """Two DDP groups of two ranks each, and a parameter that DDP is to leave alone."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(2, 2)
    model.register_buffer("b", torch.ones(1))
    part = DistributedDataParallel(model, process_group=groups[rank // 2])
    whole = nn.Linear(2, 2)
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(whole, ["bias"])
    held = collect({"part": part, "whole": DistributedDataParallel(whole)}, rank, 4)
    return [(s.item, s.fqn, s.replicas) for s in held.shards]


def test_ddp_vouches_only_for_what_it_averages_over_all_ranks() -> None:
    answers = run(4, ddp_of_a_part)
    assert answers[0] == answers[2]
    assert answers[0] == [
        ("part", "weight", None),
        ("part", "bias", None),
        ("part", "b", None),
        ("whole", "weight", (0, 1, 2, 3)),
        ("whole", "bias", None),
    ]
    assert [name for _, name, _ in answers[1]] == ["weight", "bias", "weight", "bias"]


class Transposed(nn.Module):
    """A module whose hooks save a parameter in another form, around one with extra state."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = Inner()
        self.inner.calls = {"n": calls}
        self.weight = nn.Parameter(torch.full((2, 3), float(calls)))
        hooks: Any = self
        hooks.register_state_dict_post_hook(self._turn)
        hooks.register_load_state_dict_pre_hook(self._turn)

    @staticmethod
    def _turn(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t().contiguous()


def test_extra_state_is_restored_beside_a_tensor_that_a_hook_transforms() -> None:
    saved, target = Transposed(5), Transposed(0)
    load({"m": target}, save({"m": saved}))
    assert target.inner.calls == {"n": 5}
    assert torch.equal(target.weight, saved.weight)


def _ignored_inside_a_wrapper() -> list[tuple[str, Any]]:
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2, bias=False)), nn.Linear(2, 2, bias=False))
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["0._checkpoint_wrapped_module.weight"])
    state = {"m": DistributedDataParallel(model)}
    return [(shard.fqn, shard.replicas) for shard in collect(state, dist.get_rank(), 2).shards]


def test_ddp_does_not_vouch_for_an_ignored_parameter_inside_another_wrapper() -> None:
    for shards in run(2, _ignored_inside_a_wrapper):
        assert shards == [("0.weight", None), ("1.weight", (0, 1))]


def frozen_names(state: dict[str, Any]) -> set[str]:
    return {shard.fqn for shard in collect(state, 0, 1).shards if shard.frozen}


@table("wrap", [lambda m: m, compiled, checkpoint_wrapper, DataParallel])
def test_parameters_that_are_not_trained_are_known_as_frozen(wrap: Any) -> None:
    module = wrap(Inner())
    assert frozen_names({"m": module}) == set()
    module.requires_grad_(False)
    assert frozen_names({"m": module}) == {"module.weight", "module.bias"} | {
        "orig_mod.a_orig_mod.weight",
        "orig_mod.a_orig_mod.bias",
    }, "buffers may change in every step"
    module.requires_grad_(True)
    assert frozen_names({"m": module, "o": torch.optim.SGD(module.parameters())}) == set()
    assert frozen_names({"plain": {"w": torch.ones(3)}}) == set(), "a tensor by itself says nothing"


def test_a_frozen_parameter_is_known_under_all_its_names_and_by_its_own_state_dict() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False).requires_grad_(False), nn.Linear(3, 3)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # detached, as without keep_vars
            return {"a.weight": self.a.weight.detach(), "b.weight": self.b.weight.detach()}

    assert frozen_names({"m": Own()}) == {"a.weight"}
    tied = nn.ModuleDict({"x": nn.Linear(3, 3, bias=False), "y": nn.Linear(3, 3, bias=False)})
    tied["y"].weight = tied["x"].weight
    tied.requires_grad_(False)
    assert frozen_names({"m": tied}) == {"x.weight"}
    assert collect({"m": tied}, 0, 1).aliases == (Alias("m", "y.weight", "x.weight"),)
