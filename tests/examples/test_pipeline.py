"""examples/pipeline.py: an evaluation follows a run, and fine-tuning goes on in another layout."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import reknit
from tests.ranks import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline.py"


def job(name: str, *arguments: object) -> Any:
    """Run one of the jobs as one rank does, or as one process."""
    return runpy.run_path(str(EXAMPLE))[name](*arguments)


def tuned_twice(folder: str, untrained: str, trained: str) -> float:
    job("finetune", folder, untrained, 0)
    loss: float = job("finetune", folder, trained, 40)
    return loss


def test_each_job_goes_on_from_the_one_before_in_its_own_layout(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with ThreadPoolExecutor(1) as beside:
        training = beside.submit(run, 2, job, "pretrain", folder)
        evaluated = job("evaluate", folder)
        last = training.result()[0]

    # Without the evaluation, training would have gone on to step 19,999.
    *others, good = evaluated
    assert evaluated[good] >= 0.95 > max((evaluated[step] for step in others), default=0.0)
    assert good <= last < 19_999
    noted = {step.step: step.metrics or {} for step in reknit.steps(folder)}
    assert noted[good]["accuracy"] == evaluated[good]

    untrained, trained = tmp_path / "untrained", tmp_path / "trained"
    losses = run(4, tuned_twice, folder, str(untrained), str(trained))
    assert max(losses) < 0.5
    before = reknit.open(Path(folder, f"step_{good:08d}"))
    after = reknit.open(untrained / "step_00000000")
    torch.manual_seed(0)
    fresh = job("LanguageModel", 68).state_dict()
    assert len(fresh) == 6
    for name, value in fresh.items():
        pretrained = before.read("model", name, framework="torch")
        grown = torch.cat([pretrained, value[len(pretrained) :]])  # only rows of new words are fresh
        assert torch.equal(after.read("model", name, framework="torch"), grown)
    assert [step.step for step in reknit.steps(trained)] == [40]
