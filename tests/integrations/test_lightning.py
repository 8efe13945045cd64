"""Lightning with the real package: exact resumes, killed ranks, and the arguments of `ModelCheckpoint`."""

from __future__ import annotations

import os
import runpy
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.frameworks.numbers import same_value
from reknit.frameworks.stateful import Kept
from tests import ranks
from tests.integrations import lightning_job as jobs
from tests.integrations.test_accelerate import EXAMPLES
from tests.optional import needs
from tests.running.examples import at_night, is_night

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("lightning", "Lightning")

run = partial(ranks.run, warm="lightning")

EXACT = ("tensors", "random", "samples", "step", "epoch", "lr", "loops")


VALIDATED = {"monitor": "score"}
"""Arguments for saves after each validation, here after every second step."""


def resumed(
    folder: str,
    strategy: str,
    stops: tuple[int, ...],
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> list[int]:
    """Return the steps after which a resume differs from a training without an end between."""
    train: Any = partial(jobs.train, strategy=strategy, arguments=arguments, **options)
    whole = train(f"{folder}/whole", 15)
    different = []
    for stop in stops:
        train(f"{folder}/{stop}", stop)
        rest = train(f"{folder}/{stop}", 15, seed=9)
        assert rest["first"] == stop
        expected = {name: whole[name] for name in EXACT} | {"samples": whole["samples"][stop:]}
        if not same_value({name: rest[name] for name in EXACT}, expected):
            different.append(stop)
    return different


@pytest.mark.parametrize(
    ("world", "strategy", "stops"), [(1, "one", (5, 12) if is_night() else (12,)), (2, "sharded", (5,))]
)
def test_a_resume_is_bitwise_equal_in_loops_data_and_random_numbers(
    world: int, strategy: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    assert run(world, resumed, str(tmp_path), strategy, stops) == [[]] * world


def test_a_resume_after_a_validation_is_bitwise_equal_too(tmp_path: Path) -> None:
    assert run(1, resumed, str(tmp_path), "one", (6, 12) if is_night() else (6,), VALIDATED) == [[]]


def killed(root: str, strategy: str, seed: int) -> None:
    """Train until this rank, or another, is killed."""
    try:
        jobs.train(root, 15, strategy=strategy, dies=seed)
    except BaseException:  # of gloo, of reknit or of Lightning, as the other rank is gone
        return


@at_night("runs of transformers and ByteCheckpoint die by day")
@pytest.mark.parametrize(("strategy", "seed"), [("sharded", 6), ("ddp", 5)])
def test_a_run_that_is_killed_resumes_on_another_number_of_ranks(
    strategy: str, seed: int, tmp_path: Path
) -> None:
    whole = run(2, partial(jobs.train, steps=15, strategy=strategy), str(tmp_path / "whole"))[0]
    root = tmp_path / "killed"
    ends = run(2, killed, str(root), strategy, seed, some_die=True)
    assert ranks.Died(-signal.SIGKILL) in ends
    (root / "step_00000099").mkdir()  # as of a save that was not committed
    committed = max((step.step or 0 for step in reknit.steps(root)), default=0)
    (rest,) = run(1, partial(jobs.train, steps=15, strategy=strategy, batch=4, seed=9), str(root))
    assert max(committed, 1) <= rest["first"] < 15
    assert rest["samples"] == whole["samples"][rest["first"] :]
    assert (rest["step"], rest["lr"], rest["loops"]) == (15, whole["lr"], whole["loops"])
    assert rest["last"] == str(root / "step_00000015")


def kept(root: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train ten steps with a metric, then validate and test the best and the last step."""
    seen = jobs.train(root, 10, arguments={**VALIDATED, **arguments})
    from reknit.integrations.lightning import ReknitCheckpoint

    checkpoint = ReknitCheckpoint(root, monitor="score", save_top_k=2)
    trainer, lit = jobs.trainer_of(1, [checkpoint], strategy="one"), jobs.module(3)
    trainer.limit_val_batches = 1
    trainer.validate(lit, jobs.loader(4), ckpt_path=checkpoint.best_model_path, verbose=False)
    best = {name: value.clone() for name, value in lit.named_parameters()}
    trainer.validate(lit, jobs.loader(4), ckpt_path="last", verbose=False)
    last = {name: value.clone() for name, value in lit.named_parameters()}
    return {**seen, "trained": seen["tensors"], "best_weights": best, "last_weights": last}


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [({"save_top_k": 2}, [6, 8, 10]), ({"save_top_k": 1, "mode": "max"}, [2, 10]), ({}, [2, 4, 6, 8, 10])],
)
def test_the_best_steps_and_the_newest_stay(
    arguments: dict[str, Any], steps: list[int], tmp_path: Path
) -> None:
    (seen,) = run(1, kept, str(tmp_path), arguments)
    assert [step.step for step in reknit.steps(tmp_path)] == steps
    ranked = sorted(steps, key=lambda step: (abs(step - 7), -step))
    if "mode" not in arguments:
        assert seen["best"] == str(tmp_path / f"step_{ranked[0]:08d}")
        assert float(seen["score"]) == 1.0
        assert not same_value(seen["best_weights"], seen["last_weights"])
    assert seen["last"] == str(tmp_path / "step_00000010")
    assert same_value(seen["last_weights"], {name: seen["trained"][name] for name in seen["last_weights"]})


def configured(root: str) -> list[Any]:
    """Train twice with hyperparameters of OmegaConf; return these as saved."""
    from omegaconf import OmegaConf

    from reknit.integrations.lightning import ReknitCheckpoint

    for steps in (1, 2):
        lit = jobs.module(0)
        lit.save_hyperparameters(
            OmegaConf.create({"width": 6, "optim": {"lr": 0.1, "betas": [0.9, "${width}"]}})
        )
        trainer = jobs.trainer_of(steps, [ReknitCheckpoint(root, every_n_train_steps=1)], strategy="one")
        trainer.fit(lit, jobs.loader(2), ckpt_path="last")
    kept = Kept()
    reknit.load(f"{root}/step_00000002", {"trainer": kept})
    return [trainer.global_step, kept.values["hyper_parameters"], kept.values["hparams_type"]]


@needs("omegaconf", "OmegaConf")
def test_a_configuration_of_omegaconf_is_saved_as_plain_values(tmp_path: Path) -> None:
    plain = {"width": 6, "optim": {"lr": 0.1, "betas": [0.9, "${width}"]}}
    assert run(1, configured, str(tmp_path)) == [[2, plain, "omegaconf.dictconfig.DictConfig"]]


def refused(folder: str) -> list[str]:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from reknit.integrations.lightning import ReknitCheckpoint
    from reknit.integrations.lightning.strategy import adopt

    found = []
    for call in (
        lambda: ReknitCheckpoint(folder, filename="{epoch}"),
        lambda: adopt(DeepSpeedStrategy.__new__(DeepSpeedStrategy)),
        lambda: ReknitCheckpoint(folder).setup(object(), None, "fit"),
    ):
        try:
            call()
        except reknit.ReknitError as error:
            found.append(error.message)
    return found


def test_what_a_step_cannot_have_is_refused(tmp_path: Path) -> None:
    (found,) = run(1, refused, str(tmp_path))
    assert found[0].startswith("ReknitCheckpoint takes no filename")
    assert found[1] == "reknit does not save a trainer with the strategy DeepSpeedStrategy"
    assert found[2].startswith("ReknitCheckpoint was made for lightning.pytorch")


def example(folder: str, steps: int, batch: int) -> tuple[float, str]:
    """Run the example as torchrun does."""
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")
    train = runpy.run_path(str(EXAMPLES / "lightning_trainer.py"))["train"]
    answer: tuple[float, str] = train(folder, steps, batch)
    return answer


def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    ranks.run(2, example, str(tmp_path), 6, 4, warm="lightning", joined=False)
    ((loss, best),) = ranks.run(1, example, str(tmp_path), 12, 8, warm="lightning", joined=False)
    assert 0 < loss < 1
    assert best in {step.path for step in reknit.steps(tmp_path)}
    assert reknit.latest(tmp_path) == str(tmp_path / "step_00000012")


def with_the_other_package(root: str) -> list[str]:
    """Train with `pytorch_lightning`, in a process that has imported no other Lightning."""
    import pytorch_lightning as pl
    import torch
    from torch import nn

    from reknit.integrations.lightning import ReknitCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for steps in (2, 4):
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ReknitCheckpoint(root, every_n_train_steps=2, save_top_k=-1)],
        )  # fmt: skip
        trainer.fit(Module(), jobs.loader(2), ckpt_path="last")
    return [step.path for step in reknit.steps(root)]


@at_night("its classes are those of the package lightning, under another name")
def test_the_package_pytorch_lightning_works_alike(tmp_path: Path) -> None:
    if not pytest.importorskip("importlib.util").find_spec("pytorch_lightning"):
        pytest.skip("pytorch_lightning is not installed")
    (paths,) = ranks.run(1, with_the_other_package, str(tmp_path), joined=False)
    assert paths == [str(tmp_path / "step_00000002"), str(tmp_path / "step_00000004")]


def saved_by_lightning(folder: str) -> None:
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        logger=False, enable_checkpointing=False, accelerator="cpu", enable_model_summary=False
    )
    trainer.strategy.connect(Model())
    trainer.save_checkpoint(f"{folder}/any.name")


def test_what_lightning_itself_saved_is_opened_in_place(tmp_path: Path) -> None:
    run(1, saved_by_lightning, str(tmp_path), joined=False)
    with reknit.open(tmp_path / "any.name") as checkpoint:
        assert set(checkpoint.tensors["model"]) == {"layer.weight", "layer.bias"}
        assert checkpoint.step == 0
