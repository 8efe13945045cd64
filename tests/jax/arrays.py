"""Checks of arrays in one process with four devices: dtypes, shardings, keys, donation, targets."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import gc
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import reknit
from reknit.errors import MismatchError, StateError
from reknit.frameworks import registry
from reknit.frameworks.walk.walk import Place, World
from reknit.integrations.jax import arrays as jax_arrays
from reknit.integrations.jax import filling, pytree
from reknit.integrations.jax.filling import Filling
from tests.jax import training
from tests.jax.trees import raises

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
REFUSED = ("int4", "uint4", "int2", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn")


def put(values: Any, *spec: Any, rows: int = 2, columns: int = 2) -> Any:
    on = Mesh(np.array(jax.devices()).reshape(rows, columns), ("x", "y"))
    return jax.device_put(values, NamedSharding(on, P(*spec)))


def like(array: Any, **changes: Any) -> Any:
    return jax.ShapeDtypeStruct(
        array.shape, changes.get("dtype", array.dtype), sharding=changes.get("sharding", array.sharding)
    )


def check_every_dtype_comes_back_bit_for_bit(folder: str) -> None:
    bits = np.arange(256, dtype=np.uint8).reshape(8, 32)
    arrays = {}
    for name in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, name, name))
        values = bits % 2 == 0 if name == "bool" else bits.view(kind)
        arrays[name] = put(values, "x", "y")
    reknit.save(folder, {"a": arrays})
    target = {"a": {name: like(array) for name, array in arrays.items()}}
    reknit.load(folder, target)
    for name, array in arrays.items():
        found = target["a"][name]
        assert (found.dtype, found.sharding) == (array.dtype, array.sharding)
        for ours, theirs in zip(found.addressable_shards, array.addressable_shards, strict=True):
            assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes(), name


def check_other_dtypes_are_refused_with_a_remedy_that_keeps_all_bits(folder: str) -> None:
    for name in REFUSED:
        array = jnp.asarray([0, 1, 1, 0], name)
        with pytest.raises(StateError, match=f"a/x is an array of dtype {name}") as caught:
            reknit.save(folder, {"a": {"x": array}})
        saves, *loads = re.findall(r"\.(?:astype|view)\('\w+'\)", str(caught.value.remedy))
        kept = eval(f"np.asarray(array){saves}")
        found = eval(f"kept{loads[0]}" if loads else f"kept.view('{name}')")
        assert np.asarray(found).tobytes() == np.asarray(array).tobytes()
        reknit.save(folder, {"a": {"x": jnp.asarray(kept)}}, overwrite=True)


def check_every_sharding_loads_into_every_other(folder: str) -> None:
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    one = SingleDeviceSharding(jax.devices()[2])
    part = NamedSharding(Mesh(np.array(jax.devices()[1:3]), ("x",)), P(None, "x"))
    arrays = [
        put(values, "x", "y"),
        put(values, "y"),
        put(values, None, ("y", "x")),
        put(values),
        jax.device_put(values, one),
        jax.device_put(values, part),
        jnp.asarray(values),
        jax.jit(lambda x: x + 0)(put(values, "x")),
        jax.jit(lambda x: (x + 0).T)(put(values.T, "x")),
    ]
    for number, array in enumerate(arrays):
        reknit.save(f"{folder}/{number}", {"a": array})
        target = {"a": [other * 0 for other in arrays]}
        for place, other in enumerate(target["a"]):
            state = {"a": other}
            reknit.load(f"{folder}/{number}", state)
            assert np.array_equal(state["a"], values)
            assert state["a"].sharding == arrays[place].sharding
            assert state["a"].committed == arrays[place].committed


def check_scalars_and_empty_arrays_come_back_with_weak_types(folder: str) -> None:
    state: dict[str, Any] = {
        "weak": jnp.asarray(2.5),
        "full": jnp.full((3,), 1.5),
        "strong": jnp.float32(2.5),
        "count": put(np.int32(7)),
        "empty": put(np.zeros((4, 0), np.float32), "x"),
        "none": jnp.zeros((0,)),
    }
    state["over"] = jax.jit(lambda x: x * 1, out_shardings=state["count"].sharding)(state["weak"])
    assert state["weak"].weak_type
    assert state["over"].weak_type
    reknit.save(folder, {"s": state})
    target = {"s": jax.tree.map(lambda x: x + 1, state)}
    for into in (target, {"s": jax.eval_shape(lambda: jax.tree.map(lambda x: x + 0, state))}):
        reknit.load(folder, into)
        for name, want in state.items():
            found = into["s"][name]
            assert found.weak_type == want.weak_type, name
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            assert np.array_equal(found, want)
    assert target["s"]["over"].sharding == state["over"].sharding
    assert (jnp.ones(1, jnp.bfloat16) * target["s"]["over"]).dtype == jnp.bfloat16


def check_keys_come_back_typed_and_draw_the_same_numbers(folder: str) -> None:
    keys = {
        "one": jax.random.key(7),
        "many": put(jax.random.split(jax.random.key(1), 8), "x"),
        "rbg": jax.random.key(3, impl="rbg"),
        "raw": jax.random.PRNGKey(5),
    }
    reknit.save(folder, {"keys": keys, "key": keys["one"]})
    target: dict[str, Any] = {
        "keys": {name: like(key) for name, key in keys.items()},
        "key": jax.random.key(0),
    }
    reknit.load(folder, target)
    for name, key in [*keys.items()]:
        found = target["keys"][name]
        assert (found.dtype, found.shape) == (key.dtype, key.shape)
        draw = jax.random.normal if name != "many" else jax.vmap(jax.random.normal)
        assert np.array_equal(draw(found), draw(key)), name
    assert target["keys"]["many"].sharding == keys["many"].sharding
    assert np.array_equal(jax.random.normal(target["key"]), jax.random.normal(keys["one"]))


def check_keys_of_another_generator_are_refused_and_plain_numbers_taken(folder: str) -> None:
    reknit.save(f"{folder}/typed", {"k": jax.random.key(3, impl="rbg"), "t": jax.random.key(4)})
    wrong = {"k": jax.random.key(3, impl="unsafe_rbg"), "t": jax.random.key(4)}
    raises(
        MismatchError,
        "keys of rbg in the checkpoint and of unsafe_rbg",
        lambda: reknit.load(f"{folder}/typed", wrong),
    )
    raw = {"k": jnp.zeros(4, jnp.uint32), "t": jnp.zeros(2, jnp.uint32)}
    report = reknit.load(f"{folder}/typed", raw)
    assert np.array_equal(raw["t"], jax.random.key_data(jax.random.key(4)))
    assert "keys of threefry2x32" in str(report.notes)
    reknit.save(f"{folder}/raw", {"t": jax.random.PRNGKey(9)})
    typed = {"t": jax.random.key(0)}
    reknit.load(f"{folder}/raw", typed)
    assert np.array_equal(jax.random.normal(typed["t"]), jax.random.normal(jax.random.key(9)))


def check_what_was_saved_may_be_donated_at_once(folder: str) -> None:
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    arrays = {
        "one": jnp.arange(1 << 18, dtype=jnp.float32),
        "cut": put(np.arange(1 << 18, dtype=np.float32), "x"),
        "small": put(np.arange(8, dtype=np.float32), ("x", "y")),
    }
    want = {name: np.array(array) for name, array in arrays.items()}
    for number, options in enumerate((None, reknit.SaveOptions(stage="lazy"))):
        state = jax.tree.map(lambda x: x.copy(), arrays)
        pending = reknit.save(f"{folder}/{number}", {"a": state}, wait=False, options=options)
        after = {name: step(array) for name, array in state.items()}
        jax.block_until_ready(after)
        pending.result()
        target = {"a": {name: like(array) for name, array in arrays.items()}}
        reknit.load(f"{folder}/{number}", target)
        for name, values in want.items():
            assert np.array_equal(target["a"][name], values), (name, options)
    reknit.close()


def check_a_save_keeps_no_memory_and_lets_arrays_be_donated_after(folder: str) -> None:
    array = put(np.arange(1 << 16, dtype=np.float32), "x")
    one = jnp.arange(8.0)
    reknit.save(folder, {"a": array, "one": one})
    # JAX keeps a host copy with its source array, so the source must not be an array that lives on.
    live = [one, *(shard.data for shard in array.addressable_shards)]
    apart = [jax_arrays.without_host_copy(data) for data in live]
    assert {id(data) for data in live}.isdisjoint(map(id, apart))
    assert [data._npy_value for data in live] == [None] * len(live)  # on a CPU there is no copy
    del live, apart
    gc.collect()
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
    assert array.is_deleted()
    target = {"a": array}
    reknit.load(folder, target, items=["a"])  # a donated array still has its shape and sharding
    assert np.array_equal(target["a"], np.arange(1 << 16))
    loaded = target["a"]
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(loaded)
    assert all(np.asarray(shard.data)[0] == shard.index[0].start + 1 for shard in after.addressable_shards)


def check_a_large_array_on_a_cpu_keeps_the_memory_that_a_load_fills(folder: str) -> None:
    for array in (put(np.zeros((1 << 16, 4), jnp.bfloat16), "x"), jnp.zeros(1 << 16)):
        filling = Filling.like(array, Place("a"))
        memories = [memory for _, memory in filling.view(World(0, 1, (0,))).parts]
        for memory in memories:
            memory[...] = 3
        loaded = filling.filled()
        addresses = {memory.__array_interface__["data"][0] for memory in memories}
        assert {shard.data.unsafe_buffer_pointer() for shard in loaded.addressable_shards} == addresses
        after = jax.jit(lambda x: x + 1, donate_argnums=0)(loaded)
        assert all(np.all(np.asarray(shard.data) == 4) for shard in after.addressable_shards)
        assert all(np.all(memory == 3) for memory in memories)


def check_deleted_and_traced_and_abstract_arrays_are_refused(folder: str) -> None:
    gone = jnp.ones(3)
    gone.delete()
    raises(
        StateError,
        "m/w is a jax.Array whose memory was given away",
        lambda: reknit.save(folder, {"m": {"w": gone}}),
    )
    raises(StateError, "has no values", lambda: reknit.save(folder, {"m": [like(jnp.ones(1))]}))

    def inside(x: Any) -> Any:
        reknit.save(folder, {"m": x})
        return x

    raises(StateError, "traced by JAX", lambda: jax.jit(inside)(jnp.ones(1)))


def check_abstract_targets_take_their_sharding_and_convert(folder: str) -> None:
    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    reknit.save(folder, {"p": {"w": put(values, "x"), "n": jnp.int32(3)}})
    onto = put(values, None, "y").sharding
    target: dict[str, Any] = {
        "p": {
            "w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=onto),
            "n": jax.ShapeDtypeStruct((), jnp.int32),
        }
    }
    before = dict(target["p"])
    raises(MismatchError, "cast=True", lambda: reknit.load(folder, target))
    assert target["p"] == before
    reknit.load(folder, target, options=reknit.LoadOptions(cast=True))
    assert (target["p"]["w"].dtype, target["p"]["w"].sharding) == (jnp.bfloat16, onto)
    assert np.array_equal(target["p"]["w"], values.astype(jnp.bfloat16))
    assert target["p"]["n"] == 3
    assert not target["p"]["n"].committed


def check_arrays_on_the_default_device_go_where_computations_take_them(folder: str) -> None:
    state = {"w": put(np.ones(8, np.float32), "x"), "count": jnp.int32(3)}
    reknit.save(folder, state)
    target = training.abstract(state)
    reknit.load(folder, target)
    assert jax.jit(lambda a, b: a * b)(target["w"], target["count"]).tolist() == [3] * 8


def check_targets_that_cannot_be_made_are_refused(folder: str) -> None:
    reknit.save(folder, {"w": np.ones((7, 2)), "h": np.ones((6, 2), np.float32)})

    def want(shape: tuple[int, ...], dtype: Any, sharding: Any, item: str) -> Any:
        target = {item: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)}
        return lambda: reknit.load(folder, target)

    raises(StateError, "jax_enable_x64", want((7, 2), np.float64, None, "w"))
    abstract = NamedSharding(jax.sharding.AbstractMesh((2,), ("x",)), P("x"))
    raises(StateError, "abstract mesh", want((6, 2), np.float32, abstract, "h"))


def check_an_abstract_mesh_is_taken_for_the_one_that_is_set(folder: str) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    reknit.save(folder, {"p": {"w": put(np.arange(8, dtype=np.float32)), "n": jnp.int32(3)}})
    with jax.set_mesh(mesh):
        made = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("y")))
        shapes = jax.eval_shape(lambda: {"w": made * 1, "n": jnp.int32(0)})
        assert isinstance(shapes["w"].sharding.mesh, jax.sharding.AbstractMesh)
        target: dict[str, Any] = {"p": dict(shapes)}
        reknit.load(folder, target)
        assert target["p"]["w"].sharding == made.sharding
        assert jax.typeof(target["p"]["w"]) == jax.typeof(made)
        assert np.array_equal(target["p"]["w"], np.arange(8))
        assert target["p"]["n"] == 3
    raises(StateError, "abstract mesh", lambda: reknit.load(folder, {"p": shapes}))


def check_a_larger_array_keeps_what_the_checkpoint_lacks(folder: str) -> None:
    reknit.save(folder, {"emb": put(np.ones((4, 2), np.float32), "x")})
    target = {"emb": put(np.full((6, 2), 5, np.float32), "x")}
    reknit.load(folder, target, options=reknit.LoadOptions(allow_shape_mismatch=("emb",)))
    assert np.array_equal(target["emb"], [[1, 1]] * 4 + [[5, 5]] * 2)
    target = {"emb": like(target["emb"])}
    reknit.load(folder, target, options=reknit.LoadOptions(allow_shape_mismatch=("emb",)))
    assert np.array_equal(target["emb"], [[1, 1]] * 4 + [[0, 0]] * 2)


def check_boxes_of_arrays_that_are_cut_alike_are_found_once(folder: str) -> None:
    found: list[str] = []

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == filling.__file__:
            found.append(frame.f_code.co_name)

    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    cuts = (("x",), ("x", "y"), (None, "y"), ("x",), (None, "y"), ())
    reknit.save(folder, {f"{n}": put(values + n) for n in range(len(cuts))})
    target = {f"{n}": put(np.zeros_like(values), *cut) for n, cut in enumerate(cuts)}
    filling.cut_boxes.cache_clear()
    sys.setprofile(seen)
    try:
        reknit.load(folder, target)
    finally:
        sys.setprofile(None)
    assert found.count("cut_boxes") == len(set(cuts))
    for n, cut in enumerate(cuts):
        assert np.array_equal(target[f"{n}"], values + n)
        assert target[f"{n}"].sharding == put(values, *cut).sharding


def check_device_copies_begin_before_any_is_waited_for(folder: str) -> None:
    order: list[str] = []

    class Remote:
        """An array on an accelerator, as far as is asked."""

        def __init__(self, data: Any) -> None:
            self.data = data

        def copy_to_host_async(self) -> None:
            order.append("begin")

        def __array__(self, *_: Any, **__: Any) -> Any:
            order.append("wait")
            return np.asarray(self.data)

    module: Any = jax_arrays
    apart, on_host = module.without_host_copy, module.is_on_host
    module.without_host_copy = lambda data: Remote(apart(data))
    module.is_on_host = lambda sharding: False
    try:
        held = registry.collect(
            {"a": put(np.ones(8), "x"), "b": [jnp.ones(3), training.OPTIMIZER.init({"w": jnp.ones(2)})]}, 0, 1
        )
    finally:
        module.without_host_copy, module.is_on_host = apart, on_host
    assert order == ["begin"] * len(held.shards) + ["wait"] * len(held.shards)


def check_the_private_parts_of_jax_mean_what_they_meant(folder: str) -> None:
    key, weak = jax.random.key(1), jnp.asarray(1.0)
    assert pytree.is_key_dtype(key.dtype)
    assert not pytree.is_key_dtype(weak.dtype)
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        made = jax.random.key(1, impl=name)
        assert pytree.implementation(made.dtype) == str(jax.random.key_impl(made)) == name
        assert pytree.key_shape(made.dtype) == jax.random.key_data(made).shape
    strong = put(np.arange(8, dtype=np.float32), "x")
    shards = strong.addressable_shards
    assert [id(data) for data in pytree.all_data(strong)] == [id(shard.data) for shard in shards]
    indices = strong.sharding.addressable_devices_indices_map(strong.shape).values()
    assert [shard.index for shard in shards] == [*indices]
    turned = pytree.weakly_typed(strong)
    assert turned.weak_type
    assert not strong.weak_type
    assert turned.sharding == strong.sharding
    assert np.array_equal(turned + 0, strong)
    assert (jnp.ones(8, jnp.bfloat16) + turned).dtype == jnp.bfloat16
