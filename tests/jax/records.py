"""Checks in one process of the record of arrays: keys, weak types and memory, in every way to save."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import reknit
from reknit.errors import MismatchError
from reknit.frameworks.numbers import same_value
from reknit.integrations.jax.filling import record_of
from tests.jax.trees import raises


class Keeper:
    """An object that keeps the state of its state dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _on_host() -> Any:
    device = jax.devices()[0]
    return jax.device_put(jnp.arange(4.0), SingleDeviceSharding(device, memory_kind="unpinned_host"))


KINDS = {
    "key": lambda: jax.random.key(3),
    "rbg key": lambda: jax.random.key(3, impl="rbg"),
    "keys": lambda: jax.random.split(jax.random.key(5, impl="unsafe_rbg"), 3),
    "old key": lambda: jax.random.PRNGKey(3),
    "weak": lambda: jax.jit(lambda: 2.0)(),
    "strong": lambda: jnp.float32(2),
    "on host": _on_host,
}
WAYS = {
    "entry": (lambda value: {"x": value}, lambda state: state["x"]),
    "object": (lambda value: Keeper({"x": value}), lambda state: state.state["x"]),
    "deep in an object": (lambda value: Keeper([{"x": (value,)}]), lambda state: state.state[0]["x"][0]),
    "own": (lambda value: reknit.PerRank(value), lambda state: state.value),
    "deep in own": (lambda value: reknit.PerRank({"x": [value]}), lambda state: state.value["x"][0]),
    "own object": (lambda value: reknit.PerRank(Keeper({"x": value})), lambda state: state.value.state["x"]),
}


def _bytes(array: Any) -> bytes:
    return np.asarray(jax.random.key_data(array) if "keys" in record_of(array) else array).tobytes()


def check_arrays_come_back_as_they_were_on_every_way(folder: str) -> None:
    for way, (make, find) in WAYS.items():
        for kind, value in KINDS.items():
            reknit.save(folder, {"item": make(value())}, overwrite=True)
            for present in (value(), None) if way != "entry" else (value(),):
                target = {"item": make(present)}
                reknit.load(folder, target)
                found, saved = find(target["item"]), value()
                assert found.dtype == saved.dtype, (way, kind)
                assert record_of(found) == record_of(saved), (way, kind)
                assert _bytes(found) == _bytes(saved), (way, kind)


def check_keys_do_not_become_keys_of_another_generator_on_any_way(folder: str) -> None:
    for make, find in WAYS.values():
        saved = {"item": make(jax.random.key(3, impl="rbg")), "more": np.ones(2)}
        reknit.save(folder, saved, overwrite=True)
        target: dict[str, Any] = {"item": make(jax.random.key(0, impl="unsafe_rbg")), "more": np.zeros(2)}
        why = "keys of rbg in the checkpoint and of unsafe_rbg here"
        raises(MismatchError, why, lambda target=target: reknit.load(folder, target))
        assert target["more"].tolist() == [0, 0]
        assert reknit.load(folder, target, strict=False).mismatched
        assert target["more"].tolist() == [1, 1]
        assert _bytes(find(target["item"])) == _bytes(jax.random.key(0, impl="unsafe_rbg"))


def check_keys_of_a_part_of_an_object_do_not_become_keys_of_another_generator(folder: str) -> None:
    reknit.save(folder, {"item": Keeper({"x": jax.random.key(3, impl="rbg"), "n": 1})}, overwrite=True)
    target = Keeper({"x": jax.random.key(0, impl="unsafe_rbg"), "n": 2})
    part = reknit.LoadOptions(only=("item/x",))
    raises(MismatchError, "keys of rbg", lambda: reknit.load(folder, {"item": target}, options=part))


def check_a_value_of_a_rank_is_put_where_the_present_one_is(folder: str) -> None:
    mesh = jax.make_mesh((4,), ("x",))
    cut, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

    def state(content: float) -> Any:
        keys = jax.random.split(jax.random.key(int(content)), 4)
        values = {
            "cut": (jnp.full(8, content), cut),
            "whole": (jnp.full(3, content), whole),
            "keys": (keys, cut),
        }
        arrays = {name: jax.device_put(*value) for name, value in values.items()}
        return {"item": reknit.PerRank({**arrays, "free": jnp.full(2, content), "deep": [arrays["cut"]]})}

    reknit.save(folder, state(3))
    for target in (state(0), {"item": reknit.PerRank(None)}):
        placed = target["item"].value is not None
        reknit.load(folder, target)
        found, saved = target["item"].value, state(3)["item"].value
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(saved), strict=True):
            assert _bytes(one) == _bytes(other)
            assert not placed or (one.sharding, one.committed) == (other.sharding, other.committed)


def check_what_was_saved_without_a_record_becomes_what_the_target_has(folder: str) -> None:
    key = jax.random.key(3, impl="rbg")
    reknit.save(folder, {"item": Keeper({"x": jax.random.key_data(key)})}, overwrite=True)
    target = Keeper({"x": jax.random.key(0, impl="rbg")})
    reknit.load(folder, {"item": target})
    assert target.state["x"].dtype == key.dtype
    assert _bytes(target.state["x"]) == _bytes(key)


def check_arrays_are_the_same_if_their_type_and_bits_are(folder: str) -> None:
    alike: list[Any] = [lambda: jnp.array([float("nan"), -0.0]), lambda: [jnp.ones(()), jax.random.key(3)]]
    for make in alike:
        assert same_value(make(), make())
    for a, b in [
        (jnp.zeros(2), jnp.ones(2)),
        (jnp.zeros(2), -jnp.zeros(2)),
        (jnp.zeros(2), np.zeros(2, np.float32)),
        (jnp.asarray(1.0), jnp.float32(1.0)),
        (jax.random.key(0), jax.random.key(1)),
        (jax.random.key(0, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
    ]:
        assert not same_value(a, b)
        assert not same_value(b, a)
        assert same_value(a, a)
