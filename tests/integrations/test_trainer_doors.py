"""ReknitTrainer in a folder that holds other work: it goes on from that, or is refused before it trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import reknit
from reknit.errors import CheckpointExistsError, UsageError
from reknit.runs import load_step
from tests import ranks
from tests.integrations.hf_runs import after_each_step, trainer
from tests.optional import needs
from tests.runs.owners import Owner

pytestmark = [needs("transformers", "transformers"), needs("accelerate", "accelerate")]

run = partial(ranks.run, warm="trainers", joined=False)


def began(made: Any, **options: Any) -> int:
    """Train, and return the step after which the training has begun."""
    steps: list[int] = []
    made.add_callback(after_each_step(steps.append))
    try:
        made.train(**options)
    finally:
        made.first = steps[0] - 1 if steps else None
    return int(made.first)


def doors(folder: str) -> dict[str, Any]:
    """Begin in a folder with checkpoints of transformers, then in one with steps of reknit as well."""
    from transformers import Trainer

    quick: dict[str, Any] = {"checkpoints": {"wait": True}, "save_steps": 4}
    found: dict[str, Any] = {}
    trainer(folder, Trainer, max_steps=8, save_steps=4).train()
    Path(folder, "checkpoint-12").mkdir()  # of a save that did not finish
    refused = trainer(folder, max_steps=12, **quick)
    with pytest.raises(CheckpointExistsError, match="checkpoint-8 is a checkpoint of transformers"):
        began(refused)
    found["trained before the refusal"] = refused.first
    found["natives"] = began(made := trainer(folder, max_steps=12, **quick), resume_from_checkpoint=True)
    found["report of natives"] = made.reknit_report
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_step.logger, "log", lambda level, text, *parts: lines.append(text % parts))
        found["both"] = began(made := trainer(folder, max_steps=14, **quick), resume_from_checkpoint=True)
    found["lines"] = [line.replace(folder, "OUT") for line in lines]
    found["report"] = made.reknit_report.step, made.reknit_report.saved_by
    for options in ({}, {"resume_from_checkpoint": f"{folder}/checkpoint-8"}):
        refused = trainer(folder, max_steps=14, **quick)
        with pytest.raises(CheckpointExistsError, match=r"train.resume_from_checkpoint=True. goes on"):
            began(refused, **options)
        found[f"trained before the refusal, {sorted(options)}"] = refused.first
    return found


def test_the_newest_work_decides_and_nothing_begins_beside_it_unasked(tmp_path: Path) -> None:
    (found,) = run(1, doors, str(tmp_path))
    assert found == {
        "trained before the refusal": None,
        "natives": 8,
        "report of natives": None,
        "both": 12,
        "lines": ["resumed from OUT/_reknit/step_00000012 (step 12, saved by 1 rank, loaded by 1 rank)"],
        "report": (12, 1),
        "trained before the refusal, []": None,
        "trained before the refusal, ['resume_from_checkpoint']": None,
    }
    assert [each.step for each in reknit.steps(tmp_path / "_reknit")] == [12, 14]


def anew(folder: str) -> int:
    Path(folder, "checkpoint-4").mkdir()
    with pytest.raises(UsageError, match=r"checkpoint-4 is .* without trainer_state"):
        trainer(folder).train(resume_from_checkpoint=True)
    refuse_beside_another(f"{folder}/other")
    return began(trainer(folder, max_steps=2, checkpoints={"wait": True}), resume_from_checkpoint=False)


def refuse_beside_another(folder: str) -> None:
    """Begin where another training is under way: refused before the first step, or it takes the folder."""
    owner = Owner(f"{folder}/_reknit")
    made = trainer(folder, max_steps=2, checkpoints={"wait": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reknit.engine.stored.heartbeat.time", SimpleNamespace(sleep=lambda _: owner.beat()))
        with pytest.raises(UsageError, match="belongs to a run that lives"):
            began(made)
        assert made.first is None
        assert owner.owns()
        given = {"wait": True, "other_run": "take_over"}
        assert began(trainer(folder, max_steps=2, checkpoints=given)) == 0


def test_a_training_begins_beside_other_work_if_it_is_told_so(tmp_path: Path) -> None:
    assert run(1, anew, str(tmp_path)) == [0]
