"""Checks of the manager of steps in one process, beside the real one of Orbax."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as real
import pytest
from orbax.checkpoint import checkpoint_managers as policies

import reknit
from reknit.errors import CheckpointExistsError, CheckpointNotFoundError, FencedError, UsageError
from reknit.integrations import orbax as ocp
from reknit.runs import load_step
from tests.faults.nursery import wait_until
from tests.jax.trees import raises
from tests.runs.owners import Owner

LOSSES = [3.0, 1.0, 4.0, 1.0, 5.0, 2.0]
RULES: list[dict[str, Any]] = [
    {},
    {"save_interval_steps": 3},
    {"save_interval_steps": 4, "save_on_steps": (5,), "max_to_keep": 2},
    {"max_to_keep": 2, "keep_period": 3},
    {"should_save_fn": lambda step, last: step % 2 == 1, "max_to_keep": 2},
    {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 3},
    {"best_fn": lambda metrics: metrics["loss"], "max_to_keep": 3, "keep_time_interval": timedelta(days=1)},
    {"save_decision_policy": real.checkpoint_managers.SpecificStepsPolicy((2, 3, 5))},
    {"preservation_policy": real.checkpoint_managers.EveryNSteps(3)},
    {"enable_async_checkpointing": False, "max_to_keep": 1},
]


def tree(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4,), float(step)), "step": step}


def check_options_decide_as_those_of_orbax(folder: str) -> None:
    for number, rules in enumerate(RULES):
        answers = []
        for name, library in (("real", real), ("ours", ocp)):
            where = f"{folder}/{number}/{name}"
            with library.CheckpointManager(where, options=real.CheckpointManagerOptions(**rules)) as manager:
                saved = [
                    manager.save(
                        step, args=real.args.StandardSave(tree(step)), metrics={"loss": LOSSES[step]}
                    )
                    for step in range(len(LOSSES))
                ]
                manager.wait_until_finished()
                kept = [*manager.all_steps()]
                answers.append((saved, kept, manager.latest_step(), manager.best_step()))
        (saved, kept, _, best), (ours, ours_kept, latest, ours_best) = answers
        newest = max(step for step, is_saved in enumerate(saved) if is_saved)
        # The newest step is never removed here, under any policy.
        assert (ours, ours_kept) == (saved, sorted({*kept, newest})), (rules, answers)
        assert latest == newest
        if "best_fn" in rules:
            assert ours_best == best, rules


def check_a_step_with_an_unknown_metric_is_worse_than_any_other(folder: str) -> None:
    def loss(metrics: Any) -> Any:
        return metrics["loss"]

    nan, inf = float("nan"), float("inf")
    least = policies.BestN(get_metric_fn=loss, reverse=True, n=2)
    rules: list[tuple[dict[str, Any], list[float], list[int], int | None]] = [
        ({"best_fn": loss, "best_mode": "min", "max_to_keep": 2}, [5.0, nan, 1.0, 4.0], [2, 3], 2),
        ({"best_fn": loss, "max_to_keep": 2}, [5.0, 9.0, inf, 3.0, 4.0], [0, 1, 4], 1),
        ({"best_fn": loss, "max_to_keep": 2}, [5.0, inf], [0, 1], 0),
        ({"best_fn": loss, "max_to_keep": 2}, [nan, nan, nan], [1, 2], None),
        ({"best_fn": loss, "preservation_policy": least}, [5.0, nan, 1.0, 4.0, 3.0], [2, 4], 4),
        (
            {"preservation_policy": policies.AnyPreservationPolicy([least, policies.EveryNSteps(4)])},
            [5.0, nan, 1.0, 4.0, 6.0, 7.0],
            [0, 2, 3, 4, 5],
            5,
        ),
    ]
    for number, (chosen, losses, kept, best) in enumerate(rules):
        options = ocp.CheckpointManagerOptions(**chosen)
        with ocp.CheckpointManager(f"{folder}/{number}", options=options) as manager:
            for step, value in enumerate(losses):
                assert manager.save(step, args=ocp.args.StandardSave(tree(step)), metrics={"loss": value})
            manager.wait_until_finished()
            assert (manager.all_steps(), manager.best_step()) == (kept, best), chosen
    assert least.get_metric_fn is loss


def check_a_step_that_was_removed_meanwhile_is_not_listed_after_the_wait(folder: str) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(folder, options=options) as manager:
        manager.save(0, args=ocp.args.StandardSave(tree(0)))
        manager.wait_until_finished()
        manager.save(1, args=ocp.args.StandardSave(tree(1)))
        wait_until(lambda: not manager.is_saving_in_progress(), 60)
        assert manager.all_steps() == [0, 1]
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def check_steps_and_metrics_are_those_of_the_folder(folder: str) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: -metrics["loss"])
    with ocp.CheckpointManager(folder, options=options) as manager:
        assert (manager.all_steps(), manager.latest_step(), manager.best_step()) == ([], None, None)
        with pytest.raises(FileNotFoundError, match="no step"):
            manager.restore(None)
        for step in (2, 5):
            assert manager.save(step, args=ocp.args.StandardSave(tree(step)), metrics={"loss": step})
        assert manager.all_steps() == [2, 5]
        assert not manager.should_save(5)
        assert not manager.should_save(3)
        args = ocp.args.StandardSave(tree(5))
        raises(CheckpointExistsError, "step 5 exists", lambda: manager.save(5, args=args, force=True))
        assert manager.restore(None)["step"] == 5
        assert not manager.is_saving_in_progress()
        manager.check_for_errors()
        assert str(manager.directory) == folder
    assert [step.metrics for step in reknit.steps(folder)] == [{"loss": 2.0}, {"loss": 5.0}]
    with ocp.CheckpointManager(folder, options=options) as manager:
        assert (manager.all_steps(), manager.best_step(), manager.metrics(5)) == ([2, 5], 2, {"loss": 5.0})
        assert manager.save(7, args=ocp.args.StandardSave(tree(7)), custom_metadata={"why": ["x"]})
        assert manager.metadata(7).custom_metadata == {"why": ["x"]}
        assert manager.metadata(7).metrics is None
        assert manager.item_metadata(7)["w"].shape == (4,)
        manager.delete(5)
        assert manager.all_steps() == [2, 7]
        raises(CheckpointNotFoundError, "step_00000005", lambda: manager.restore(5))
    reading = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder, options=reading) as manager:
        assert not manager.save(9, args=ocp.args.StandardSave(tree(9)), force=True)
        assert manager.restore(7)["step"] == 7
        assert manager.latest_step() == 7


def check_a_manager_is_refused_while_another_run_lives_and_says_what_it_restores(folder: str) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree(3)))
    owner = Owner(folder)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reknit.engine.stored.heartbeat.time", SimpleNamespace(sleep=lambda _: owner.beat()))
        raises(UsageError, "belongs to a run that lives", lambda: ocp.CheckpointManager(folder))
        assert owner.owns()
        patch.setattr(load_step.logger, "log", lambda level, text, *parts: lines.append(text % parts))
        reading = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(folder, options=reading) as manager:
            assert manager.restore(3)["step"] == 3
        ocp.CheckpointManager(folder, other_run="take_over").close()
    assert lines == [f"resumed from {folder}/step_00000003 (step 3, saved by 1 rank, loaded by 1 rank)"]


EARLIER = """
import os, signal, sys
import numpy as np
import reknit
from tests.faults.nursery import agents_of
if __name__ == "__main__":
    run = reknit.Checkpointer(sys.argv[1])
    run.save(3, {"default": {"w": np.full(4, 3.0), "step": 3}}).result()
    (agent,) = agents_of(os.getpid())
    os.kill(agent, signal.SIGSTOP)
    print(agent, flush=True)
    run.save(4, {"default": {"w": np.full(4, 4.0), "step": 4}}).staged()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def check_a_manager_waits_for_the_agents_of_an_earlier_run(folder: str) -> None:
    script = Path(f"{folder}.py")
    script.write_text(EARLIER)
    killed = subprocess.run([sys.executable, str(script), folder], stdout=subprocess.PIPE, check=False)
    going_on = threading.Timer(0.5, os.kill, (int(killed.stdout), signal.SIGCONT))
    going_on.start()
    with ocp.CheckpointManager(folder) as manager:
        going_on.join()
        assert manager.latest_step() == 4
        assert manager.save(5, args=ocp.args.StandardSave(tree(5)))


def check_the_saves_of_an_earlier_run_cannot_overtake_a_new_one(folder: str) -> None:
    earlier = reknit.Checkpointer(folder)
    earlier.save(3, {"default": tree(3)})
    earlier.wait()
    manager = ocp.CheckpointManager(folder)
    assert manager.latest_step() == 3
    assert manager.save(4, args=ocp.args.StandardSave(tree(4)))
    manager.wait_until_finished()
    late = earlier.save(5, {"default": tree(5)})
    assert late is not None
    raises(FencedError, "newer run", late.result)
    manager.close()
    assert [step.step for step in reknit.steps(folder)] == [3, 4]


def check_calls_of_older_scripts_still_work(folder: str) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    one = ocp.CheckpointManager(f"{folder}/one", ocp.PyTreeCheckpointer(), options)
    assert one.save(1, tree(1))
    assert one.restore(1, items=tree(0))["w"].tolist() == [1.0] * 4
    one.close()
    handlers = {
        "state": ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)),
        "notes": ocp.Checkpointer(ocp.JsonCheckpointHandler()),
    }
    two = ocp.CheckpointManager(f"{folder}/two", handlers, options)
    assert two.save(1, {"state": tree(1), "notes": {"a": [1, None]}})
    found = two.restore(1, items={"state": tree(0), "notes": None})
    assert (found["notes"], found["state"]["step"]) == ({"a": [1, None]}, 1)
    two.close()


def check_a_loop_like_that_of_maxtext(folder: str) -> None:
    manager = ocp.CheckpointManager(
        Path(folder),
        item_names=("items",),
        item_handlers={"items": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)},
        options=ocp.CheckpointManagerOptions(create=True, save_interval_steps=2),
    )
    state = {"params": {"w": jnp.arange(4.0)}, "opt": {"mu": jnp.ones(4)}, "step": jnp.asarray(2)}
    saves = ocp.args.Composite(items=ocp.args.PyTreeSave(item=state))
    assert manager.save(2, args=saves)
    restore = ocp.args.PyTreeRestore(
        item=state, restore_args=ocp.checkpoint_utils.construct_restore_args(state)
    )
    found = manager.restore(manager.latest_step(), args=ocp.args.Composite(items=restore))["items"]
    assert found["params"]["w"].tolist() == [0, 1, 2, 3]
    manager.close()
    # Only the parameters of another run, by the path that Orbax would give them.
    params = ocp.PyTreeCheckpointer().restore(
        Path(folder) / "2" / "items",
        item={"params": state["params"]},
        transforms={},
        restore_args={"params": ocp.checkpoint_utils.construct_restore_args(state["params"])},
    )
    assert params["params"]["w"].tolist() == [0, 1, 2, 3]


def check_a_folder_with_steps_of_orbax_alone_is_refused(folder: str) -> None:
    unrelated, used = Path(folder, "unrelated"), Path(folder, "used")
    unrelated.mkdir(parents=True)
    np.savez(unrelated / "vocabulary.npz", ids=np.arange(3))
    with ocp.CheckpointManager(str(unrelated)) as manager:
        assert manager.latest_step() is None
    with real.CheckpointManager(used) as manager:
        manager.save(7, args=real.args.StandardSave({"w": np.zeros(3)}))
    raises(UsageError, "7 is a checkpoint of Orbax", lambda: ocp.CheckpointManager(str(used)))


def check_wrong_calls_are_refused(folder: str) -> None:
    raises(UsageError, "metadata of the root", lambda: ocp.CheckpointManager(folder, metadata={"a": 1}))
    renamed = ocp.CheckpointManagerOptions(todelete_subdir="old")
    raises(UsageError, "removed, not renamed", lambda: ocp.CheckpointManager(folder, options=renamed))
    with pytest.raises(AttributeError, match="import it from there"):
        getattr(ocp, "ProtoCheckpointHandler")  # noqa: B009
    with ocp.CheckpointManager(folder) as manager:
        raises(UsageError, "save needs args", lambda: manager.save(1))
        raises(UsageError, "writes files of its own", lambda: manager.save(1, args=real.args.ProtoSave(None)))
        wrong = ocp.args.Composite(custom_metadata=ocp.args.JsonSave({}))
        raises(UsageError, "reknit's own", lambda: manager.save(1, args=wrong))
        assert manager.all_steps() == []


def check_a_folder_in_which_orbax_has_the_newest_step_is_refused(folder: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "prefix": {"step_prefix": "run"},
        "zeros": {"step_format_fixed_length": 8},
        "plain": {},
    }
    for name, options in kinds.items():
        root = f"{folder}/{name}"
        with real.CheckpointManager(root, options=real.CheckpointManagerOptions(**options)) as manager:
            manager.save(5, args=real.args.StandardSave({"w": jnp.ones(2)}))
            manager.wait_until_finished()
        Path(root, "llama_70").mkdir()
        for read_only in (False, True):
            chosen = ocp.CheckpointManagerOptions(read_only=read_only)
            with pytest.raises(UsageError, match=r"no step of reknit .*5 is a checkpoint of Orbax"):
                ocp.CheckpointManager(root, options=chosen)
        reknit.save(f"{root}/step_00000003", {"default": {"w": np.ones(2)}}, step=3)
        with pytest.raises(UsageError, match=r"newest step of reknit is 3 .*5 is a checkpoint of Orbax"):
            ocp.CheckpointManager(root)
        reknit.save(f"{root}/step_00000006", {"default": {"w": np.ones(2)}}, step=6)
        with ocp.CheckpointManager(root) as manager:
            assert manager.latest_step() == 6
