"""Checks that the remedies at the door for Orbax's users can be followed: an error, then its remedy."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as real
import pytest

import reknit
from reknit.integrations import orbax as ocp
from reknit.integrations.orbax import v1 as v1
from tests.followed import said
from tests.jax.orbax_trees import Iterator, IteratorArgs
from tests.runs.owners import Owner

STANDARD, PYTREE = real.args.StandardRestore, real.args.PyTreeRestore
NAMES: dict[str, Any] = {
    "ocp": ocp,
    "reknit": reknit,
    "LoadOptions": reknit.LoadOptions,
    "PyTreeRestore": PYTREE,
}


def tree() -> dict[str, Any]:
    return {"params": {"w": jnp.arange(4.0)}, "opt": {"m": jnp.ones(4)}}


def zeros() -> dict[str, Any]:
    found: dict[str, Any] = jax.tree.map(jnp.zeros_like, tree())
    return found


def require_saved(found: Any, *parts: str) -> None:
    for part in parts or ("params", "opt"):
        assert jax.tree.map(jnp.array_equal, found[part], tree()[part]) in ({"w": True}, {"m": True})


def check_a_save_that_is_refused_is_made_as_the_remedy_says(folder: str) -> None:
    with ocp.CheckpointManager(folder) as manager:

        def save(step: int, **given: Any) -> None:
            assert manager.save(step, force=True, **given)
            require_saved(manager.restore(step))

        call = said(lambda: save(1), r"args=.*")
        eval(f"save(1, {call})", NAMES | {"save": save, "state": tree()})
        with_args = partial(save, args=ocp.args.StandardSave(tree()))
        assert said(lambda: with_args(1), "delete it first, or save another step")
        manager.delete(1)
        with_args(1)
        with_args(2)
        kinds = said(lambda: manager.save(3, args=real.args.ProtoSave(None)), "pass .*")
        for name in ("StandardSave", "PyTreeSave", "ArraySave", "JsonSave"):
            assert name in kinds
        items = {
            "standard": ocp.args.StandardSave(tree()),
            "pytree": ocp.args.PyTreeSave(tree()),
            "array": ocp.args.ArraySave(jnp.ones(2)),
            "json": ocp.args.JsonSave({"a": 1}),
            "jax_key": ocp.args.JaxRandomKeySave(jax.random.key(1)),
        }
        assert manager.save(3, args=ocp.args.Composite(**items))
        assert {*manager.restore(3).keys()} == {*items}
        own = ocp.args.Composite(custom_metadata=ocp.args.JsonSave({}))
        assert said(lambda: manager.save(4, args=own), "give yours another name")
        assert manager.save(4, args=ocp.args.Composite(notes=ocp.args.JsonSave({})))
    handler = ocp.PyTreeCheckpointHandler()
    call = said(lambda: handler.save(f"{folder}/one", args=tree()), r"args=.*")
    eval(
        f"handler.save(path, {call})", NAMES | {"handler": handler, "path": f"{folder}/one", "state": tree()}
    )
    again = partial(ocp.PyTreeCheckpointer().save, f"{folder}/one", tree())
    eval(f"again({said(again, 'force=True')})", {"again": again})
    again = partial(v1.save, f"{folder}/one", tree())
    eval(f"again({said(again, 'overwrite=True')})", {"again": again})
    require_saved(v1.load(f"{folder}/one"))


def check_a_restore_that_does_not_fit_is_made_as_the_remedy_says(folder: str) -> None:
    some = {"params": zeros()["params"]}
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()

        def restore(args: Any) -> Any:
            return manager.restore(1, args=args)

        for wrong in (STANDARD(some), STANDARD({**zeros(), "new": jnp.ones(1)})):
            assert said(lambda wrong=wrong: restore(wrong), r"PyTreeRestore\(\.\.\., partial_restore=True\)")  # type: ignore[misc]
            call = said(lambda wrong=wrong: restore(wrong), r"reknit\.load\('.*', state, \.\.\.\)")  # type: ignore[misc]
            state = {"default": wrong.item}
            eval(call.replace("...", "strict=False"), NAMES | {"state": state})
            require_saved(state["default"], "params")
        require_saved(restore(PYTREE(some, partial_restore=True)), "params")
        more = PYTREE({**some, "new": jnp.ones(1)}, partial_restore=True)
        assert said(lambda: restore(more), "restore with the target of the save, or leave these names out")
        require_saved(restore(STANDARD(zeros())))

        longer = {**some, "opt": {"m": jnp.zeros(5)}}
        call = said(lambda: restore(STANDARD(longer)), r"reknit\.load\('.*', state, \.\.\.\)")
        state, option = {"default": longer}, reknit.LoadOptions(allow_shape_mismatch=("default/opt/*",))
        eval(call.replace("...", "options=option"), NAMES | {"state": state, "option": option})
        assert state["default"]["opt"]["m"].tolist() == [1, 1, 1, 1, 0]
        cut_off = STANDARD(zeros(), strict=False)
        assert said(lambda: restore(cut_off), "with the shapes that were saved, and pad or cut afterwards")
        assert said(
            lambda: restore(real.args.ProtoRestore(None)), "pass the Restore that belongs to the Save"
        )
        for_each = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(strict=False), zeros())
        assert said(lambda: restore(PYTREE(zeros(), for_each)), "leave it out")
        require_saved(restore(PYTREE(zeros(), jax.tree.map(lambda _: ocp.ArrayRestoreArgs(), zeros()))))

        renamed = {"weights": some["params"], "opt": zeros()["opt"]}
        call = said(lambda: restore(PYTREE(renamed, transforms={"a": 1})), r"reknit\.load\(.*\)")
        rule = reknit.transforms.names(rename={"default/params/": "default/weights/"})
        state = {"default": renamed}
        names = NAMES | {"path": f"{folder}/step_00000001", "state": state, "rule": rule}
        eval(call.replace("[...]", "[rule]"), names)
        assert state["default"]["weights"]["w"].tolist() == [0, 1, 2, 3]
        absent = ocp.args.Composite(model=None)
        (item,) = said(lambda: restore(absent), "it has .*").split()[2:]
        require_saved(restore(ocp.args.Composite(**{item: None}))[item])


def check_an_item_that_is_not_there_is_named_with_those_that_are(folder: str) -> None:
    path = f"{folder}/several"
    v1.save_checkpointables(path, {"params": tree(), "notes": {"a": 1}})
    for call in (v1.load, v1.metadata):
        for given in ({}, {"checkpointable_name": "absent"}):
            cause = partial(call, path, **given)
            items = said(cause, "it has .*").removeprefix("it has ").split(", ")
            assert sorted(items) == ["notes", "params"]
        assert call(path, checkpointable_name="params")["params"]["w"].shape == (4,)
    v1.save(f"{folder}/one", tree())
    assert said(lambda: v1.load(f"{folder}/one", checkpointable_name="absent"), "it has state")
    with real.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/tree", tree())
    restore = ocp.PyTreeCheckpointer().restore
    some = {"params": zeros()["params"]}
    remedy = said(lambda: restore(f"{folder}/tree", some), r"PyTreeRestore\(.*\)")
    args = eval(remedy.replace("(", "(some, "), NAMES | {"some": some})
    require_saved(restore(f"{folder}/tree", args=args), "params")
    assert said(
        lambda: restore(f"{folder}/tree", {**zeros(), "new": jnp.ones(1)}), "items are 'opt', 'params'"
    )
    require_saved(restore(f"{folder}/tree", zeros()))

    class OwnFiles:
        save = load = print

    class Stateful(OwnFiles):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    write = partial(v1.save_checkpointables, f"{folder}/own")
    assert said(lambda: write({"x": OwnFiles()}), "give it state_dict and load_state_dict")
    write({"x": Stateful()})
    found = Stateful()
    v1.load_checkpointables(f"{folder}/own", {"x": found})
    assert found.loaded == {"a": 1}
    with pytest.raises(AttributeError, match=r"if orbax.checkpoint has it, import it from there") as caught:
        getattr(ocp, "ProtoCheckpointHandler")  # noqa: B009
    assert getattr(real, str(caught.value.name))


def check_a_manager_that_is_refused_is_made_as_the_remedy_says(folder: str) -> None:
    def made(at: str = "run", library: Any = ocp, **given: Any) -> Any:
        options = given.pop("options", {})
        return library.CheckpointManager(
            f"{folder}/{at}", options=real.CheckpointManagerOptions(**options), **given
        )

    args = ocp.args.StandardSave(tree())
    assert said(lambda: made(metadata={"a": 1}), "custom_metadata to save, or an item with args.JsonSave")
    run = partial(v1.training.Checkpointer, f"{folder}/run")
    assert said(lambda: run(custom_metadata={"a": 1}), "custom_metadata to save")
    assert said(lambda: run(context=1), "pass save_options")
    with run(save_options=reknit.SaveOptions()) as training:
        assert training.save(0, tree(), custom_metadata={"a": 1})
    for option in ("todelete_subdir", "todelete_full_path"):
        assert said(lambda option=option: made(options={option: "old"}), "leave it out")  # type: ignore[misc]
    with made() as manager:
        assert manager.metadata(0).custom_metadata == {"a": 1}
        assert manager.save(1, args=args)
    active = real.options.MultiprocessingOptions(active_processes={0})
    assert said(
        lambda: made(options={"multiprocessing_options": active}),
        "call reknit.Checkpointer with a group of these processes",
    )
    group = reknit.connect(0, 1, at=f"{folder}/meeting")
    with reknit.Checkpointer(f"{folder}/group", group=group, wait=True) as checkpointer:
        assert checkpointer.save(1, {"default": tree()})
    group.close()

    with made("others", real) as manager:
        manager.save(7, args=args)
    for options in ({}, {"read_only": True}):
        call = said(lambda options=options: made("others", options=options), r"reknit\.load\(.*, state\)")  # type: ignore[misc]
        state = {"default": zeros()}
        with made(f"mine-{len(options)}") as manager:
            assert manager.latest_step() is None
            eval(call, NAMES | {"state": state})
            require_saved(state["default"])


def check_a_folder_of_a_run_that_lives_is_read_and_taken_as_the_remedy_says(folder: str) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree()))
    owner = Owner(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reknit.engine.stored.heartbeat.time", SimpleNamespace(sleep=lambda _: owner.beat()))
        words = said(lambda: ocp.CheckpointManager(folder), "end that run first.*")
        assert "`read_only`" in words
        reading = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(folder, options=reading) as manager:
            require_saved(manager.restore(3))
        with ocp.CheckpointManager(f"{folder}-own") as manager:
            assert manager.latest_step() is None
        with eval(
            f"make(folder, {words.rpartition('; ')[2].partition(' takes')[0]})",
            {"make": ocp.CheckpointManager, "folder": folder},
        ) as manager:
            assert manager.save(4, args=ocp.args.StandardSave(tree()))
        assert not owner.owns()
    first = Owner(f"{folder}-ended")
    first.beat(ends=True)
    with ocp.CheckpointManager(f"{folder}-ended") as manager:
        assert manager.save(1, args=ocp.args.StandardSave(tree()))


def save_positions(folder: str) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(
            1,
            args=ocp.args.Composite(
                iter=IteratorArgs(Iterator(17)), state=ocp.args.StandardSave({"w": jnp.ones(2)})
            ),
        )


def restore_positions(folder: str, fits: bool) -> None:
    """Restore on as many processes as saved, or follow the remedies on another number."""
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        fresh = Iterator(0)
        both = partial(manager.restore, 1, args=ocp.args.Composite(iter=IteratorArgs(fresh), state=None))
        if fits:
            both()
            assert fresh.get_state() == Iterator(17).get_state()
        else:
            assert said(both, "restore it on as many processes as saved it, or leave it out")
            found = manager.restore(1, args=ocp.args.Composite(state=None))
            assert found["state"]["w"].tolist() == [1, 1]
