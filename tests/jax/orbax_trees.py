"""Checks of restored trees in one process: they are those of the real Orbax."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as real
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reknit
from reknit.errors import CheckpointExistsError, MismatchError, UsageError
from reknit.integrations import orbax as ocp
from reknit.integrations.orbax import v1 as v1
from tests.jax.trees import raises


def cut(*spec: Any) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec(*spec))


def tree() -> dict[str, Any]:
    params = {"w": jax.device_put(jnp.arange(8.0), cut("x")), "b": jnp.ones(3, jnp.bfloat16)}
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "key": jax.random.key(3),
        "count": 3,
        "rate": 1.5,
        "host": np.arange(3),
        "pair": (jnp.asarray(7), [jnp.zeros((2, 2))]),
    }


def described(tree: Any) -> Any:
    """Return types, dtypes, shardings and values of all leaves, and the structure."""

    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return type(leaf).__name__, leaf
        kind = "jax" if isinstance(leaf, jax.Array) else "numpy"
        where = leaf.sharding.device_set if isinstance(leaf, jax.Array) else None
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        return kind, str(leaf.dtype), leaf.shape, where, data.tobytes()

    return jax.tree.structure(tree), [one(leaf) for leaf in jax.tree.leaves(tree)]


def check_trees_come_back_as_from_orbax(folder: str) -> None:
    saved = tree()
    abstract = jax.tree.map(real.utils.to_shape_dtype_struct, saved)
    across = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=cut()) if leaf.ndim == 1 else leaf
        ),
        abstract["params"],
    )
    fields = {"params": saved["params"]}
    cases = [
        ("whole", saved, real.args.StandardSave, real.args.StandardRestore(abstract)),
        ("live", saved, real.args.StandardSave, real.args.StandardRestore(tree())),
        ("cast", saved["params"], real.args.StandardSave, real.args.StandardRestore(across)),
        (
            "args",
            fields,
            real.args.PyTreeSave,
            real.args.PyTreeRestore(
                fields, restore_args=real.checkpoint_utils.construct_restore_args(fields)
            ),
        ),
        (
            "numpy",
            fields,
            real.args.PyTreeSave,
            real.args.PyTreeRestore(
                fields, restore_args=jax.tree.map(lambda _: real.RestoreArgs(restore_type=np.ndarray), fields)
            ),
        ),
    ]
    for name, value, save, restore in cases:
        found = []
        for which, library in (("real", real), ("ours", ocp)):
            with library.CheckpointManager(f"{folder}/{name}/{which}") as manager:
                manager.save(1, args=save(value))
                manager.wait_until_finished()
                found.append(described(manager.restore(1, args=restore)))
        assert found[0] == found[1], name
    with ocp.CheckpointManager(f"{folder}/whole/ours") as manager:
        assert manager.restore(1, args=ocp.args.StandardRestore(abstract))["params"]["w"].sharding == cut("x")


def check_a_tree_without_a_target_has_the_names_of_the_checkpoint(folder: str) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree()))
        found = manager.restore(1)
    assert found["pair"][0].tolist() == 7
    assert found["pair"][1][0].shape == (2, 2)
    assert jax.random.key_data(found["key"]).tolist() == [0, 3]
    assert found["key"].dtype == jax.random.key(3).dtype
    assert (found["count"], found["rate"], found["host"].tolist()) == (3, 1.5, [0, 1, 2])
    assert found["opt"][0]["mu"]["b"].dtype == jnp.bfloat16
    reknit.save(f"{folder}/plain", {"model": {"w": jnp.ones(2)}})
    assert ocp.StandardCheckpointer().restore(f"{folder}/plain")["w"].tolist() == [1, 1]


def check_parts_of_a_tree_are_left_out(folder: str) -> None:
    saved = tree()
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.PyTreeSave(saved))
        manager.wait_until_finished()
        some = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, saved["params"])}
        raises(MismatchError, "unexpected", lambda: manager.restore(1, args=ocp.args.StandardRestore(some)))
        found = manager.restore(1, args=ocp.args.PyTreeRestore(some, partial_restore=True))
        assert found["params"]["w"].tolist() == saved["params"]["w"].tolist()
        more = {"params": some["params"], "new": jnp.ones(1)}
        partial = ocp.args.PyTreeRestore(more, partial_restore=True)
        raises(MismatchError, "default/new", lambda: manager.restore(1, args=partial))
        holes = {**jax.tree.map(lambda _: ocp.PLACEHOLDER, saved), **some}
        found = manager.restore(1, args=ocp.args.StandardRestore(holes))
        assert found["opt"][0].mu["w"] is ocp.PLACEHOLDER
        assert found["params"]["w"].tolist() == saved["params"]["w"].tolist()
        renamed = ocp.args.PyTreeRestore(some, transforms={"a": 1})
        raises(UsageError, "transforms", lambda: manager.restore(1, args=renamed))
        cut_off = ocp.args.StandardRestore(some, strict=False)
        raises(UsageError, "pads or cuts", lambda: manager.restore(1, args=cut_off))


class Iterator:
    """An iterator of a process, as Grain has it."""

    def __init__(self, position: int) -> None:
        self.position = position

    def get_state(self) -> bytes:
        return str(self.position).encode()

    def set_state(self, state: bytes) -> None:
        self.position = int(state)


@dataclasses.dataclass
class IteratorArgs(real.args.CheckpointArgs):  # type: ignore[misc]
    """Arguments that an input pipeline registers with Orbax."""

    item: Any


def check_items_of_all_kinds(folder: str) -> None:
    key = jax.random.key(5)
    np.random.seed(4)
    legacy = np.random.get_state()
    with ocp.CheckpointManager(folder) as manager:
        args = ocp.args.Composite(
            array=ocp.args.ArraySave(jnp.arange(4.0)),
            key=ocp.args.JaxRandomKeySave(key),
            numpy=ocp.args.NumpyRandomKeySave(legacy),
            notes=ocp.args.JsonSave({"empty": [], "text": "x", "0": None}),
            iter=IteratorArgs(Iterator(17)),
            net=ocp.args.StandardSave(nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))),
        )
        assert manager.save(1, args=args)
        fresh = Iterator(0)
        net = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
        found = manager.restore(
            1,
            args=ocp.args.Composite(
                array=ocp.args.ArrayRestore(
                    jnp.zeros(4), restore_args=ocp.ArrayRestoreArgs(sharding=cut("x"))
                ),
                key=ocp.args.StandardRestore(jax.random.key(0)),
                numpy=ocp.args.NumpyRandomKeyRestore(),
                notes=ocp.args.JsonRestore(),
                iter=IteratorArgs(fresh),
                net=ocp.args.StandardRestore(net),
            ),
        )
        notes = manager.restore(1, args=ocp.args.Composite(notes=None))["notes"]
        assert set(manager.item_metadata(1).keys()) == {"array", "key", "numpy", "notes", "net", "iter"}
    assert notes == found["notes"] == {"empty": [], "text": "x", "0": None}
    assert found["array"].sharding == cut("x")
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(key).tolist()
    np.random.set_state(found["numpy"])
    assert found["iter"] is fresh
    assert fresh.position == 17
    kernel: Any = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))["kernel"]
    assert found["net"]["kernel"][...].tolist() == kernel[...].tolist()


def check_checkpointers_save_at_a_path(folder: str) -> None:
    saved = tree()
    with ocp.StandardCheckpointer() as standard:
        standard.save(f"{folder}/a", saved)
        standard.wait_until_finished()
        raises(CheckpointExistsError, "/a", lambda: standard.save(f"{folder}/a", saved))
        standard.save(Path(folder) / "a", {**saved, "count": 4}, force=True, custom_metadata={"x": 1})
        assert standard.restore(f"{folder}/a", saved)["count"] == 4
        assert standard.metadata(f"{folder}/a")["params"]["w"].shape == (8,)
        standard.check_for_errors()
    composite = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    composite.save(f"{folder}/b", args=ocp.args.Composite(one=ocp.args.StandardSave(saved)))
    assert composite.restore(f"{folder}/b")["one"]["count"] == 3
    assert ocp.PyTreeCheckpointer().restore(f"{folder}/b/one")["count"] == 3
    handler = ocp.PyTreeCheckpointHandler()
    handler.save(f"{folder}/c", saved)
    handler.finalize(f"{folder}/c")
    assert handler.restore(f"{folder}/c", args=ocp.args.PyTreeRestore(saved))["rate"] == 1.5
    handler.close()
    raises(UsageError, "orbax.checkpoint.args", lambda: handler.save(f"{folder}/d", args={"a": 1}))


def check_calls_of_the_first_version(folder: str) -> None:
    saved = tree()
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved["params"])
    v1.save(f"{folder}/a", saved["params"])
    found = v1.load(f"{folder}/a", abstract)
    assert isinstance(found["w"], jax.Array)
    assert found["w"].tolist() == v1.load(f"{folder}/a")["w"].tolist() == saved["params"]["w"].tolist()
    assert v1.metadata(f"{folder}/a")["w"].shape == (8,)
    called = threading.Event()
    response = v1.save_async(f"{folder}/a", saved["params"], overwrite=True, custom_metadata={"x": 1})
    response.on_complete(lambda _: called.set())
    response.result()
    assert called.wait(20)
    notes = {"epoch": 3, "names": ["a", None]}
    v1.save_checkpointables(f"{folder}/b", {"params": saved["params"], "notes": notes})
    assert v1.load_checkpointables(f"{folder}/b", {"notes": None}) == {"notes": notes}
    assert (
        set(v1.load_checkpointables(f"{folder}/b"))
        == {"params", "notes"}
        == set(v1.checkpointables_metadata(f"{folder}/b"))
    )

    class OwnFiles:
        save = load = print

    raises(UsageError, "state_dict", lambda: v1.save_checkpointables(f"{folder}/c", {"x": OwnFiles()}))
    policies = v1.training.save_decision_policies
    keep = v1.training.preservation_policies.LatestN(2)
    with v1.training.Checkpointer(
        f"{folder}/run", save_decision_policy=policies.FixedIntervalPolicy(2), preservation_policy=keep
    ) as run:
        assert run.latest is None
        assert [run.save(step, saved["params"], metrics={"loss": step}) for step in range(5)] == [
            step % 2 == 0 for step in range(5)
        ]
        assert run.save_checkpointables(5, {"state": saved["params"], "notes": notes}, force=True)
        run.wait()
        assert [each.step for each in run.checkpoints] == [4, 5]
        assert run.load_checkpointables(run.latest, {"notes": None}) == {"notes": notes}
        assert run.load(4, abstract)["w"].tolist() == saved["params"]["w"].tolist()
        assert run.save(5, saved["params"], force=True, overwrite=True)
        assert run.metadata(5).custom_metadata == {}
        run.delete(4)
        assert [each.step for each in run.checkpoints] == [5]


def check_folders_of_orbax_itself_are_restored(folder: str) -> None:
    saved = {**tree(), "layers": [jnp.ones(2), jnp.zeros(3)]}
    abstract = jax.tree.map(
        lambda leaf: real.utils.to_shape_dtype_struct(leaf) if hasattr(leaf, "shape") else leaf, saved
    )
    with real.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/tree", saved)
    with real.CheckpointManager(f"{folder}/run") as manager:
        manager.save(7, args=real.args.StandardSave(saved))
        manager.wait_until_finished()
    for place in (f"{folder}/tree", f"{folder}/run/7/default"):
        with real.StandardCheckpointer() as checkpointer:
            wanted = described(checkpointer.restore(place, abstract))
        assert described(ocp.StandardCheckpointer().restore(place, abstract)) == wanted
        assert ocp.StandardCheckpointer().restore(place)["params"]["w"].tolist() == list(range(8))
        assert ocp.StandardCheckpointer().metadata(place)["layers"][1].shape == (3,)
        some = {"params": abstract["params"]}
        raises(MismatchError, "the target", lambda: ocp.StandardCheckpointer().restore(place, some))  # noqa: B023
        partial = ocp.args.PyTreeRestore(some, partial_restore=True)
        found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(place, args=partial)
        assert found["params"]["w"].tolist() == list(range(8))


def check_arrays_are_saved_in_the_dtypes_of_their_arguments(folder: str) -> None:
    saved = {"m": {"w": jax.device_put(jnp.arange(8.0) / 3, cut("x")), "n": np.arange(3.0), "rate": 0.1}}
    half = real.SaveArgs(dtype=jnp.dtype("bfloat16"))
    args = {"m": {"w": half, "n": real.SaveArgs(), "rate": half}}
    found = []
    for library, item, prefix in ((real, "m", ""), (ocp, "default", "m/")):
        path = f"{folder}/{item}"
        with library.Checkpointer(library.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, saved, save_args=args)
        with reknit.open(path) as checkpoint:
            found.append([checkpoint.read(item, f"{prefix}{name}").tolist() for name in ("w", "n")])
            assert checkpoint.tensors[item][f"{prefix}w"].dtype == "bfloat16"
    assert found[0] == found[1]
    assert ocp.PyTreeCheckpointer().restore(f"{folder}/default")["m"]["rate"] == 0.10009765625
    with ocp.CheckpointManager(f"{folder}/run") as manager:
        manager.save(1, args=ocp.args.Composite(a=ocp.args.ArraySave(jnp.arange(3.0), save_args=half)))
        found_a = manager.restore(1, args=ocp.args.Composite(a=None))["a"]
        assert found_a.dtype == jnp.bfloat16
