"""Checks in one process of calls that JAX cannot serve: inside of its transformations, and on references."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import reknit
from reknit.errors import StateError
from reknit.integrations.jax import filling
from tests.jax.trees import raises

OUTSIDE = "call save and load outside of functions that JAX transforms"


def check_calls_inside_of_a_transformation_are_refused_and_change_nothing(folder: str) -> None:
    key, ones = jax.random.key(3), jnp.ones(3)
    reknit.save(folder, {"a": {"key": key, "w": ones}, "own": reknit.PerRank(key)})
    zeros = jnp.zeros(3)
    state: dict[str, Any] = {"a": {"key": jax.random.key(0), "w": zeros}, "own": reknit.PerRank(key)}
    before = dict(state["a"])

    def load_concrete(x: Any) -> Any:
        reknit.load(folder, state, items=["a"])
        return x

    def load_own(x: Any) -> Any:
        reknit.load(folder, state, items=["own"])
        return x

    def load_traced(x: Any) -> Any:
        reknit.load(folder, {"a": {"key": key, "w": x}}, items=["a"])
        return x

    def save(x: Any) -> Any:
        reknit.save(f"{folder}-again", {"w": x})
        return x

    def save_concrete(x: Any) -> Any:
        reknit.save(f"{folder}-again", state)
        return x

    def save_own(x: Any) -> Any:
        reknit.save(f"{folder}-again", {"w": reknit.PerRank(x)})
        return x

    def total(x: Any) -> Any:
        return load_traced(x).sum()

    for call in (load_concrete, load_own, load_traced, save, save_concrete, save_own):
        raises(StateError, OUTSIDE, partial(jax.jit(call), zeros))
    raises(StateError, OUTSIDE, lambda: jax.grad(total)(zeros))
    raises(StateError, OUTSIDE, lambda: jax.vmap(load_traced)(jnp.zeros((2, 3))))
    assert all(state["a"][name] is array for name, array in before.items())
    with jax.ensure_compile_time_eval():
        reknit.load(folder, state)
    assert np.array_equal(state["a"]["w"], ones)


def check_a_load_that_fails_leaves_all_arrays_as_they_were(folder: str) -> None:
    values = {name: jnp.full(4, number + 1.0) for number, name in enumerate("abc")}
    reknit.save(folder, {"w": {**values, "key": jax.random.key(1)}})
    target = {"w": {**dict.fromkeys("abc", jnp.zeros(4)), "key": jax.random.key(0)}}
    before = dict(target["w"])

    def fail(*_: Any) -> Any:
        raise RuntimeError("no keys today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "keys", fail)
        with pytest.raises(Exception, match="no keys today"):
            reknit.load(folder, target)
    assert all(target["w"][name] is array for name, array in before.items())
    reknit.load(folder, target)
    assert all(np.array_equal(target["w"][name], array) for name, array in values.items())


def check_references_are_refused_with_the_form_that_is_saved(folder: str) -> None:
    class Net(nnx.Module):
        def __init__(self, times: float, **how: bool) -> None:
            self.w = nnx.Param(jnp.arange(3.0) * times, **how)

    number = 0
    for how in ({"ref": True}, {"hijax": True}, {"hijax": True, "ref": True}):
        try:
            net, other = Net(2.0, **how), Net(3.0, **how)
        except TypeError:  # this version of Flax has no such variables
            continue
        number += 1
        path = f"{folder}/{number}"
        for state in ({"net": net}, {"net": nnx.state(net)}):
            raises(StateError, "nnx.to_pure_dict(nnx.state(model))", partial(reknit.save, path, state))
        reknit.save(path, {"net": nnx.to_pure_dict(nnx.state(net))})
        raises(StateError, "nnx.update(model, state)", partial(reknit.load, path, {"net": other}))
        target = {"net": nnx.to_pure_dict(nnx.state(other))}
        reknit.load(path, target)
        nnx.update(other, target["net"])
        assert other.w[...].tolist() == [0.0, 2.0, 4.0]
    if hasattr(jax, "new_ref"):
        ref = jax.new_ref(jnp.ones(3))
        raises(StateError, "its array, ref[...]", lambda: reknit.save(folder, {"a": [ref]}))
        reknit.save(folder, {"a": [ref[...]]})
        ref[...] = jnp.zeros(3)
        raises(StateError, "its array, ref[...]", lambda: reknit.load(folder, {"a": [ref]}))
        arrays = {"a": [ref[...]]}
        reknit.load(folder, arrays)
        ref[...] = arrays["a"][0]
        assert ref[...].tolist() == [1.0] * 3
