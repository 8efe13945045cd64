"""Checks of folders that the real Orbax wrote, opened and loaded in place, and after an import."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as real
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import reknit
from reknit.errors import CorruptError, FormatError, MismatchError, StateError, UsageError
from reknit.integrations.formats.import_ import import_checkpoint
from tests.jax.trees import raises


def saved(path: str | Path, tree: Any, **options: Any) -> str:
    """Save a tree with Orbax, and return its path."""
    with real.Checkpointer(real.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)
    return str(path)


def bits(tree: Any) -> list[bytes]:
    """Return the bytes of all leaves."""

    def data(leaf: Any) -> Any:
        dtype: Any = getattr(leaf, "dtype", None)
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return [np.asarray(data(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def require_loads(path: str, live: dict[str, Any], wanted: Any) -> None:
    """Load a folder of Orbax, and the checkpoint that an import makes of it, into the same state."""
    import_checkpoint(path, f"{path}-imported", overwrite=True)
    for place in (path, f"{path}-imported"):
        target = jax.tree.map(lambda leaf: leaf, live)  # other containers
        reknit.load(place, target)
        assert bits(target) == bits(wanted), place
        assert str(jax.tree.structure(target)) == str(jax.tree.structure(wanted))


def network(seed: int) -> nnx.Sequential:
    return nnx.Sequential(
        nnx.Linear(2, 2, rngs=nnx.Rngs(seed)),
        nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
        nnx.Dropout(0.5, rngs=nnx.Rngs(seed)),
    )


def check_states_of_nnx_load_into_states_modules_and_pure_dicts(folder: str) -> None:
    def pure(module: Any) -> Any:
        return nnx.to_pure_dict(nnx.state(module))

    state = saved(f"{folder}/state", {"m": nnx.state(network(1))})
    require_loads(state, {"m": nnx.state(network(7))}, {"m": nnx.state(network(1))})
    module = network(7)
    reknit.load(state, {"m": module})
    assert bits(nnx.state(module)) == bits(nnx.state(network(1)))
    whole = saved(f"{folder}/module", {"m": network(1)})
    module = network(7)
    reknit.load(whole, {"m": module})
    assert bits(nnx.state(module)) == bits(nnx.state(network(1)))
    require_loads(
        saved(f"{folder}/pure", {"m": pure(network(1))}), {"m": pure(network(7))}, {"m": pure(network(1))}
    )
    rooted = saved(f"{folder}/root", nnx.state(network(1)))
    live = dict(nnx.state(network(7)))
    reknit.load(rooted, live)
    assert bits(live) == bits(dict(nnx.state(network(1))))


def check_optimizers_of_nnx_load(folder: str) -> None:
    def optimizer(seed: int) -> Any:
        return nnx.state(nnx.Optimizer(network(seed), optax.adam(0.1 * seed), wrt=nnx.Param))

    one = jax.tree.map(lambda leaf: leaf + 1, optimizer(1))
    require_loads(saved(f"{folder}/c", {"o": one}), {"o": optimizer(2)}, {"o": one})


def check_boxes_of_linen_load(folder: str) -> None:
    def boxed(number: float) -> Any:
        return {"w": linen.Partitioned(jnp.full(3, number), ("x",)), "v": jnp.full(2, number)}

    require_loads(
        saved(f"{folder}/c", {"params": boxed(1.0)}), {"params": boxed(0.0)}, {"params": boxed(1.0)}
    )


def check_integer_keys_and_texts_of_digits_load(folder: str) -> None:
    whole = {"norm": {0: jnp.ones(2), 5: {-1: jnp.zeros(3)}}, "list": [jnp.ones(1), (jnp.zeros(2), 3)]}
    live = {"norm": {0: jnp.zeros(2), 5: {-1: jnp.ones(3)}}, "list": [jnp.zeros(1), (jnp.ones(2), 0)]}
    require_loads(saved(f"{folder}/int", {"m": whole}), {"m": live}, {"m": whole})
    texts = {"0": jnp.ones(2), "07": jnp.ones(1)}
    require_loads(
        saved(f"{folder}/text", {"m": texts}), {"m": jax.tree.map(jnp.zeros_like, texts)}, {"m": texts}
    )
    path = saved(f"{folder}/one", {"m": {"0": jnp.ones(2)}})
    both = {"m": {0: np.zeros(2, np.float32), "0": np.zeros(2, np.float32)}}
    raises(reknit.errors.ReknitError, "m/~20", lambda: reknit.load(path, both))
    assert not both["m"][0].any()
    reknit.save(f"{folder}/own", {"m": {"0": np.ones(2, np.float32)}})
    raises(MismatchError, "m/~20", lambda: reknit.load(f"{folder}/own", {"m": {0: np.zeros(2, np.float32)}}))


def check_states_of_optax_load_with_their_empty_parts(folder: str) -> None:
    params = {"w": jnp.ones(3), "b": jnp.zeros(2)}
    transforms = {
        "adam": optax.adam(1e-3),
        "clipped": optax.chain(optax.clip(1.0), optax.adamw(1e-3)),
        "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        "multi": optax.MultiSteps(optax.adam(1e-3), 2),
        "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
        "skipped": optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    }
    for name, transform in transforms.items():
        fresh = transform.init(params)
        _, after = transform.update(params, fresh, params)
        require_loads(saved(f"{folder}/{name}", {"opt": after}), {"opt": fresh}, {"opt": after})


def check_texts_and_numbers_and_empty_containers_load(folder: str) -> None:
    whole = {
        "text": "a/b~",
        "a/b": "slash",
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "on": True,
        "off": False,
        "half": np.float32(0.5),
        "count": 3,
        "rate": 1.5,
        "w": np.ones(2),
    }
    live = {
        "text": "",
        "a/b": "",
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "on": False,
        "off": np.bool_(True),
        "half": np.float32(0),
        "count": 0,
        "rate": 0.0,
        "w": np.zeros(2),
    }
    for name, options in {"2": {}, "3": {"use_ocdbt": False, "use_zarr3": True}}.items():
        path = saved(f"{folder}/{name}", {"m": whole}, **options)
        for place in (path, f"{path}-imported"):
            if place != path:
                import_checkpoint(path, place)
            target = {"m": {**live, "w": np.zeros(2)}}
            reknit.load(place, target)
            found = target["m"]
            assert found["w"].tolist() == [1, 1]
            assert {key: value for key, value in found.items() if key != "w"} == {
                key: value for key, value in whole.items() if key != "w"
            }
            assert all(type(value) is type(live[key]) for key, value in found.items())
            with reknit.open(place) as checkpoint:
                assert checkpoint.values["m"]["text"] == "a/b~"
    raises(MismatchError, "m/on", lambda: reknit.load(path, {"m": {**live, "on": 1, "w": np.zeros(2)}}))
    raises(
        MismatchError, "m/count", lambda: reknit.load(path, {"m": {**live, "count": True, "w": np.zeros(2)}})
    )


def check_typed_keys_load_into_keys_of_their_generator_only(folder: str) -> None:
    keys = {name: jax.random.key(3, impl=name) for name in ("threefry2x32", "rbg", "unsafe_rbg")}
    many = jax.random.split(jax.random.key(1, impl="rbg"), 4)
    whole = {"r": {**keys, "many": many}}
    live = {"r": {**{name: jax.random.key(0, impl=name) for name in keys}, "many": jnp.zeros_like(many)}}
    path = saved(f"{folder}/c", whole)
    require_loads(path, live, whole)
    for place in (path, f"{path}-imported"):
        wrong = {"r": {**live["r"], "rbg": jax.random.key(0, impl="unsafe_rbg")}}
        raises(MismatchError, "keys of rbg", lambda place=place, wrong=wrong: reknit.load(place, wrong))
        assert bits(wrong["r"]["rbg"]) == bits(live["r"]["rbg"])


DRIVERS: dict[str, dict[str, Any]] = {
    "zarr2": {"use_ocdbt": False},
    "zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "ocdbt": {},
    "ocdbt3": {"use_zarr3": True},
}


def check_a_lost_chunk_is_damage_of_its_tensor_alone(folder: str) -> None:
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    tree = {"m": {"w": jax.device_put(jnp.arange(1.0, 9.0), rows), "b": jnp.ones(3)}}
    for name in ("zarr2", "zarr3"):
        path = saved(f"{folder}/{name}", tree, **DRIVERS[name])
        (lost,) = (each for each in Path(path, "m.w").rglob("2") if each.is_file())
        lost.unlink()
        said = f"m/w of {path} cannot be read"
        with reknit.open(path) as checkpoint:
            assert checkpoint.read("m", "w", slice(0, 4)).tolist() == [1, 2, 3, 4]
            assert checkpoint.read("m", "b").tolist() == [1, 1, 1]
            raises(CorruptError, said, lambda: checkpoint.read("m", "w", slice(3, 5)))
        target = {"m": {"w": np.full(8, 9, np.float32), "b": np.full(3, 9, np.float32)}}
        raises(CorruptError, said, lambda: reknit.load(path, target))  # noqa: B023
        assert set(target["m"]["w"]) == set(target["m"]["b"]) == {9}
        raises(CorruptError, said, lambda: import_checkpoint(path, f"{path}-imported"))  # noqa: B023
        for level in ("metadata", "data"):
            (problem,) = reknit.verify(path, level).problems
            assert "m/w" in problem
            assert str(lost) in problem


def check_chunks_of_zeros_that_older_versions_left_out_are_zeros(folder: str) -> None:
    path = saved(f"{folder}/c", {"m": {"w": np.ones(3)}}, **DRIVERS["zarr2"])
    record = Path(path, "_METADATA")
    record.write_text(record.read_text().replace('"store_array_data_equal_to_fill_value": true, ', ""))
    Path(path, "m.w", "0").unlink()
    with reknit.open(path) as checkpoint:
        assert checkpoint.read("m", "w").tolist() == [0, 0, 0]


def check_no_damage_to_a_file_gives_a_wrong_value(folder: str) -> None:
    tree = {
        "m": {"w": jnp.arange(12.0).reshape(3, 4), "b": np.arange(5), "text": "x", "none": None},
        "key": jax.random.key(3, impl="rbg"),
        "list": [jnp.ones(2, jnp.bfloat16)],
    }
    for name, options in DRIVERS.items():
        path = Path(saved(f"{folder}/{name}", tree, **options))
        whole = contents(path)
        files = sorted(each.relative_to(path) for each in path.rglob("*") if each.is_file())
        data = {file: (path / file).read_bytes() for file in files}
        for file in files:
            for damaged in (None, b"", data[file][: len(data[file]) // 2]):
                require_sound_or_refused(path, {file: damaged}, data, whole)
            for other in files[files.index(file) + 1 :]:
                if other.parent == file.parent or other.name == file.name:
                    require_sound_or_refused(path, {file: data[other], other: data[file]}, data, whole)


def require_sound_or_refused(
    path: Path, damage: dict[Path, bytes | None], data: dict[Path, bytes], whole: Any
) -> None:
    for file, content in damage.items():
        (path / file).unlink() if content is None else (path / file).write_bytes(content)
    with contextlib.suppress(reknit.ReknitError):
        assert contents(path) == whole, damage.keys()
    for file in damage:
        (path / file).write_bytes(data[file])


def contents(path: Path) -> Any:
    with reknit.open(path) as checkpoint:
        tensors = {
            (item, fqn): (spec, checkpoint.read(item, fqn).tobytes())
            for item in checkpoint.items
            for fqn, spec in checkpoint.tensors[item].items()
        }
        return tensors, dict(checkpoint.values)


class OwnFiles(real.CheckpointHandler):  # type: ignore[misc]
    """A handler that writes a file of its own."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "own.bin").write_bytes(args.item)

    def restore(self, directory: Any, args: Any = None) -> Any:
        return (directory / "own.bin").read_bytes()


@real.args.register_with_handler(OwnFiles, for_save=True, for_restore=True)
@dataclass
class OwnFilesArgs(real.args.CheckpointArgs):  # type: ignore[misc]
    item: Any = None


class OwnJsonHandler(OwnFiles):
    """A handler whose name ends as that of one of Orbax."""


class OwnMetadata(OwnFiles):
    """A handler that writes a file under the name that Orbax has for a document."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "own.bin").write_bytes(args.item)
        (directory / "metadata").write_text('{"version": 1}')


@real.args.register_with_handler(OwnJsonHandler, for_save=True, for_restore=True)
@dataclass
class OwnJsonArgs(real.args.CheckpointArgs):  # type: ignore[misc]
    item: Any = None


@real.args.register_with_handler(OwnMetadata, for_save=True, for_restore=True)
@dataclass
class OwnMetadataArgs(real.args.CheckpointArgs):  # type: ignore[misc]
    item: Any = None


def check_items_of_a_step_come_along_or_are_named(folder: str) -> None:
    numpy_state, generator = np.random.get_state(), np.random.default_rng(3).bit_generator.state
    options = real.CheckpointManagerOptions(best_fn=lambda found: found["loss"], step_prefix="run")
    with real.CheckpointManager(f"{folder}/old", options=options, metadata={"all": 1}) as manager:
        args = real.args.Composite(
            state=real.args.StandardSave({"w": jnp.ones(4)}),
            key=real.args.JaxRandomKeySave(jax.random.key(5)),
            raw=real.args.JaxRandomKeySave(jax.random.PRNGKey(6)),
            legacy=real.args.NumpyRandomKeySave(numpy_state),
            numpy=real.args.NumpyRandomKeySave({"state": generator["state"]["state"] % 1000, "n": 1}),
            notes=real.args.JsonSave({"a": [1, None, float("inf")]}),
            array=real.args.ArraySave(jnp.arange(3.0)),
            own=OwnFilesArgs(b"x"),
            own_json=OwnJsonArgs(b"x"),
            own_metadata=OwnMetadataArgs(b"x"),
        )
        manager.save(3, args=args, metrics={"loss": float("nan")}, custom_metadata={"who": "me"})
        manager.wait_until_finished()
    path, new = f"{folder}/old/run_3", f"{folder}/new"
    report = import_checkpoint(path, new)
    assert report.step == 3
    assert report.unread == {
        "own": "OwnFiles writes files of its own",
        "own_json": "OwnJsonHandler writes files of its own",
        "own_metadata": "OwnMetadata writes files of its own",
    }
    for place in (path, new):
        live: dict[str, Any] = {
            "state": {"w": jnp.zeros(4)},
            "key": jax.random.key(0),
            "raw": jax.random.PRNGKey(0),
            "legacy": ("", np.zeros(624, np.uint32), 0, 0, 1.0),
            "numpy": {"state": 0, "n": 0},
            "notes": {},
            "metrics": {},
            "custom_metadata": {},
            "array": jnp.zeros(3),
        }
        assert (reknit.load(place, live).step, live["state"]["w"].tolist(), live["array"].tolist()) == (
            3,
            [1.0] * 4,
            [0, 1, 2],
        )
        assert bits(live["key"]) == bits(jax.random.key(5))
        assert bits(live["raw"]) == bits(jax.random.PRNGKey(6))
        assert str(live["legacy"]) == str(numpy_state)
        assert live["notes"] == {"a": [1, None, float("inf")]}
        assert np.isnan(live["metrics"]["loss"])
        assert live["custom_metadata"] == {"who": "me"}
    assert "own" in str(reknit.load(path, {"state": {"w": jnp.zeros(4)}}).unchecked)


def check_a_prefix_of_a_step_counts_beside_another_step(folder: str) -> None:
    args = real.args.Composite(state=real.args.StandardSave({"w": jnp.ones(4)}))
    names = {"gemma_2": None, "12": 12, "run/a_3": 3, "run/a_4": 4, "run/b_5": None}
    for name in names:
        with real.Checkpointer(real.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(f"{folder}/{name}", args=args)
    for name, step in names.items():
        with reknit.open(f"{folder}/{name}") as checkpoint:
            assert checkpoint.step == step, name
    for metadata in (None, {"who": "me"}):
        root = f"{folder}/managed-{metadata is None}"
        options = real.CheckpointManagerOptions(step_prefix="run")
        with real.CheckpointManager(root, options=options, metadata=metadata) as manager:
            manager.save(3, args=args)
            manager.wait_until_finished()
        with reknit.open(f"{root}/run_3") as checkpoint:
            assert checkpoint.step == (3 if metadata else None)


def check_a_tree_that_is_a_list_is_opened_and_a_bare_array_refused(folder: str) -> None:
    path = saved(f"{folder}/array", jnp.arange(3.0))
    raises(FormatError, "a single array without a name", lambda: reknit.open(path))
    with reknit.open(saved(f"{folder}/list", [jnp.ones(1), jnp.zeros(2)])) as checkpoint:
        assert checkpoint.items == ("0", "1")


def check_a_save_that_orbax_did_not_finish_is_refused(folder: str) -> None:
    path = Path(saved(f"{folder}/3", {"m": {"w": jnp.ones(4)}}))
    unfinished = path.rename(f"{path}.orbax-checkpoint-tmp")
    raises(FormatError, "did not finish this save", lambda: reknit.open(unfinished))


def check_a_lost_item_is_damage_and_closes_no_other_one(folder: str) -> None:
    with real.CheckpointManager(f"{folder}/run", item_names=("state", "notes", "unused")) as manager:
        args = real.args.Composite(
            state=real.args.StandardSave({"w": jnp.ones(4)}), notes=real.args.JsonSave({"a": 1})
        )
        manager.save(3, args=args)
        manager.wait_until_finished()
    assert reknit.verify(f"{folder}/run/3").ok
    for lost in ("notes", "notes/metadata", "state", "state/_METADATA"):
        shutil.copytree(f"{folder}/run/3", f"{folder}/copy")
        path = Path(folder, "copy", lost)
        path.unlink() if path.is_file() else shutil.rmtree(path)
        if "/" in lost:
            raises(CorruptError, lost.partition("/")[0], lambda: reknit.open(f"{folder}/copy"))
        else:
            require_lost(f"{folder}/copy", lost)
        shutil.rmtree(f"{folder}/copy")


def require_lost(path: str, lost: str) -> None:
    live: dict[str, Any] = {"state": {"w": np.zeros(4, np.float32)}, "notes": {}}
    raises(MismatchError, "its folder is missing", lambda: reknit.load(path, live))
    assert (live["state"]["w"].tolist(), live["notes"]) == ([0] * 4, {})
    (left,) = {*live} - {lost}
    reknit.load(path, {left: live[left]})
    assert live["state"]["w"].any() == (left == "state")
    for level in ("metadata", "data"):
        (problem,) = reknit.verify(path, level).problems
        assert f"{lost} cannot be read: its folder is missing" in problem


_NARROW = (
    "int2",
    "int4",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
"""The types of at most a byte that Orbax writes, besides integers of NumPy."""


def check_leaves_without_a_place_in_reknit_are_named_and_close_nothing(folder: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "orbax.md"
    (row,) = re.findall(r"^\| leaves of (.*?) \|", page.read_text(), re.MULTILINE)
    lacking = re.findall(r"`(\w+)`", row)
    kinds = {name: np.dtype(getattr(ml_dtypes, name)) for name in lacking}
    tree = {"m": {"w": np.ones(3), **{name: np.zeros(4, kind) for name, kind in kinds.items()}}}
    path = saved(f"{folder}/c", tree)
    bytes_each = [name for name in _NARROW if name not in lacking]
    others = {name: np.zeros(4, np.dtype(getattr(ml_dtypes, name))) for name in bytes_each}
    with reknit.open(saved(f"{folder}/others", {"m": others})) as checkpoint:
        assert set(checkpoint.tensors["m"]) == set(bytes_each)
    with reknit.open(path) as checkpoint:
        assert checkpoint.read("m", "w").tolist() == [1, 1, 1]
        assert list(checkpoint.tensors["m"]) == ["w"]
        assert {entry.name for entry in checkpoint.manifest.unread} == {f"m/{name}" for name in lacking}
        raises(FormatError, "its dtype, int4", lambda: checkpoint.read("m", "int4"))
    target = {"m": {"w": np.zeros(3)}}
    raises(MismatchError, "m/float4", lambda: reknit.load(path, target))
    assert not target["m"]["w"].any()
    report = reknit.load(path, target, strict=[f"!m/{name}" for name in lacking])
    assert target["m"]["w"].tolist() == [1, 1, 1]
    assert "its dtype, int4" in (report.unchecked or "")
    wanted = {"m": {"w": np.zeros(3), "int4": np.zeros(4, np.int8)}}
    raises(MismatchError, "its dtype, int4", lambda: reknit.load(path, wanted))
    import_checkpoint(path, f"{folder}/new")
    said = subprocess.run(
        [sys.executable, "-m", "reknit", "diff", path, f"{folder}/new"], capture_output=True, text=True
    )
    assert said.returncode == 1
    assert said.stdout.count("not compared: of A, reknit does not have its dtype") == len(lacking)
    for command in ("show", "verify"):
        said = subprocess.run([sys.executable, "-m", "reknit", command, path], capture_output=True, text=True)
        assert "m/int4" in said.stdout


def check_leaves_that_orbax_wrote_to_one_place_are_named_and_close_nothing(folder: str) -> None:
    ones, zeros = np.ones(2), np.zeros(2)
    trees: dict[str, tuple[dict[str, Any], set[str]]] = {
        "arrays": ({"a.b": ones, "a": {"b": zeros}}, {"m/a.b", "m/a/b"}),
        "lists": ({"a.0": ones, "a": [zeros]}, {"m/a.0", "m/a/0"}),
        "numbers": ({"a.b.c": 1, "a": {"b": {"c": 2}, "b.c": 3}}, {"m/a.b.c", "m/a/b/c", "m/a/b.c"}),
        "texts": ({"a.b": "x", "a": {"b": "y"}}, {"m/a.b", "m/a/b"}),
        "kinds": ({"a.b": ones, "a": {"b": "y"}}, set()),
        "empty": ({"a.b": ones, "a": {"b": None}}, set()),
    }
    for name, (tree, names) in trees.items():
        path = saved(f"{folder}/{name}", {"m": {**tree, "w": np.full(3, 7.0)}})
        with reknit.open(path) as checkpoint:
            assert {entry.name for entry in checkpoint.manifest.unread} == names, name
            assert checkpoint.read("m", "w").tolist() == [7, 7, 7]
        target = {"m": {"w": np.zeros(3), **jax.tree.map(lambda leaf: leaf * 0, tree)}}
        if not names:
            reknit.load(path, target)
            assert bits(target["m"]["a.b"]) == bits(ones)
            continue
        raises(
            MismatchError,
            "and another leaf to one place, 'm.a.",
            lambda at=path, to=target: reknit.load(at, to),
        )
        assert not target["m"]["w"].any()
        reknit.load(path, only := {"m": {"w": np.zeros(3)}}, strict=[f"!{each}" for each in sorted(names)])
        assert only["m"]["w"].tolist() == [7, 7, 7]
    items = saved(f"{folder}/items", {"m.a": {"b": ones}, "m": {"a": {"b": zeros}}, "n": {"w": ones}})
    with reknit.open(items) as checkpoint:
        assert {entry.name for entry in checkpoint.manifest.unread} == {"m.a/b", "m/a/b"}
        assert [item for item, inside in checkpoint.tensors.items() if inside] == ["n"]


def check_a_tree_of_texts_alone_loads(folder: str) -> None:
    target = {"m": {"name": "", "of": {"it": ""}}}
    reknit.load(saved(f"{folder}/c", {"m": {"name": "x", "of": {"it": "y"}}}), target)
    assert target == {"m": {"name": "x", "of": {"it": "y"}}}


def check_arrays_are_read_as_those_of_jax(folder: str) -> None:
    tree: dict[str, Any] = {
        "m": {"w": jnp.arange(8.0), "half": jnp.ones(2, jnp.bfloat16), "text": "x"},
        "key": jax.random.key(1, impl="rbg"),
    }
    path = saved(f"{folder}/c", tree)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    with reknit.open(path) as checkpoint:
        found = checkpoint.read_all(framework="jax")
        assert bits(found["m"]["w"]) == bits(tree["m"]["w"])
        assert (type(found["m"]["half"]), found["m"]["half"].dtype) == (type(tree["m"]["w"]), jnp.bfloat16)
        assert found["key"][""].dtype == tree["key"].dtype
        assert bits(found["key"][""]) == bits(tree["key"])
        assert checkpoint.read("m", "w", slice(2, 4), framework="jax").tolist() == [2, 3]
        cut = checkpoint.read_all(["m"], framework="jax", sharding={"m/w": rows})["m"]["w"]
        assert cut.sharding == rows
        assert cut.tolist() == tree["m"]["w"].tolist()
        there = checkpoint.read_all(["m"], framework="jax", device=jax.devices()[2])["m"]["w"]
        assert there.devices() == {jax.devices()[2]}
        both = {"device": jax.devices()[0], "sharding": rows}
        raises(UsageError, "leave one out", lambda: checkpoint.read_all(framework="jax", **both))
    reknit.save(f"{folder}/wide", {"m": {"w": np.arange(3)}})
    with reknit.open(f"{folder}/wide") as checkpoint:
        raises(StateError, "jax_enable_x64", lambda: checkpoint.read_all(framework="jax"))
