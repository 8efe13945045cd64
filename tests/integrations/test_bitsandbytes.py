"""Optimizers of bitsandbytes, in the trainers that people use them with: each resume is exact."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from tests import ranks
from tests.integrations import hf_runs, test_accelerate, test_lightning
from tests.optional import needs
from tests.running.examples import at_night, is_night

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs("bitsandbytes", "bitsandbytes"), pytest.mark.filterwarnings("ignore")]

OPTIMIZERS = {
    "two states": ("AdamW8bit", {"min_8bit_size": 1}),
    "one, paged": ("PagedLion8bit", {"min_8bit_size": 1}),
}


def of_a_kind(kind: str) -> Any:
    """Return a function that makes an optimizer; parameters as small as a test's have 8-bit states too."""
    name, options = OPTIMIZERS[kind]
    return partial(getattr(import_module("bitsandbytes.optim"), name), **options)


def with_transformers(folder: str, kinds: tuple[str, ...]) -> list[str]:
    """Return the values of `optim` with which a run that was stopped ends otherwise, or has other dtypes."""
    wrong = []
    for kind in kinds:
        ends = []
        for name in ("whole", "cut"):
            trainer = partial(hf_runs.trainer, f"{folder}/{kind}/{name}", optim=kind, max_steps=6)
            made = trainer(model=hf_runs.llama(width=64))
            if name == "cut":
                hf_runs.interrupted(made, 5)
                reknit.latest(f"{folder}/{kind}/cut/_reknit", pending="wait")
                made = trainer(model=hf_runs.llama(width=64))
            made.train(resume_from_checkpoint=name == "cut")
            ends.append(hf_runs.training_state(made))
        has_bytes = any(value.dtype == torch.uint8 for value in ends[0]["moments"].values())
        if not hf_runs.same(*ends) or has_bytes != kind.endswith("8bit"):
            wrong.append(kind)
    return wrong


@needs("transformers", "transformers")
@needs("accelerate", "Accelerate")
def test_a_run_of_transformers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    kinds = ("adamw_8bit", "paged_lion_32bit") if is_night() else ("adamw_8bit",)
    assert ranks.run(1, with_transformers, str(tmp_path), kinds, warm="trainers", joined=False) == [[]]


def with_accelerate(folder: str) -> dict[str, list[str]]:
    return {
        kind: test_accelerate.resumed(f"{folder}/{kind}", ("shuffled",), (7,), optimizer=of_a_kind(kind))
        for kind in OPTIMIZERS
    }


@needs("accelerate", "Accelerate")
@needs("torchdata", "torchdata")
@at_night("a run of transformers has its optimizers by day")
def test_a_run_with_accelerate_goes_on_bit_for_bit(tmp_path: Path) -> None:
    found = ranks.run(1, with_accelerate, str(tmp_path), warm="accelerate", joined=False)
    assert found == [{kind: [] for kind in OPTIMIZERS}]


def with_lightning(folder: str) -> dict[str, list[int]]:
    return {
        kind: test_lightning.resumed(f"{folder}/{kind}", "one", (7,), optimizer=of_a_kind(kind))
        for kind in OPTIMIZERS
    }


@needs("lightning", "Lightning")
@at_night("a run of transformers has its optimizers by day")
def test_a_run_with_lightning_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert ranks.run(1, with_lightning, str(tmp_path), warm="lightning") == [
        {kind: [] for kind in OPTIMIZERS}
    ]
