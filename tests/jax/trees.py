"""Checks of pytrees in one process with four devices: names, containers, nodes, replacements."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import reknit
from reknit.errors import FormatError, MismatchError, ReknitError, StateError
from reknit.frameworks.neutral import from_neutral
from reknit.types.shard import Tagged
from tests.jax import training


class Pair(NamedTuple):
    left: Any
    right: Any


@flax.struct.dataclass
class Ema:
    weights: Any
    decay: float = flax.struct.field(pytree_node=False, default=0.5)


@jax.tree_util.register_dataclass
@dataclass
class Own:
    a: Any
    b: Any


class Opaque:
    """A node whose children have numbers, but no names, in JAX."""

    def __init__(self, *children: Any) -> None:
        self.children = children


jax.tree_util.register_pytree_node(
    Opaque, lambda node: (node.children, None), lambda _, inner: Opaque(*inner)
)


MASKED = optax.chain(optax.clip(1.0), optax.masked(optax.adamw(1e-3), {"w": True, "b": False}))
ADAM = optax.adam(1e-3)


def raises(kind: type[ReknitError], text: str, call: Any) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


def every_kind(times: float) -> dict[str, Any]:
    """Return a state with every kind of container, and values that `times` multiplies."""
    w = jnp.arange(6.0).reshape(2, 3) * times
    params = {"w": w, "b": jnp.ones(3, jnp.bfloat16) * times}
    return {
        "params": params,
        "opt": MASKED.init(params),
        "sgd": optax.sgd(0.1).init(params),
        "train": TrainState.create(apply_fn=None, params=freeze(params), tx=ADAM),
        "pair": Pair([w + 1, None, ()], {"x": (w + 2, "text", 3)}),
        "nodes": (Ema(w + 3), Own(w + 4, Opaque(w + 5, int(times)))),
        "ordered": OrderedDict(z=w + 6, a=Pair(int(times), "plain")),
        "host": {"array": np.arange(4) * times, "number": np.float32(times), "int": int(times)},
        "~odd/name": {"layers.0.w": w + 7, "12": w + 8, 12: w + 9, "": w + 10},
        "empty": {"dict": {}, "list": [], "state": optax.EmptyState(), "none": None},
    }


def check_every_kind_of_container_comes_back_with_its_type_and_its_values(folder: str) -> None:
    state, target = every_kind(1.0), every_kind(2.0)
    same = [target["params"], target["pair"].left, target["ordered"]]
    structure = _structure(state)
    reknit.save(folder, state)
    reknit.load(folder, target)
    assert _structure(target) == structure
    _assert_equal(target, state)
    assert target["params"] is same[0]
    assert target["pair"].left is same[1]
    assert target["ordered"] is same[2]
    assert isinstance(target["nodes"][0], Ema)
    assert target["nodes"][0].decay == 0.5


def check_names_are_keys_attributes_and_numbers(folder: str) -> None:
    reknit.save(folder, every_kind(1.0))
    with reknit.open(folder) as checkpoint:
        names = {f"{item}/{fqn}" for item, specs in checkpoint.tensors.items() for fqn in specs}
    assert {
        "params/w",
        "opt/1/inner_state/0/mu/w",
        "opt/1/inner_state/0/count",
        "train/opt_state/0/nu/b",
        "train/params/b",
        "pair/left/0",
        "pair/right/x/0",
        "nodes/0/weights",
        "nodes/1/a",
        "nodes/1/b/0",
        "~odd/name/layers.0.w",
        "~odd/name/~212",
        "~odd/name/12",
        "~odd/name/~3",
    } <= names


def check_one_container_at_two_places_gets_the_values_of_each(folder: str) -> None:
    reknit.save(folder, {"a": {"w": jnp.ones(2), "n": 1}, "b": {"w": jnp.zeros(2), "n": 2}, "c": [{"n": 3}]})
    shared = {"w": jnp.ones(2) * 7, "n": 0}
    target: dict[str, Any] = {"a": shared, "b": shared, "c": [{"n": 0}]}
    reknit.load(folder, target)
    assert (target["a"]["n"], target["b"]["n"], target["c"]) == (1, 2, [{"n": 3}])
    assert target["a"]["w"].tolist() == [1, 1]
    assert target["b"]["w"].tolist() == [0, 0]


def check_one_array_at_two_places_is_stored_once_and_each_place_gets_its_own(folder: str) -> None:
    w = jnp.arange(1 << 16, dtype=jnp.float32)
    reknit.save(f"{folder}/tied", {"s": {"params": w, "ema": w}})
    reknit.save(f"{folder}/apart", {"s": {"params": w, "ema": w + 1}})
    for name, want in (("tied", 0), ("apart", 1)):
        target = {"s": {"params": w, "ema": w}}
        reknit.load(f"{folder}/{name}", target)
        assert np.array_equal(target["s"]["params"], w)
        assert np.array_equal(target["s"]["ema"], w + want)
        target["s"] = {"params": w + 9, "ema": w + 8}
        reknit.load(f"{folder}/{name}", target)
        assert np.array_equal(target["s"]["ema"], w + want)
    with reknit.open(f"{folder}/tied") as checkpoint:
        assert checkpoint.tensors["s"].keys() == {"params", "ema"}


def check_nothing_changes_when_a_load_fails(folder: str) -> None:
    state = every_kind(1.0)
    reknit.save(folder, state)
    target = every_kind(2.0)
    target["params"]["w"] = jnp.zeros((3, 2))
    before = {item: [id(leaf) for leaf in _leaves(value)] for item, value in target.items()}
    raises(MismatchError, "params/w", lambda: reknit.load(folder, target))
    assert {item: [id(leaf) for leaf in _leaves(value)] for item, value in target.items()} == before
    report = reknit.load(folder, target, strict=False)
    assert list(report.mismatched) == ["params/w"]
    assert target["params"]["w"].tolist() == np.zeros((3, 2)).tolist()
    _assert_equal(target["train"], state["train"])


def check_missing_and_unwanted_names_are_reported(folder: str) -> None:
    reknit.save(folder, {"p": {"a": jnp.ones(2), "b": jnp.ones(2)}})
    target = {"p": {"a": jnp.zeros(2), "c": jnp.zeros(2)}}
    raises(MismatchError, "missing: p/c", lambda: reknit.load(folder, target))
    raises(MismatchError, "unexpected: p/b", lambda: reknit.load(folder, target))
    reknit.load(folder, target, options=reknit.LoadOptions(only=("p/a",)))
    assert target["p"]["a"].tolist() == [1, 1]
    assert target["p"]["c"].tolist() == [0, 0]


def check_what_cannot_be_replaced_is_refused_with_its_place(folder: str) -> None:
    reknit.save(folder, {"p": {"a": jnp.ones(2)}})
    frozen = {"p": MappingProxyType({"a": jnp.ones(2)})}
    raises(StateError, "p/a is a", lambda: reknit.load(folder, frozen))
    raises(StateError, "p/a is a", lambda: reknit.load(folder, MappingProxyType(frozen)))


def check_modules_of_nnx_are_filled_where_they_are(folder: str) -> None:
    class Net(nnx.Module):
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.tied = self.layers[0].kernel

    saved, target = Net(0), Net(1)
    kernel = target.layers[0].kernel
    reknit.save(folder, {"net": saved})
    with reknit.open(folder) as checkpoint:
        assert "layers/0/kernel" in checkpoint.tensors["net"]
    state = {"net": target}
    reknit.load(folder, state)
    assert state["net"] is target
    assert target.layers[0].kernel is target.tied is kernel
    _assert_equal(nnx.state(target), nnx.state(saved))
    again = {"net": nnx.state(Net(2))}
    reknit.save(f"{folder}/state", {"net": nnx.state(saved)})
    reknit.load(f"{folder}/state", again)
    _assert_equal(again["net"], nnx.state(saved))
    x = jnp.ones((1, 4))
    assert np.array_equal(target.layers[1](target.layers[0](x)), saved.layers[1](saved.layers[0](x)))


def check_tied_variables_of_nnx_do_not_take_one_of_two_values(folder: str) -> None:
    class Net(nnx.Module):
        def __init__(self, tie: bool) -> None:
            self.a = nnx.Param(jnp.ones(3))
            self.b = self.a if tie else nnx.Param(jnp.zeros(3))

    reknit.save(folder, {"net": Net(tie=False)})
    target = Net(tie=True)
    target.a[...] = jnp.full(3, 5.0)
    with pytest.raises(MismatchError, match="net/b: it differs from net/a in the checkpoint"):
        reknit.load(folder, {"net": target})
    assert target.a[...].tolist() == [5, 5, 5]
    reknit.load(folder, {"net": target}, strict=["!net/b"])
    assert target.a is target.b
    assert target.a[...].tolist() == [1, 1, 1]


def check_partitioned_parameters_of_linen_have_the_names_of_plain_ones(folder: str) -> None:
    def init(names: bool) -> Any:
        kernel = nn.initializers.ones_init()
        kernel = nn.with_partitioning(kernel, ("dp", None)) if names else kernel
        return nn.Dense(4, kernel_init=kernel).init(jax.random.key(0), jnp.ones((1, 4)))

    boxed, plain = init(names=True), init(names=False)
    reknit.save(folder, {"v": boxed})
    target = {"v": jax.tree.map(lambda x: x * 0, plain)}
    reknit.load(folder, target)
    _assert_equal(target["v"], plain)
    again = {"v": jax.tree.map(lambda x: x * 0, boxed)}
    reknit.load(folder, again)
    assert again["v"]["params"]["kernel"].names == ("dp", None)
    _assert_equal(again["v"], boxed)


def check_an_object_with_a_state_dict_may_hold_arrays(folder: str) -> None:
    on = training.mesh(1, 4)

    class Trainer:
        def __init__(self, times: float) -> None:
            self.held: dict[str, Any] = {
                "w": jax.device_put(jnp.arange(8.0) * times, NamedSharding(on, P("tp"))),
                "key": jax.random.key(int(times)),
                "in": [jnp.ones(2, jnp.bfloat16) * times, 3],
            }

        def state_dict(self) -> dict[str, Any]:
            return self.held

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.held = state

    saved, target = Trainer(1), Trainer(2)
    reknit.save(folder, {"trainer": saved})
    reknit.load(folder, {"trainer": target})
    _assert_equal(target.held, saved.held)
    assert target.held["w"].sharding == saved.held["w"].sharding
    some = Trainer(2)
    reknit.load(folder, {"trainer": some}, options=reknit.LoadOptions(only=("trainer/w",)))
    assert np.array_equal(some.held["w"], saved.held["w"])
    assert some.held["in"][0].tolist() == [2, 2]


def check_values_of_a_rank_may_hold_arrays_and_keys(folder: str) -> None:
    def own(times: int) -> reknit.PerRank:
        return reknit.PerRank(
            {
                "key": jax.random.key(times),
                "in": [jnp.ones(3, jnp.bfloat16) * times],
                "weak": jnp.asarray(1.5),
            }
        )

    saved, target = own(1), own(2)
    reknit.save(folder, {"mine": saved})
    reknit.load(folder, {"mine": target})
    _assert_equal(target.value, saved.value)
    raises(
        StateError, "int4", lambda: reknit.save(f"{folder}-2", {"a": reknit.PerRank([jnp.ones(2, "int4")])})
    )


def check_a_damaged_array_inside_a_value_is_reported(folder: str) -> None:
    good = {"dtype": "float32", "shape": [2], "data": bytes(8), "keys": None, "weak": False}
    assert from_neutral(Tagged("jax.array", good)).tolist() == [0, 0]
    for damage in ({"data": b""}, {"shape": [-1]}, {"dtype": "x"}, {"keys": "none"}, {"keys": "rbg"}):
        raises(
            FormatError, "is not a jax.array", lambda d=damage: from_neutral(Tagged("jax.array", good | d))
        )
    raises(FormatError, "does not support the type", lambda: from_neutral(Tagged("jax.other", good)))


def check_children_without_keys_of_their_own_are_refused(folder: str) -> None:
    class Twice:
        pass

    one = jax.tree_util.DictKey("x")
    jax.tree_util.register_pytree_with_keys(
        Twice, lambda _: (((one, jnp.ones(1)), (one, jnp.ones(1))), None), lambda *_: Twice()
    )
    raises(StateError, "do not all have keys of their own", lambda: reknit.save(folder, {"a": Twice()}))


def check_a_state_that_contains_itself_is_refused(folder: str) -> None:
    around: dict[str, Any] = {"w": jnp.ones(2)}
    around |= {"a": around, "b": around}
    raises(StateError, "contains itself", lambda: reknit.save(folder, {"s": around}))


def _leaves(value: Any) -> list[Any]:
    # JAX cannot order keys of several types.
    return jax.tree.leaves(list(value.values()) if isinstance(value, dict) else value)


def _structure(state: dict[str, Any]) -> Any:
    return {item: jax.tree.structure(value) for item, value in state.items() if item != "~odd/name"}


def _assert_equal(found: Any, want: Any) -> None:
    if isinstance(want, dict):  # JAX cannot order keys of several types
        assert found.keys() == want.keys()
        for key in want:
            _assert_equal(found[key], want[key])
        return
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        if isinstance(b, jax.Array):
            assert a.dtype == b.dtype
            assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
            assert np.array_equal(_plain(a), _plain(b))
        else:
            assert type(a) is type(b)
            assert np.array_equal(a, b)


def _plain(array: Any) -> Any:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)
