"""The kind of an optimizer, and its own ways to save and load: kept, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from reknit.errors import StateError
from reknit.frameworks.registry import collect, wanted
from reknit.frameworks.torch import own_state
from reknit.types.wanted import Terms
from tests.frameworks.checkpoint import Checkpoint, assemble, fill, load, portable, save
from tests.ranks import run
from tests.running.examples import examples
from tests.tables import table


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def of_first(optimizer: Any, model: Any) -> Any:
    """Return the states of the first parameter."""
    return optimizer.state[next(model.parameters())]


def train(model: nn.Module, optimizer: Any, steps: int = 2, scheduler: Any = None) -> None:
    for number in range(steps):
        x = torch.rand(8, 3, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


class Counting(torch.optim.SGD):
    """An optimizer with entries of its own in its state dict, as PyTorch's documentation shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.calls = 0
        self.average: torch.Tensor | None = None
        self.seen: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.average = torch.full((3,), float(self.calls))
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        more = {"calls": self.calls, "seen": {"one": torch.arange(self.calls), "names": ["a"]}}
        if self.average is not None:
            more["average"] = self.average
        return {**super().state_dict(), **more}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]
        self.average = state_dict.get("average")
        self.seen.append(state_dict["seen"])


def same_states(a: Any, b: Any) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return repr(left["state"]) == repr(right["state"]) and left["param_groups"] == right["param_groups"]


@table("before", [0, 1])
def test_entries_that_an_optimizer_adds_to_its_state_dict_come_back(before: int) -> None:
    model, target = net(), net(1)
    optimizer, other = Counting(model.parameters()), Counting(target.parameters())
    train(model, optimizer, 3)
    train(target, other, before)
    checkpoint = save({"m": model, "o": optimizer})
    assert checkpoint.shared["o", "more/calls"] == 3
    load({"m": target, "o": other}, checkpoint)
    assert other.calls == 3
    assert torch.equal(other.average, torch.full((3,), 3.0))  # type: ignore[arg-type]
    ((seen),) = other.seen
    assert seen["names"] == ["a"]
    assert torch.equal(seen["one"], torch.arange(3))
    assert same_states(other, optimizer)
    train(model, optimizer)
    train(target, other)
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)


def test_entries_are_missing_where_a_plain_optimizer_was_saved() -> None:
    model = net()
    checkpoint = save({"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)})
    want = wanted({"m": model, "o": Counting(model.parameters())}, checkpoint.catalog(), 0, 1)
    assert [fqn for _, fqn, _ in want.missing] == ["more/calls", "more/seen"]
    other = Counting(model.parameters())
    other.calls = 7
    fill(wanted({"m": model, "o": other}, checkpoint.catalog(), 0, 1), checkpoint)
    assert other.calls == 7, "an entry that is not there stays as it is"


def test_an_entry_that_there_was_not_yet_is_not_there_after_a_load() -> None:
    model = net()
    checkpoint = save({"m": model, "o": Counting(model.parameters())})
    other = Counting(model.parameters())
    train(model, other)
    want = load({"m": model, "o": other}, checkpoint)
    assert [fqn for _, fqn, _ in want.notes] == ["more/average"]
    assert (other.calls, other.average) == (0, None)


def averaged(steps: int, seed: int, checkpoint: Checkpoint | None = None) -> Any:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = net(seed)
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer: Any = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averager
    )
    train(model, optimizer, steps)
    rank, size = dist.get_rank(), dist.get_world_size()
    if checkpoint is None:
        return portable(collect({"m": model, "o": optimizer}, rank, size))
    load({"m": model, "o": optimizer}, checkpoint, rank, size)
    assert optimizer.param_groups is optimizer.optim.param_groups, "a scheduler reaches the stepped groups"
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    return averager.step, momenta


def test_post_local_sgd_keeps_the_step_of_its_averager() -> None:
    checkpoint = assemble(run(2, averaged, 3, 0))
    for step, momenta in run(2, averaged, 0, 1, checkpoint):
        assert step == 3
        for name, momentum in zip(dict(net().named_parameters()), momenta, strict=True):
            assert torch.equal(momentum, checkpoint.tensors["o", f"state/{name}/momentum_buffer"])
    plain = torch.optim.SGD(net().named_parameters(), lr=0.1, momentum=0.9)
    want = wanted({"o": plain}, checkpoint.catalog(), 0, 1)
    assert want.mismatched == want.missing == (), "the optimizer inside is the same"


def test_hooks_run_as_in_torch_s_own_save_and_load() -> None:
    model, target = net(), net(1)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW(target.parameters())
    train(model, optimizer)
    calls: list[Any] = []
    optimizer.register_state_dict_pre_hook(lambda one: one.param_groups[0].update(lr=0.125))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": "hello"})
    other.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["note"]))
    other.register_load_state_dict_post_hook(
        lambda one: calls.append([state["step"].item() for state in one.state.values()])
    )
    checkpoint = save({"m": model, "o": optimizer})
    assert checkpoint.shared["o", "more/note"] == "hello"
    want = wanted({"m": target, "o": other}, checkpoint.catalog(), 0, 1)
    assert want.mismatched == want.missing == ()
    assert calls == []
    fill(want, checkpoint)
    assert calls == ["hello", [2.0] * 6]
    assert other.param_groups[0]["lr"] == 0.125
    assert same_states(other, optimizer)


def test_a_load_that_takes_nothing_of_an_optimizer_runs_none_of_its_hooks() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = save({"m": model, "o": optimizer})
    optimizer.register_load_state_dict_post_hook(lambda _: pytest.fail("it ran"))
    catalog = replace(checkpoint.catalog(), terms=Terms(only=("m/*",)))
    fill(wanted({"m": model, "o": optimizer}, catalog, 0, 1), checkpoint)


class Renewed(torch.optim.SGD):
    """An optimizer that makes something anew whenever its state was set."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.renewed = [group["lr"] for group in self.param_groups]


def test_an_own_setstate_runs_after_a_load() -> None:
    model = net()
    optimizer, other = Renewed(model.parameters(), lr=0.5), Renewed(model.parameters(), lr=0.25)
    load({"m": model, "o": other}, save({"m": model, "o": optimizer}))
    assert other.renewed == [0.5]


def halve(_: Any, state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] /= 2


def clone(_: Any, state: dict[str, Any]) -> None:
    state["state"] = {n: {k: v.clone() for k, v in each.items()} for n, each in state["state"].items()}


def forget(_: Any, state: dict[str, Any]) -> None:
    state["state"] = {}


def nothing(_: Any, state: dict[str, Any]) -> list[Any]:
    return [state]


@table(("hook", "lr", "num_states"), [(halve, 0.25, 6), (clone, 0.5, 6), (forget, 0.5, 0)])
def test_the_result_of_the_state_dict_is_saved_with_the_changes_of_hooks(
    hook: Any, lr: float, num_states: int
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer)
    optimizer.register_state_dict_post_hook(hook)
    other = torch.optim.AdamW(model.parameters())
    load({"m": model, "o": other}, save({"m": model, "o": optimizer}))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (other.param_groups[0]["lr"], len(other.state)) == (lr, num_states)
    for key, states in other.state.items():
        assert torch.equal(states["exp_avg"], optimizer.state[key]["exp_avg"])


def test_a_state_dict_that_no_load_state_dict_takes_is_refused_by_name() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_state_dict_post_hook(nothing)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"o \(AdamW, with the hook nothing\) is a list, and not the dict"):
        save({"m": model, "o": optimizer})


@table("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8, torch.bool])
@table("restores", [False, True])
def test_a_load_with_hooks_keeps_states_that_torch_s_own_would_convert(
    dtype: torch.dtype, *, restores: bool
) -> None:
    model = net().bfloat16()
    optimizer, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    for parameter in model.parameters():
        values = torch.rand(parameter.shape).mul(3).to(dtype)
        inside = {"scale": values.clone()}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": values, "inside": inside}

    def restore(one: Any) -> None:
        for states in one.state.values():
            states["exp_avg"] = states["exp_avg"].to(dtype)  # too late: it has been rounded

    other.register_load_state_dict_post_hook(restore if restores else lambda _: None)
    load({"m": model, "o": other}, save({"m": model, "o": optimizer}))
    for key, states in optimizer.state.items():
        for found in (other.state[key]["exp_avg"], other.state[key]["inside"]["scale"]):
            assert found.dtype == dtype
            assert torch.equal(found, states["exp_avg"])


class Keyed(torch.optim.SGD):
    """An optimizer that keeps something under other keys than parameters."""

    def __init__(self, parameters: Any, keys: tuple[Any, ...] = ()) -> None:
        super().__init__(parameters, lr=0.1)
        for key in keys:
            self.state[key] = {"mean": torch.full((2,), 3.0), "n": 5}


KEYS: tuple[Any, ...] = (7, "text", (1, "two", 0.5), 0.9, True, None, "~4", "0.9", "", -1)


def test_states_under_plain_keys_of_any_kind_come_back() -> None:
    model = net()
    other = Keyed(model.parameters())
    load({"m": model, "o": other}, save({"m": model, "o": Keyed(model.parameters(), KEYS)}))
    states: dict[Any, Any] = dict(other.state)
    assert [(type(key), key) for key in sorted(states, key=repr)] == [
        (type(key), key) for key in sorted(KEYS, key=repr)
    ]
    found = states[7]
    assert (found["n"], found["mean"].tolist()) == (5, [3.0, 3.0])


@table("key", KEYS)
def test_a_state_of_a_parameter_has_a_name_of_any_kind_and_a_dict_in_it_has_such_keys(key: Any) -> None:
    model, target = net(), net(1)
    one, other = (torch.optim.SGD(of.parameters(), lr=0.1) for of in (model, target))
    parameter = next(model.parameters())
    one.state[parameter] = {key: torch.ones(4, 3), "buffers": {key: torch.zeros(2), (2, key): {key: 5}}}
    load({"m": target, "o": other}, save({"m": model, "o": one}))
    found = of_first(other, target)
    assert torch.equal(found[key], torch.ones(4, 3))
    assert torch.equal(found["buffers"][key], torch.zeros(2))
    assert found["buffers"][2, key] == {key: 5}


def test_a_name_that_is_not_a_plain_value_is_refused() -> None:
    model = net()
    with pytest.raises(StateError, match="keys of a state are strings and integers"):
        save({"m": model, "o": Keyed(model.parameters(), (frozenset("a"),))})


@table("key", [float("inf"), float("nan"), (1.0, float("-inf")), ("a", torch.float32), ("a", frozenset("b"))])
def test_a_key_whose_text_no_load_can_read_is_refused_before_the_save(key: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[next(model.parameters())] = {key: torch.ones(4, 3)}
    with pytest.raises(StateError, match="whose text no load turns back"):
        save({"m": model, "o": optimizer})


@table("value", [{"~pairs": [[1, 2]]}, {"~pairs": [1]}, {"~class": ["a", "B"], "attributes": {}}])
def test_a_dict_with_the_keys_of_the_saved_forms_comes_back_as_it_is(value: Any) -> None:
    model, target = net(), net(1)
    one, other = (torch.optim.SGD(of.parameters(), lr=0.1) for of in (model, target))
    one.state[next(model.parameters())] = {"held": value, "inside": [{"deep": value}]}
    load({"m": target, "o": other}, save({"m": model, "o": one}))
    assert of_first(other, target) == {"held": value, "inside": [{"deep": value}]}


@table(
    "value",
    [
        {"~pairs": [1]},
        {"~pairs": [[[1], 2]]},
        {"~pairs": 5},
        {"~class": [__name__, "Counter"], "attributes": [1]},
        {"~class": [__name__, "Counter"], "attributes": {1: 2}},
        {"~class": ["os", "system"], "attributes": {}},
    ],
)
def test_a_saved_form_that_no_save_writes_is_refused_by_name(value: Any) -> None:
    with pytest.raises(StateError, match="its value has"):
        own_state.unpacked(value, frozenset({__name__.partition(".")[0]}))


class Counter:
    """A plain object in a state."""


class Own(torch.optim.AdamW):
    """An optimizer that derives from another, as users make them."""


class Stranger(torch.optim.Optimizer):
    """Another optimizer of the states and options of none."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})


KINDS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "decoupled": lambda p: torch.optim.Adam(p, decoupled_weight_decay=True),
    "own": lambda p: Own(p),
    "stranger": lambda p: Stranger(p),
}
SAME = [{"adamw", "decoupled"}, {"adamw", "own"}, {"decoupled", "own"}, *({kind} for kind in KINDS)]


@table("source", KINDS)
def test_only_the_same_optimizer_takes_what_was_saved(source: str) -> None:
    for target in KINDS:
        for before in (0, 1):
            takes_what_was_saved(source, target, before)


def takes_what_was_saved(source: str, target: str, before: int) -> None:
    model = net()
    one, other = KINDS[source](model.parameters()), KINDS[target](model.parameters())
    for optimizer, steps in ((one, 1), (other, before)):
        if not isinstance(optimizer, Stranger):
            train(model, optimizer, steps)
    kept = repr(other.state_dict())
    checkpoint = save({"m": model, "o": one})
    want = wanted({"m": model, "o": other}, checkpoint.catalog(), 0, 1)
    fits = {source, target} in SAME
    if fits:
        assert want.mismatched == want.missing == ()
    names = {fqn for (item, fqn) in (*checkpoint.tensors, *checkpoint.shared) if item == "o"}
    assert {fqn for item, fqn, _ in want.mismatched} == (set() if fits else names)
    fill(want, checkpoint)
    if not fits:
        assert repr(other.state_dict()) == kept, "a refused state stays as it is"
        why = want.mismatched[0][2]
        for optimizer, does in ((one, "saved it"), (other, "steps it")):
            assert f"{own_state.kind(optimizer)[0]} {does}" in why
        assert "strict=['!o/*']" in why


def test_checkpoints_that_do_not_tell_the_optimizer_load_as_before() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    checkpoint = save({"m": model, "o": optimizer})
    for (item, fqn), options in checkpoint.shared.items():
        if item == "o":
            assert options["~optimizer"] == ["torch.optim.AdamW"]
            checkpoint.shared[item, fqn] = {k: v for k, v in options.items() if k != "~optimizer"}
    other = torch.optim.Adam(model.parameters())
    load({"m": model, "o": other}, checkpoint)
    assert of_first(other, model)["step"] == 2


def test_states_alone_can_be_given_to_another_optimizer() -> None:
    model = net()
    one, other = torch.optim.AdamW(model.parameters()), torch.optim.Adam(model.parameters())
    train(model, one)
    checkpoint = save({"m": model, "o": one})
    catalog = replace(checkpoint.catalog(), terms=Terms(only=("o/state/*",)))
    want = wanted({"m": model, "o": other}, catalog, 0, 1)
    assert want.mismatched == want.missing == ()
    fill(want, checkpoint)
    assert of_first(other, model)["step"] == 2


def test_optimizers_inside_a_framework_s_are_called_as_torch_calls_them() -> None:
    class FusedAdam(torch.optim.Optimizer):
        def __init__(self, *, decoupled: bool) -> None:
            super().__init__([torch.ones(1)], {"lr": 0.1})
            self.adam_w_mode = int(decoupled)

    for decoupled, name in ((True, "AdamW"), (False, "Adam")):
        fused = FusedAdam(decoupled=decoupled)
        assert own_state.kind(fused, inside=True) == (f"torch.optim.{name}",)
        assert own_state.kind(fused) == ("FusedAdam",), "its states are not in torch's form"


@table("named", ["AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"])
def test_wrappers_that_hand_everything_on_are_the_optimizer_inside(named: str) -> None:
    where = {"AcceleratedOptimizer": "optimizer"}.get(named, "_optimizer")
    model = net()
    inside = torch.optim.AdamW(model.parameters())
    train(model, inside)

    def gather(self: Any) -> None:
        raise AssertionError("it would gather")

    kind: Any = type(named, (torch.optim.Optimizer,), {"__module__": "wrappers", "state_dict": gather})
    wrapper = kind.__new__(kind)
    wrapper.__dict__.update({where: inside, "param_groups": inside.param_groups, "state": inside.state})
    checkpoint = save({"m": model, "o": wrapper})
    assert checkpoint.tensors.keys() == save({"m": model, "o": inside}).tensors.keys()
    assert checkpoint.shared["o", "param_groups/0.bias"]["~optimizer"] == ["torch.optim.AdamW"]


def test_a_state_called_master_comes_back() -> None:
    model = net()

    def make(fill: float) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            master = torch.full(parameter.shape, fill, dtype=torch.float64)
            optimizer.state[parameter] = {"master": master, "master/2": torch.full((2,), fill)}
        return optimizer

    kept = [parameter.clone() for parameter in model.parameters()]
    for target in (torch.optim.SGD(model.parameters()), make(1.0)):
        load({"m": model, "o": target}, save({"m": model, "o": make(3.0)}))
        for parameter, before in zip(model.parameters(), kept, strict=True):
            assert torch.equal(parameter, before)
            assert target.state[parameter]["master"].dtype == torch.float64
            assert bool((target.state[parameter]["master"] == 3.0).all())
            assert target.state[parameter]["master/2"].tolist() == [3.0, 3.0]


class Around(torch.optim.Optimizer):
    """An optimizer around another, with whose groups it steps, and whose states it may forget."""

    def __init__(self, inside: Any) -> None:
        super().__init__(inside.param_groups, inside.defaults)
        self.inside = inside
        self.param_groups = inside.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


class Saving(Around):
    """One that saves them."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inside": self.inside.state_dict()["state"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        groups = self.inside.state_dict()["param_groups"]
        self.inside.load_state_dict({"state": state_dict["inside"], "param_groups": groups})


def test_a_wrapper_that_leaves_out_states_is_refused() -> None:
    model, target = net(), net(1)

    def inside(of: Any) -> Any:
        return torch.optim.SGD(of.parameters(), lr=0.1, momentum=0.9)

    for kind in (Around, Saving):
        optimizer = kind(inside(model))
        save({"m": model, "o": optimizer})  # as long as there is nothing to forget
        train(model, optimizer)
        if kind is Around:
            with pytest.raises(StateError, match="o is a Around around a SGD with states of its own"):
                save({"m": model, "o": optimizer})
    other = Saving(inside(target))
    load({"m": target, "o": other}, save({"m": model, "o": optimizer}))
    train(model, optimizer)
    train(target, other)
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)


PLAIN: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "counting": lambda p: Counting(p),
    "own": lambda p: Own(p),
    "saving": lambda p: Saving(torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}


def register(optimizer: Any, hook: str, ran: list[str]) -> None:
    """Register a hook that writes down that it ran, and adds to a state dict where it can."""

    def hooked(one: Any, state: Any = None) -> Any:
        assert one is optimizer
        ran.append(hook)
        return {**state, f"by {hook}": len(optimizer.param_groups)} if hook == "state_dict_post" else None

    getattr(optimizer, f"register_{hook}_hook")(hooked)


HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


@settings(max_examples=examples(40))
@given(
    st.sampled_from(sorted(PLAIN)),
    st.lists(st.sampled_from(HOOKS), max_size=3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_any_optimizer_with_any_hooks_goes_on_as_if_it_had_never_stopped(
    kind: str, hooks: list[str], steps: int, before: int, split: bool
) -> None:
    ran: list[str] = []

    def make(seed: int) -> tuple[Any, Any]:
        model = net(seed)
        parameters: Any = list(model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.25}]
        optimizer = PLAIN[kind](groups if split else parameters)
        for hook in hooks:
            register(optimizer, hook, ran)
        return model, optimizer

    (model, optimizer), (target, other) = make(0), make(1)
    train(model, optimizer, steps)
    train(target, other, before)
    checkpoint = save({"m": model, "o": optimizer})
    load({"m": target, "o": other}, checkpoint)
    assert set(ran) == set(hooks)
    train(model, optimizer)
    train(target, other)
    for a, b in zip(model.parameters(), target.parameters(), strict=True):
        assert torch.equal(a, b)
