"""Callbacks of Lightning that change a checkpoint, or a training between its steps: all resume exactly."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.frameworks.numbers import same_value
from tests import ranks
from tests.integrations import lightning_hooks_job as jobs
from tests.optional import needs
from tests.running.examples import at_night, is_night
from tests.runs.owners import Owner

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs("lightning", "Lightning")

run = partial(ranks.run, warm="lightning")


def callbacks_of(kind: str) -> list[Any]:
    """Return new callbacks of a kind."""
    from lightning.pytorch import callbacks as known
    from torch import nn

    class OwnFinetuning(known.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze([pl_module.backbone, pl_module.norm], train_bn=False)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            parts: list[nn.Module] = [pl_module.norm, pl_module.backbone]
            if 1 <= epoch <= 2:
                self.unfreeze_and_add_param_group(parts[epoch - 1], optimizer, lr=0.05)

    made: dict[str, Callable[[], Any]] = {
        "ema": lambda: known.EMAWeightAveraging(decay=0.7),
        "late ema": lambda: known.EMAWeightAveraging(decay=0.7, update_starting_at_step=6),
        "ema of epochs": lambda: known.EMAWeightAveraging(update_every_n_steps=0, update_starting_at_epoch=1),
        "average": known.WeightAveraging,
        "swa": lambda: known.StochasticWeightAveraging(0.05, swa_epoch_start=2, annealing_epochs=2),
        "backbone": lambda: known.BackboneFinetuning(1, lambda epoch: 1.5),
        "own finetuning": OwnFinetuning,
        "accumulation": lambda: known.GradientAccumulationScheduler({1: 2}),
    }
    return [made[kind]()] if kind else []


def resumed(
    folder: str, kind: str, stops: tuple[int, ...], strategy: str = "auto", every: str = "steps"
) -> list[Any]:
    """Return the stops after which a training does not end as the one that never stopped."""
    from reknit.integrations.lightning import ReknitCheckpoint

    saves: dict[str, Any] = {"every_n_epochs": 1} if every == "epochs" else {"every_n_train_steps": 1}

    def train(root: str, stop: int | None = None) -> dict[str, Any]:
        module = jobs.net(
            filters="finetuning" in kind or kind == "backbone",
            schedules=kind in ("swa", "backbone"),
            sharded=strategy == "sharded",
        )
        checkpoint = ReknitCheckpoint(root, save_top_k=-1, **saves)
        torch.manual_seed(5 if stop is not None or "whole" in root else 9)
        loader = jobs.loader_of(shuffle=strategy == "auto")
        return jobs.train(
            checkpoint, callbacks_of(kind), module=module, strategy=strategy, loader=loader, stop=stop,
            max_epochs=4, max_steps=-1 if stop is None and every == "epochs" else 16,
        )  # fmt: skip

    whole, different = train(f"{folder}/whole"), list[Any]()
    for stop in stops:
        train(f"{folder}/{stop}", stop)
        rest = train(f"{folder}/{stop}")
        if not same_value(
            [rest["tensors"], rest["rates"], rest["first"], rest["step"]],
            [whole["tensors"], whole["rates"], whole["batches"][stop], whole["step"]],
        ):
            different.append(stop)
    return different


BY_DAY = {"ema": (6,), "swa": (6, 8), "backbone": (4, 6), "own finetuning": (4, 9)}
AT_NIGHT = {
    "ema": (4, 6),
    "late ema": (4,),
    "ema of epochs": (4,),
    "average": (6,),
    "swa": (4, 6, 8),
    "backbone": (2, 4, 6),
    "own finetuning": (4, 6, 9),
}
STOPS = AT_NIGHT if is_night() else BY_DAY
"""The steps after which the training with callbacks of a kind is stopped."""


@pytest.mark.parametrize("kind", STOPS)
def test_a_run_with_callbacks_resumes_exactly_anywhere(kind: str, tmp_path: Path) -> None:
    assert run(1, resumed, str(tmp_path), kind, STOPS[kind]) == [[]]


@at_night("a model with an average resumes on one rank, and a sharded model on two, by day")
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_copies_of_an_averaged_model_resume_exactly(kind: str, tmp_path: Path) -> None:
    assert run(2, resumed, str(tmp_path), kind, (6,), "ddp") == [[], []]


def test_unfrozen_parameters_that_ranks_share_resume_exactly(tmp_path: Path) -> None:
    assert run(2, resumed, str(tmp_path), "backbone", (6,), "sharded") == [[], []]


@pytest.mark.parametrize("every", ["epochs", "steps"])
def test_the_next_epoch_has_its_own_order_after_a_resume(every: str, tmp_path: Path) -> None:
    assert run(1, resumed, str(tmp_path), "", (4, 8) if is_night() else (8,), "auto", every) == [[]]


def edited(root: str, part: int) -> list[str]:
    """Return the hooks of a third of all whose trainings end otherwise than with Lightning's own files."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning

    from reknit.integrations.lightning import ReknitCheckpoint

    def edit(save: Any = None, load: Any = None) -> Any:
        hooks = {"on_save_checkpoint": save, "on_load_checkpoint": load}
        calls = {name: lambda self, t, m, c, hook=hook: hook(c) for name, hook in hooks.items() if hook}
        return type("Edit", (Callback,), calls)()

    def halves(c: Any) -> None:
        c["state_dict"] = {name: value / 2 for name, value in c["state_dict"].items()}
        c["mine"] = {"number": 3, "tensor": torch.ones(2)}

    def counted(c: Any) -> None:
        assert c["mine"]["number"] == 3
        assert bool((c["mine"]["tensor"] == 1).all())

    def slower(c: Any) -> None:
        c["optimizer_states"] = [{**one, "param_groups": [dict(g, lr=0.01) for g in one["param_groups"]]}
                                 for one in c["optimizer_states"]]  # fmt: skip

    def without_momentum(c: Any) -> None:
        for state in c["optimizer_states"][0]["state"].values():
            state["exp_avg"].zero_()

    def renamed(c: Any) -> None:
        c["state_dict"] = {f"x.{name}": value for name, value in c["state_dict"].items()}

    def renamed_back(c: Any) -> None:
        c["state_dict"] = {name.removeprefix("x."): value for name, value in c["state_dict"].items()}

    def rate_at_start(trainer: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 9.0

    starts = type("Starts", (Callback,), {"on_fit_start": lambda self, t, m: rate_at_start(t)})
    kinds: dict[str, Callable[[], Any]] = {
        "states and additions": lambda: edit(halves, counted),
        "optimizers at the save": lambda: edit(slower),
        "optimizers at the load": lambda: edit(load=slower),
        "tensors of optimizers": lambda: edit(load=without_momentum),
        "no optimizers": lambda: edit(load=lambda c: c.update(optimizer_states=[])),
        "a scheduler": lambda: edit(load=lambda c: c["lr_schedulers"][0].update(gamma=0.5)),
        "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3),
        "a rate at the start": starts,
        "names": lambda: None,
    }
    different = []
    for kind, made in list(kinds.items())[part::3]:
        ends = []
        for checkpoint in (
            partial(ModelCheckpoint, f"{root}/{kind}/files", save_last=True, every_n_epochs=1),
            partial(ReknitCheckpoint, f"{root}/{kind}/steps", every_n_epochs=1),
        ):
            for epochs in (2, 3):
                module = jobs.net(schedules=kind in ("a scheduler", "a rate at the start"))
                if kind == "names":
                    module.on_save_checkpoint, module.on_load_checkpoint = renamed, renamed_back
                callbacks = [one for one in [made()] if one is not None]
                end = jobs.train(checkpoint(), callbacks, module=module, max_epochs=epochs)
            ends.append([end["tensors"], end["rates"], end["step"], end["first"]])
        if not same_value(*ends):
            different.append(kind)
    return different


@pytest.mark.parametrize("part", range(3))
def test_hooks_find_and_change_what_they_do_in_files_of_lightning(part: int, tmp_path: Path) -> None:
    assert run(1, edited, str(tmp_path), part) == [[]]


def evaluated(root: str) -> tuple[bool, bool, bool]:
    """Return whether the best model is the average, in a trainer, in a plain module, and differs at all."""
    from reknit.integrations.lightning import ReknitCheckpoint

    end = jobs.train(ReknitCheckpoint(root, every_n_train_steps=4), callbacks_of("ema"), max_epochs=2)
    average = {
        name.removeprefix("average 0 module."): one
        for name, one in end["tensors"].items()
        if name.startswith("average 0 module.")
    }
    module, plain = jobs.net(), jobs.net()
    trainer = jobs.trainer_of([*callbacks_of("ema"), ReknitCheckpoint(root)])
    trainer.test(module, jobs.loader_of(), ckpt_path="best", verbose=False)
    reknit.load(f"{root}/step_00000008", {"model": plain})
    fresh = jobs.net().state_dict()
    return (
        same_value(module.tested, average),
        same_value(dict(plain.state_dict()), average),
        same_value(dict(fresh), average),
    )


def test_the_best_model_of_a_run_with_an_average_is_the_average(tmp_path: Path) -> None:
    assert run(1, evaluated, str(tmp_path)) == [(True, True, False)]


def refusals(root: str) -> list[str]:
    """Return the first line of the error of each training that cannot go on, and a mark for a gone remedy."""
    from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder, ModelCheckpoint

    from reknit.integrations.lightning import ReknitCheckpoint

    def outcome(checkpoint: Any, callbacks: Any = (), **given: Any) -> str:
        try:
            end = jobs.train(checkpoint, list(callbacks), max_epochs=3, **given)
        except reknit.ReknitError as error:
            return f"{error.message} -> {error.remedy}".replace(root, "ROOT")
        return f"began at {end['step'] - len(end['batches'])}"

    files, steps, other = f"{root}/files", f"{root}/steps", f"{root}/other"
    jobs.train(ModelCheckpoint(files, every_n_epochs=1), [], path=None, max_epochs=1)
    name = next(Path(files).iterdir()).name
    jobs.train(ReknitCheckpoint(steps, every_n_epochs=1), [], max_epochs=1)
    Path(other).mkdir()
    torch.save({"w": torch.ones(2)}, f"{other}/weights.pt")
    found = [
        outcome(ReknitCheckpoint(files)),
        outcome(ReknitCheckpoint(files), path=None),
        outcome(ReknitCheckpoint(files), path=files),
        outcome(ReknitCheckpoint(files), path=f"{files}/{name}"),
        outcome(ReknitCheckpoint(steps), path=None),
        outcome(ReknitCheckpoint(other), path=None),
        outcome(ReknitCheckpoint(other, resume=False), path=None),
        outcome(ReknitCheckpoint(f"{steps}/step_00000004"), path=None),
        outcome(ReknitCheckpoint(steps), [LearningRateFinder(num_training_steps=2, update_attr=False)]),
        outcome(ReknitCheckpoint(steps, later_steps="replace"), path=None),
        outcome(ReknitCheckpoint(f"{root}/new")),
    ]
    jobs.train(ModelCheckpoint(f"{root}/last", every_n_epochs=1, save_last=True), [], path=None, max_epochs=1)
    found.append(outcome(ReknitCheckpoint(f"{root}/last")))
    owner = Owner(f"{root}/owned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reknit.engine.stored.heartbeat.time", SimpleNamespace(sleep=lambda _: owner.beat()))
        trained: list[int] = []
        watch = LambdaCallback(on_train_batch_end=lambda *_: trained.append(1))
        found.append(outcome(ReknitCheckpoint(f"{root}/owned"), [watch], path=None))
        assert not trained, "it is refused before it trains"
        found.append(outcome(ReknitCheckpoint(f"{root}/owned", other_run="take_over"), path=None))
    return found


def test_no_training_begins_at_step_0_beside_other_work(tmp_path: Path) -> None:
    (found,) = run(1, refusals, str(tmp_path))
    at_files = "ROOT/files has no step of reknit, but checkpoints of Lightning; the newest is "
    for error in found[:3]:
        assert error.startswith(at_files)
        assert "pass ckpt_path='ROOT/files/epoch=0-step=4.ckpt'" in error
    assert found[3] == "began at 4"  # the way out that the errors name
    assert found[4].startswith("ROOT/steps has the steps of an earlier run up to 4")
    assert 'ckpt_path="last"' in found[4]
    assert found[5].startswith("ROOT/other has no step of reknit, but a folder with files such as weights.pt")
    assert "resume=False" in found[5]
    assert found[6] == "began at 0"
    assert found[7].startswith("ROOT/steps/step_00000004 is itself a checkpoint")
    assert found[8].startswith("step 4 was loaded, and then a callback has restored another checkpoint")
    assert found[9:12] == ["began at 0", "began at 0", "began at 4"]
    assert found[12].startswith("ROOT/owned belongs to a run that lives")
    assert found[13] == "began at 0"


def logged(root: str) -> list[tuple[str, str]]:
    """Resume on this number of ranks; return the lines about it, and the step in the report."""
    from reknit.integrations.lightning import ReknitCheckpoint

    logging.disable(logging.NOTSET)
    lines: list[tuple[str, str]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("resumed from "):
                lines.append((record.levelname, record.getMessage().replace(root, "ROOT")))

    logging.getLogger("reknit").addHandler(Lines())
    logging.getLogger("reknit").setLevel(logging.INFO)
    checkpoint = ReknitCheckpoint(root, every_n_train_steps=4)
    jobs.train(checkpoint, [], strategy="ddp", max_epochs=2 if Path(root).exists() else 1)
    report = checkpoint.load_report
    return [*lines, ("report", "none" if report is None else str(report.step))]


def test_a_resume_logs_the_step_the_ranks_and_what_is_not_restored(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    assert run(2, logged, root) == [[("report", "none")]] * 2
    (lines,) = run(1, logged, root)
    (level, line), report = lines
    assert level == "WARNING"
    assert line.startswith(
        "resumed from ROOT/step_00000004 (step 4, saved by 2 ranks, loaded by 1 rank); rng"
    )
    assert report == ("report", "4")


def damaged(root: str) -> tuple[Any, int]:
    """Resume after a step whose optimizer is damaged; return the first batch, and the calls of a hook."""
    from lightning.pytorch import Callback

    from reknit.integrations.lightning import ReknitCheckpoint

    calls = []
    loads = type("Loads", (Callback,), {
        "state_dict": lambda self: {"one": 1},
        "load_state_dict": lambda self, state: calls.append(state),
    })  # fmt: skip
    save = partial(ReknitCheckpoint, root, save_top_k=-1, every_n_epochs=1)
    jobs.train(save(), [loads()], max_epochs=2)
    for file in Path(root, "step_00000008", "optimizer").glob("*.safetensors"):
        file.write_bytes(bytes(len(file.read_bytes())))
    end = jobs.train(save(), [loads()], max_epochs=3)
    return end["first"], len(calls)


def test_a_damaged_step_gives_way_to_the_one_before(tmp_path: Path) -> None:
    assert run(1, damaged, str(tmp_path)) == [((1, 0), 2)]
