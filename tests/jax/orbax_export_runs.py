"""Exports to Orbax, in a process of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch
from flax import linen, nnx

import reknit
from reknit.integrations.dcp.export import export_dcp
from reknit.integrations.formats.import_ import import_checkpoint
from reknit.integrations.numpy_gguf.export import export_npz
from reknit.integrations.orbax.export import export_orbax
from reknit.integrations.torch_save.export import export_torch
from tests.integrations.formats.checkpoints import every_dtype, random_bits, save_training

if TYPE_CHECKING:
    from collections.abc import Callable

LACKING = ("complex32", "float4_e2m1fn_x2")


def restored(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def check_every_dtype(folder: str) -> None:
    state = every_dtype(without=LACKING)
    reknit.save(f"{folder}/c", {"model": state})
    report = export_orbax(f"{folder}/c", f"{folder}/out", verify=True)
    assert report.num_tensors == 2 * len(state)
    assert set(report.left_out) == {f"model.{dtype}.none" for dtype in state}
    found = restored(Path(folder, "out"))["model"]
    for dtype, tensors in state.items():
        for name in ("matrix", "scalar"):
            tensor = tensors[name]
            array = np.asarray(found[dtype][name])
            assert (str(array.dtype), array.shape) == (dtype, tuple(tensor.shape))
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert array.tobytes() == data.tobytes(), dtype
    assert sorted(path.name for path in Path(folder).iterdir()) == ["c", "out"]


def check_training(folder: str) -> None:
    _, optimizer = save_training(Path(folder, "c"))
    report = export_orbax(f"{folder}/c", f"{folder}/out", verify=True)
    assert {"rng", "values.set"} <= set(report.left_out)
    found = restored(Path(folder, "out"))
    assert found["values"]["epoch"] == 3
    assert found["values"]["text"] == "x"
    state = next(iter(optimizer.state.values()))
    assert np.array_equal(found["optimizer"]["state"]["0.weight"]["exp_avg"], state["exp_avg"].numpy())
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.1


def check_refusals(folder: str) -> None:
    for dtype in LACKING:
        reknit.save(f"{folder}/{dtype}", {"model": {"w": random_bits(dtype, (2,))}})
        raised(reknit.MismatchError, f"{folder}/{dtype}", f"{folder}/out")
    reknit.save(f"{folder}/c", {"model": {"w": torch.zeros(1000)}})
    (file,) = Path(folder, "c", "model").glob("*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    raised(reknit.CorruptError, f"{folder}/c", f"{folder}/out")
    assert sorted(path.name for path in Path(folder).iterdir()) == sorted(["c", *LACKING])


def raised(kind: type[Exception], *arguments: str, export: Callable[..., Any] = export_orbax) -> None:
    try:
        export(*arguments)
    except kind:
        return
    raise AssertionError(f"the export raised no {kind.__name__}")


class Pair(NamedTuple):
    left: Any
    right: Any


def trees() -> dict[str, Any]:
    params = {"w": jnp.ones(3), "b": jnp.zeros(2, jnp.bfloat16)}
    return {
        "params": {"layers": [params, {"w": (jnp.ones(1), [jnp.zeros(2)])}]},
        "opt": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
        "multi": optax.MultiSteps(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), 2).init(params),
        "masked": optax.masked(optax.sgd(0.1, momentum=0.9), {"w": True, "b": False}).init(params),
        "keys": {"a": jax.random.key(1), "inner": {"b": jax.random.split(jax.random.key(2, impl="rbg"), 2)}},
        "more": Pair({"on": True, "count": 3, "rate": 0.5, "none": None}, ({}, [], ())),
    }


def check_orbax_restores_into_the_tree_of_the_run(folder: str) -> None:
    state = trees()
    abstract = jax.tree.map(
        lambda leaf: ocp.utils.to_shape_dtype_struct(leaf) if hasattr(leaf, "shape") else leaf, state
    )
    reknit.save(f"{folder}/own", state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/orbax", state)
    import_checkpoint(f"{folder}/orbax", f"{folder}/imported")
    for name in ("own", "orbax", "imported"):
        report = export_orbax(f"{folder}/{name}", f"{folder}/{name}-out", verify=True)
        assert not report.left_out, name
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(f"{folder}/{name}-out", abstract)
        assert str(jax.tree.structure(found)) == str(jax.tree.structure(state)), name
        assert described(found) == described(state), name


def check_states_of_nnx_go_there_and_back(folder: str) -> None:
    parts = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(1)), nnx.Dropout(0.5, rngs=nnx.Rngs(2)))
    state = {"m": nnx.state(parts)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/orbax", state)
    import_checkpoint(f"{folder}/orbax", f"{folder}/imported")
    export_orbax(f"{folder}/imported", f"{folder}/out", verify=True)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(f"{folder}/out", abstract)
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(state))
    assert described(found) == described(state)


class Layers(nnx.Module):
    """Linear layers in a list, beside statistics, keys and counts."""

    def __init__(self, number: int) -> None:
        rngs = nnx.Rngs(params=number, dropout=jax.random.key(3, impl="rbg"))
        self.layers = nnx.List([nnx.Linear(2, 2, use_bias=bool(n), rngs=rngs) for n in range(number)])
        self.norm, self.drop = nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)


def check_states_of_flax_that_reknit_saved_restore_with_orbax(folder: str) -> None:
    variables = {"w": linen.Partitioned(jnp.ones((2, 2)), names=("x", None)), "b": jnp.zeros(2)}
    trees: dict[str, Any] = {
        "linear": nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
        "adam": optax.adam(0.1).init(nnx.state(Layers(2), nnx.Param)),
        "optimizer": nnx.state(nnx.Optimizer(Layers(1), optax.adam(0.1), wrt=nnx.Param)),
        "variable": nnx.Param(jnp.ones(3)),
        "linen": {"params": variables, "opt": optax.adam(0.1).init(variables)},
        "dicts": {0: jnp.ones(1), 1: {0: jnp.zeros(2)}, 2: [{0: 1, 1: 2}]},
        "text": {"0": jnp.ones(1), "1": [jnp.zeros(2)]},
        "one": [jnp.ones(1)],
    }
    for number in (0, 1, 11):  # the text "10" comes before "2"
        module = Layers(number)
        trees |= {f"state{number}": nnx.state(module), f"pure{number}": nnx.to_pure_dict(nnx.state(module))}
    reknit.save(f"{folder}/own", trees)
    report = export_orbax(f"{folder}/own", f"{folder}/out", verify=True)
    assert not report.left_out
    require_restored(f"{folder}/out", trees)
    import_checkpoint(f"{folder}/out", f"{folder}/imported")
    export_orbax(f"{folder}/imported", f"{folder}/again", verify=True)
    require_restored(f"{folder}/again", trees)


def check_a_module_of_flax_is_written_as_by_orbax_which_does_not_restore_it(folder: str) -> None:
    module = {"m": Layers(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/orbax", module)
    reknit.save(f"{folder}/own", module)
    export_orbax(f"{folder}/own", f"{folder}/out", verify=True)
    one, two = (json.loads(Path(folder, name, "_METADATA").read_text()) for name in ("orbax", "out"))
    assert set(one["tree_metadata"]) == set(two["tree_metadata"])


def require_restored(path: str, state: Any) -> None:
    """Require that Orbax restores a folder into the tree of a run, with all its bytes."""

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return ocp.utils.to_shape_dtype_struct(leaf) if is_key else jnp.zeros_like(leaf)

    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path, jax.tree.map(zeros, state))
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(state))
    assert described(found) == described(state)


def described(tree: Any) -> list[Any]:
    """Return type, dtype and bytes of all leaves."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return type(leaf), leaf
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf.dtype, np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()

    return [one(leaf) for leaf in jax.tree.leaves(tree)]


def check_typed_keys_are_exported_as_numbers_where_a_format_has_no_keys(folder: str) -> None:
    key = jax.random.key(7, impl="rbg")
    reknit.save(f"{folder}/c", {"s": {"w": jnp.ones(3), "rngs": {"key": key}}, "root": key})
    data = np.asarray(jax.random.key_data(key))
    report = export_torch(f"{folder}/c", f"{folder}/t.pt", verify=True)
    found = torch.load(f"{folder}/t.pt", weights_only=True)
    assert found["s"]["rngs"]["key"].numpy().tobytes() == found["root"].numpy().tobytes() == data.tobytes()
    assert set(report.left_out) == {"s.rngs.key.~prng", "root.~prng"}
    assert "impl='rbg'" in report.left_out["root.~prng"]
    assert set(export_npz(f"{folder}/c", f"{folder}/n.npz", verify=True).left_out) == set(report.left_out)
    assert set(export_dcp(f"{folder}/c", f"{folder}/d", verify=True).left_out) == set(report.left_out)
    with np.load(f"{folder}/n.npz") as arrays:
        assert arrays["s.rngs.key"].tobytes() == data.tobytes()


def check_names_that_dots_make_equal_are_nested_by_torch(folder: str) -> None:
    reknit.save(f"{folder}/c", {"m": {"a.b": torch.ones(2), "a": {"b": torch.zeros(3)}}})
    export_torch(f"{folder}/c", f"{folder}/t.pt", verify=True)
    found = torch.load(f"{folder}/t.pt", weights_only=True)["m"]
    assert (found["a.b"].tolist(), found["a"]["b"].tolist()) == ([1, 1], [0, 0, 0])
    reknit.save(f"{folder}/numbers", {"m": {"a.b": 1, "a": {"b": 1}, "w": torch.ones(2)}})
    reknit.save(f"{folder}/both", {"m": {"a.b": torch.ones(()), "a": {"b": 1.0}}})
    for export in (export_orbax, export_dcp, export_npz):
        for name in ("c", "numbers", "both"):
            raised(reknit.MismatchError, f"{folder}/{name}", f"{folder}/out", export=export)
