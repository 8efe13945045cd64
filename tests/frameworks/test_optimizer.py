from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from reknit.errors import StateError
from reknit.frameworks.numbers import same_value
from reknit.frameworks.registry import collect, wanted
from reknit.types.shard import Tagged
from tests.frameworks.checkpoint import Checkpoint, assemble, fill, load, save
from tests.frameworks.test_optimizer_protocol import net, train
from tests.ranks import run
from tests.tables import table

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "capturable": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=False),
}


def equal_states(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return repr(left["state"]) == repr(right["state"]) and same_value(
        [{k: v for k, v in g.items() if k not in ("lr", "foreach")} for g in left["param_groups"]],
        [{k: v for k, v in g.items() if k not in ("lr", "foreach")} for g in right["param_groups"]],
    )


@table("kind", OPTIMIZERS)
@table("before", [0, 1])
def test_a_resumed_optimizer_goes_on_exactly_like_one_that_never_stopped(kind: str, before: int) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer)
    checkpoint = save({"model": model, "optimizer": optimizer})
    target = net(1)
    fresh = OPTIMIZERS[kind](target.parameters())
    train(target, fresh, before)
    load({"model": target, "optimizer": fresh}, checkpoint)
    assert equal_states(fresh, optimizer)
    train(model, optimizer)
    train(target, fresh)
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_fresh_optimizer_is_filled_without_a_step_and_only_at_delivery() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    checkpoint = save({"model": model, "optimizer": optimizer})
    fresh = torch.optim.AdamW(model.parameters(), lr=7.0)
    fresh.register_step_pre_hook(lambda *args: pytest.fail("a step was taken"))
    group = fresh.param_groups[0]
    want = wanted({"model": model, "optimizer": fresh}, checkpoint.catalog(), 0, 1)
    assert not fresh.state
    assert group["lr"] == 7.0
    fill(want, checkpoint)
    assert fresh.param_groups[0] is group
    assert group["lr"] == 1e-3
    assert [state["step"].item() for state in fresh.state.values()] == [2.0] * 6
    assert all(state["exp_avg"].shape == p.shape for p, state in fresh.state.items())


def test_saving_leaves_an_optimizer_without_state_without_state() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: p.clone() for name, p in model.named_parameters()}
    held = collect({"model": model, "optimizer": optimizer}, 0, 1)
    assert len(optimizer.state) == 0
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert {b.fqn for b in held.blobs} == {f"param_groups/{name}" for name in before}
    assert {s.item for s in held.shards} == {"model"}


def test_loading_a_state_from_before_the_first_step_clears_what_is_there() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = save({"model": model, "optimizer": optimizer})
    train(model, optimizer)
    load({"model": model, "optimizer": optimizer}, checkpoint)
    assert len(optimizer.state) == 0


def test_any_grouping_takes_options_by_parameter() -> None:
    model = net()
    weights, others = (
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim < 2],
    )
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": 0.5, "mine": "x"}, {"params": others}]
    two = torch.optim.AdamW(groups, lr=0.1)
    train(model, two)
    checkpoint = save({"model": model, "optimizer": two})
    three = torch.optim.AdamW([{"params": others[:2]}, {"params": weights}, {"params": others[2:]}])
    load({"model": model, "optimizer": three}, checkpoint)
    assert [g["weight_decay"] for g in three.param_groups] == [0.01, 0.5, 0.01]
    assert [g.get("mine") for g in three.param_groups] == [None, "x", None]
    assert {g["lr"] for g in three.param_groups} == {0.1}
    assert all(torch.equal(three.state[p]["exp_avg"], two.state[p]["exp_avg"]) for p in model.parameters())
    one = torch.optim.AdamW(model.parameters())
    want = wanted({"model": model, "optimizer": one}, checkpoint.catalog(), 0, 1)
    ((item, fqn, why),) = want.mismatched
    assert (item, fqn.split("/")[0]) == ("optimizer", "param_groups")
    assert "the target has both in one group" in why


def test_how_an_optimizer_computes_stays_the_target_s_own_also_if_a_checkpoint_has_it() -> None:
    model = net()
    source = torch.optim.AdamW(model.parameters(), foreach=True, maximize=True)
    target = torch.optim.AdamW(model.parameters(), foreach=False)
    checkpoint = save({"model": model, "optimizer": source})
    assert "foreach" not in checkpoint.shared["optimizer", "param_groups/0.bias"]
    for value in (options for (item, _), options in checkpoint.shared.items() if item == "optimizer"):
        value["foreach"] = True
    load({"model": model, "optimizer": target}, checkpoint)
    assert target.param_groups[0]["foreach"] is False
    assert target.param_groups[0]["maximize"] is True


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (1,))
        self.scale = nn.Parameter(distribute_tensor(torch.ones(()), mesh, [Replicate()]))


def step_of_a_scalar() -> Any:
    model = Scalar()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.scale.grad = torch.ones_like(model.scale)
    optimizer.step()
    fresh = torch.optim.AdamW(model.parameters())
    load({"m": model, "o": fresh}, save({"m": model, "o": optimizer}))
    (state,) = fresh.state.values()
    return type(state["step"]), type(state["exp_avg"])


def test_the_counter_of_a_distributed_scalar_is_a_plain_tensor() -> None:
    assert run(1, step_of_a_scalar) == [(torch.Tensor, DTensor)]


SCHEDULERS: dict[str, Any] = {
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "tensor": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
}


@pytest.mark.filterwarnings("ignore")  # torch's SequentialLR warns about itself
@table("kind", SCHEDULERS)
def test_schedulers_go_on_where_they_were(kind: str) -> None:
    def make(seed: int) -> tuple[Any, Any, Any]:
        model = net(seed)
        lr: Any = torch.tensor(0.1) if kind == "tensor" else 0.1
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
        return model, optimizer, SCHEDULERS[kind](optimizer)

    model, optimizer, scheduler = make(0)
    train(model, optimizer, 4, scheduler)
    target, fresh, fresh_scheduler = make(1)
    state = {"model": target, "optimizer": fresh, "scheduler": fresh_scheduler}
    load(state, save({"model": model, "optimizer": optimizer, "scheduler": scheduler}))
    for _ in range(4):
        assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        train(model, optimizer, 1, scheduler)
        train(target, fresh, 1, fresh_scheduler)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), target.parameters(), strict=True))


def test_names_come_from_the_optimizer_where_no_module_is_in_the_state() -> None:
    model = net()
    named = torch.optim.AdamW(model.named_parameters())
    train(model, named)
    checkpoint = save({"optimizer": named})
    assert ("optimizer", "state/0.weight/exp_avg") in checkpoint.tensors
    other = net(1)
    target = torch.optim.AdamW(other.parameters())
    load({"optimizer": target, "model": other}, with_model(checkpoint, other))
    assert repr(target.state_dict()["state"]) == repr(named.state_dict()["state"])


def with_model(checkpoint: Checkpoint, model: nn.Module) -> Checkpoint:
    """Return the checkpoint with a model beside its optimizer."""
    more = save({"model": model})
    both = copy.copy(checkpoint)
    both.items = ("model", "optimizer")
    both.specs = {**checkpoint.specs, **more.specs}
    both.tensors = {**checkpoint.tensors, **more.tensors}
    return both


def test_parameters_without_a_name_are_refused_with_the_remedies() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(StateError, match=r"put the model into the state"):
        collect({"optimizer": optimizer}, 0, 1)
    with pytest.raises(StateError, match="put the optimizer itself into the state"):
        collect({"optimizer": optimizer.state_dict(), "model": model}, 0, 1)
    pair: dict[str, Any] = {"a": net(), "b": net()}
    both = torch.optim.AdamW([*pair["a"].parameters(), *pair["b"].parameters()])
    with pytest.raises(StateError, match=r"two parameters of the optimizer o are called 0.weight"):
        collect({**pair, "o": both}, 0, 1)


def test_a_group_with_another_number_of_names_than_of_parameters_is_refused() -> None:
    for change in (-1, 1):
        optimizer = torch.optim.SGD(net().named_parameters(), lr=0.1)
        names = optimizer.param_groups[0]["param_names"]
        optimizer.param_groups[0]["param_names"] = [*names, "more"] if change > 0 else names[:change]
        with pytest.raises(StateError, match=r"has \d names for \d parameters"):
            save({"optimizer": optimizer})


def test_a_raw_state_dict_with_names_is_saved_and_filled_like_its_optimizer() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer)
    checkpoint = save({"optimizer": optimizer.state_dict()})
    assert checkpoint.tensors.keys() == save({"optimizer": optimizer}).tensors.keys()
    other = torch.optim.AdamW(net(1).named_parameters())
    load({"optimizer": other}, checkpoint)
    assert equal_states(other, optimizer)
    fresh = torch.optim.AdamW(net(1).named_parameters(), lr=9.0)
    state = {"optimizer": fresh.state_dict()}
    load(state, checkpoint)
    fresh.load_state_dict(state["optimizer"])
    assert equal_states(fresh, optimizer)
    assert fresh.param_groups[0]["lr"] == 1e-3


def test_pipeline_optimizers_are_one_item() -> None:
    first, second = nn.ModuleDict({"0": nn.Linear(2, 2)}), nn.ModuleDict({"1": nn.Linear(2, 2)})
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9) for m, lr in ((first, 0.1), (second, 0.2))
    ]
    for module, optimizer in zip((first, second), optimizers, strict=True):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    checkpoint = save({"model": [first, second], "optimizer": optimizers})
    whole = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    last: Any = whole["1"]
    target = torch.optim.SGD([{"params": whole[n].parameters()} for n in "01"], momentum=0.9)
    load({"model": whole, "optimizer": target}, checkpoint)
    assert [g["lr"] for g in target.param_groups] == [0.1, 0.2]
    assert torch.equal(target.state[last.weight]["momentum_buffer"], torch.ones(2, 2))


def test_a_parameter_that_the_saved_optimizer_did_not_have_is_missing() -> None:
    model = net()
    partial = torch.optim.AdamW(list(model.parameters())[:2])
    train(model, partial)
    want = wanted(
        {"model": model, "o": torch.optim.AdamW(model.parameters())},
        save({"model": model, "o": partial}).catalog(),
        0,
        1,
    )
    assert [fqn for _, fqn, _ in want.missing] == [
        f"param_groups/{n}" for n in ("1.weight", "1.bias", "2.weight", "2.bias")
    ]


def test_states_of_a_parameter_of_another_shape_are_mismatched_and_left_alone() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    checkpoint = save({"model": model, "optimizer": optimizer})
    model[2] = nn.Linear(4, 5)
    other = torch.optim.AdamW(model.parameters())
    want = wanted({"model": model, "optimizer": other}, checkpoint.catalog(), 0, 1)
    fqns = {fqn for _, fqn, _ in want.mismatched}
    assert {"2.weight", "2.bias", "state/2.weight/exp_avg", "state/2.bias/step"} < fqns
    fill(want, checkpoint)
    assert model[2].weight not in other.state
    assert model[0].weight in other.state


class Peculiar(torch.optim.Optimizer):
    """An optimizer with nested states, numbers, and something for no parameter."""

    def __init__(self, params: Any, fill: int) -> None:
        super().__init__(params, {"lr": 1.0})
        if fill:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = {
                        "count": fill,
                        "factors": {
                            "rows": [torch.full((2,), float(fill)), None],
                            3: torch.full((1,), float(fill)),
                        },
                        "history": [1] * fill,
                        "at": torch.float16,
                        "a/b": torch.full((5,), fill),
                    }
            self.state["globally"] = {"t": torch.full((2,), fill), "n": fill}  # type: ignore[index]


def test_nested_states_and_states_of_no_parameter_come_back() -> None:
    model = net()
    source, target = Peculiar(model.parameters(), 3), Peculiar(model.parameters(), 0)
    checkpoint = save({"m": model, "o": source})
    assert checkpoint.shared["o", "state/0.weight/at"] == Tagged("torch.dtype", "float16")
    load({"m": model, "o": target}, checkpoint)
    other = Peculiar(model.parameters(), 5)
    load({"m": model, "o": other}, checkpoint)
    for filled in (target, other):
        assert filled.state.keys() == source.state.keys()
        for p, states in source.state.items():
            assert sorted(map(repr, filled.state[p].items())) == sorted(map(repr, states.items()))
    assert other.state["globally"]["t"] is not source.state["globally"]["t"]  # type: ignore[index]


def test_a_stale_state_of_a_dropped_parameter_is_not_saved() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    optimizer.param_groups[0]["params"].pop()
    assert ("o", "state/2.bias/exp_avg") not in save({"m": model, "o": optimizer}).tensors


def _two_groups(*rates: float) -> dict[str, Any]:
    model = nn.ParameterList([torch.ones(2), torch.ones(2)])
    groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in model]
    for group, rate in zip(groups, rates, strict=False):
        group["lr"] = torch.tensor(rate)
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), foreach=False)
    return {"model": model, "optimizer": optimizer}


def test_groups_that_share_a_default_tensor_take_learning_rates_of_their_own() -> None:
    target = _two_groups()
    load(target, save(_two_groups(0.25, 0.125)))
    assert [float(group["lr"]) for group in target["optimizer"].param_groups] == [0.25, 0.125]


class Counting(torch.optim.Optimizer):
    """An optimizer whose counter is a plain number, and another one on every rank."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def count(self, number: int) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"number": number, "average": torch.ones_like(parameter)}


def test_a_counter_that_differed_between_other_ranks_is_reported_and_not_dropped() -> None:
    model = nn.Linear(2, 1, bias=False)
    everyone = []
    for rank in range(2):
        optimizer = Counting(model.parameters())
        optimizer.count(rank)
        everyone.append(collect({"model": model, "optimizer": optimizer}, rank, 2))
    state = {"model": model, "optimizer": Counting(model.parameters())}
    want = wanted(state, assemble(everyone).catalog(), 0, 1)
    assert [(item, fqn) for item, fqn, _ in want.missing] == [("optimizer", "state/weight/number")]


def _estimates_of_one_rank() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ParameterDict({"w": nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))})
    optimizer = torch.optim.AdamW(model.parameters())
    rank = torch.distributed.get_rank()
    optimizer.state[model["w"]] = {"step": torch.tensor(1.0), "estimate": torch.tensor(float(rank))}
    shards = collect({"model": model, "optimizer": optimizer}, rank, 2).shards
    return {shard.fqn: shard.replicas for shard in shards if shard.item == "optimizer"}


def test_only_the_step_of_a_dtensor_parameter_is_vouched_for_among_its_scalar_states() -> None:
    for replicas in run(2, _estimates_of_one_rank):
        assert replicas == {"state/w/step": (0, 1), "state/w/estimate": None}


@table("width", [2, 4])
def test_an_optimizer_alone_takes_no_states_of_a_parameter_of_another_shape(width: int) -> None:
    def alone(columns: int) -> torch.optim.Optimizer:
        return torch.optim.AdamW([("w", nn.Parameter(torch.ones(1, columns)))])

    source = alone(width)
    for group in source.param_groups:
        group["params"][0].grad = torch.ones(1, width)
    source.step()
    checkpoint = save({"o": source})
    other, same = alone(3), alone(width)
    want = wanted({"o": other}, checkpoint.catalog(), 0, 1)
    assert {fqn for _, fqn, _ in want.mismatched} >= {"state/w/exp_avg", "state/w/exp_avg_sq"}
    assert all("not for a parameter of shape [1, 3]" in why for _, _, why in want.mismatched)
    assert load({"o": same}, checkpoint).mismatched == ()
