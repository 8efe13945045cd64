"""Callbacks of Lightning that change a checkpoint, or a training between its steps: all resume exactly."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

import reknit
from reknit.frameworks.same_value import same_value
from tests import ranks
from tests.integrations import lightning_hooks_job as jobs
from tests.optional import needs

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
        loader = DataLoader(jobs.ROWS, batch_size=4, shuffle=strategy == "auto")
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


@pytest.mark.parametrize(
    ("kind", "stops"),
    [
        ("ema", (4, 6, 12)),
        ("late ema", (4, 8)),
        ("ema of epochs", (4, 8)),
        ("average", (6, 8)),
        ("swa", (2, 4, 6, 8, 12)),
        ("backbone", (2, 4, 6, 8)),
        ("own finetuning", (4, 6, 8, 9)),
    ],
)
def test_a_run_with_callbacks_resumes_exactly_anywhere(
    kind: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    assert run(1, resumed, str(tmp_path), kind, stops) == [[]]


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_copies_of_an_averaged_model_resume_exactly(kind: str, tmp_path: Path) -> None:
    assert run(2, resumed, str(tmp_path), kind, (6,), "ddp") == [[], []]


def test_unfrozen_parameters_that_ranks_share_resume_exactly(tmp_path: Path) -> None:
    assert run(2, resumed, str(tmp_path), "backbone", (6,), "sharded") == [[], []]


@pytest.mark.parametrize("every", ["epochs", "steps"])
def test_the_next_epoch_has_its_own_order_after_a_resume(every: str, tmp_path: Path) -> None:
    assert run(1, resumed, str(tmp_path), "", (4, 8), "auto", every) == [[]]
