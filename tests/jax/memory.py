"""Checks of kinds of memory in one process with four devices: the place of a loaded array."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import reknit
from reknit.errors import StateError
from tests.jax.trees import raises

KINDS = (None, "device", "pinned_host", "unpinned_host")
VALUES = np.arange(8, dtype=np.float32)


def check_every_target_is_loaded_into_its_kind_of_memory(folder: str) -> None:
    mesh = jax.make_mesh((4,), ("x",))
    for number, kind in enumerate(KINDS):
        saved = jax.device_put(VALUES, NamedSharding(mesh, P("x"), memory_kind=kind))
        weak = jax.device_put(jnp.asarray(2.5), NamedSharding(mesh, P(), memory_kind=kind))
        keys = jax.device_put(
            jax.random.split(jax.random.key(1), 4), NamedSharding(mesh, P("x"), memory_kind=kind)
        )
        reknit.save(f"{folder}/{number}", {"a": {"w": saved, "weak": weak, "keys": keys}})
    with jax.set_mesh(mesh):
        for saved_in, kind, abstract in product(range(len(KINDS)), KINDS, (True, False)):
            cut, whole = (NamedSharding(mesh, spec, memory_kind=kind) for spec in (P("x"), P()))
            want = {"w": cut, "weak": whole, "keys": cut}
            shapes: dict[str, Any] = {
                "w": jnp.zeros(8),
                "weak": jnp.asarray(0.0),
                "keys": jax.random.split(jax.random.key(0), 4),
            }
            target = {name: jax.device_put(shapes[name], sharding) for name, sharding in want.items()}
            if abstract:
                target = {name: _struct(array, array.sharding) for name, array in target.items()}
            state = {"a": target}
            reknit.load(f"{folder}/{saved_in}", state)
            _require_loaded(state["a"], want)
            if abstract:
                plain = AbstractMesh((4,), ("x",), axis_types=mesh.axis_types)
                for form in (mesh.abstract_mesh, plain):
                    for name, sharding in want.items():
                        on = NamedSharding(form, sharding.spec, memory_kind=kind)
                        state["a"][name] = _struct(shapes[name], on)
                    reknit.load(f"{folder}/{saved_in}", state)
                    _require_loaded(state["a"], want)


def check_kinds_of_memory_are_kept_on_one_device_and_where_a_mesh_is_empty(folder: str) -> None:
    reknit.save(folder, {"w": VALUES})
    first = jax.devices()[0]
    for kind in KINDS[1:]:
        on = SingleDeviceSharding(first, memory_kind=kind)
        targets = [jax.device_put(jnp.zeros(8), on), jax.ShapeDtypeStruct((8,), jnp.float32, sharding=on)]
        if kind != "device":
            nowhere = NamedSharding(AbstractMesh((), ()), P(), memory_kind=kind)
            targets.append(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=nowhere))
        for target in targets:
            state = {"w": target}
            reknit.load(folder, state)
            assert state["w"].sharding == on
            assert np.array_equal(state["w"], VALUES)


def check_an_array_of_unreduced_terms_is_refused(folder: str) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, unreduced={"x"}))
        terms = jax.jit(lambda x: jnp.einsum("ab->b", x, out_sharding=sharding))(
            jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("x", None)))
        )
        raises(StateError, "a/w has the sharding", lambda: reknit.save(folder, {"a": {"w": terms}}))
        reknit.save(folder, {"a": {"w": jax.reshard(terms, P())}})
        target: dict[str, Any] = {"a": {"w": _struct(terms, sharding)}}
        raises(StateError, "a/w has the sharding", lambda: reknit.load(folder, target))


def _struct(array: Any, sharding: Any) -> Any:
    weak = getattr(array, "weak_type", False)  # which keys do not have
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding, weak_type=weak)


def _require_loaded(found: dict[str, Any], want: dict[str, Any]) -> None:
    for name, sharding in want.items():
        assert found[name].sharding == sharding, name
    assert np.array_equal(found["w"], VALUES)
    assert found["weak"] == 2.5
    assert found["weak"].weak_type
    assert np.array_equal(
        jax.random.key_data(found["keys"]), jax.random.key_data(jax.random.split(jax.random.key(1), 4))
    )
