"""Background saves while real models train: the state at the call is stored, balanced over replicas."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import reknit
from tests.engine.watched import Watched
from tests.faults.nursery import agents_of, wait_until
from tests.ranks import run
from tests.running.examples import is_night
from tests.torchrun import models
from tests.torchrun.test_matrix import same

LIMIT_S = 90.0


def train_on(layout: str, root: str, stage: Any) -> None:
    """Save after each of three steps, and go on training at once; keep the true state of each save."""
    trained = models.build(layout, steps=1)
    options = reknit.SaveOptions(durability="process", timeout_s=60, stage=stage)
    pending = []
    for step in range(3):
        truth = models.truth(trained)
        if dist.get_rank() == 0:
            torch.save(truth, f"{root}/{step}.truth")
        pending.append(
            reknit.save(f"{root}/{step}", models.state(trained), step=step, wait=False, options=options)
        )
        models.train_step(trained, step + 1)
    reports = [save.result(LIMIT_S) for save in pending]
    assert all(report.warnings == () for report in reports)
    phases = [{record.phase for record in report.phases} for report in reports]
    assert ["assign" in names for names in phases[1:]] == [False, False]
    assert reknit.close(LIMIT_S)


def load_back(layout: str, root: str) -> list[str]:
    """Load each checkpoint into a fresh target; return the names that differ from the true state."""
    wrong = []
    for step in range(3):
        trained = models.build(layout, steps=0, seed=1)
        reknit.load(f"{root}/{step}", models.state(trained), options=reknit.LoadOptions(timeout_s=60))
        expected, found = torch.load(f"{root}/{step}.truth", weights_only=False), models.truth(trained)
        for item, values in expected.items():
            wrong += [f"{step}: {item}/{k}" for k, v in values.items() if not same(v, found[item].get(k))]
    return wrong


@pytest.mark.parametrize(
    ("layout", "stage"), [("fsdp2-2", "eager"), ("ddp-2", "lazy"), *[("fsdp2xtp-2x2", "lazy")] * is_night()]
)
def test_training_goes_on_while_the_state_of_each_save_is_stored(
    tmp_path: Path, layout: str, stage: str
) -> None:
    size = models.LAYOUTS[layout]
    run(size, train_on, layout, str(tmp_path), stage)
    for step in range(3):
        assert reknit.verify(tmp_path / str(step), "data").ok
    for wrong in run(size, load_back, layout, str(tmp_path)):
        assert wrong == []


def leave_the_group(path: str) -> tuple[bool, int]:
    pending = reknit.save(path, {"model": {"w": torch.arange(1000.0)}}, step=1, wait=False)
    dist.destroy_process_group()
    return reknit.close(100), pending.result(1).num_files


def test_a_save_is_committed_after_its_process_group_was_destroyed(tmp_path: Path) -> None:
    assert [closed for closed, _ in run(2, leave_the_group, str(tmp_path / "x"))] == [True, True]
    assert reknit.verify(tmp_path / "x", "data").ok


def ddp_share(root: str) -> tuple[int, int]:
    torch.manual_seed(0)
    sizes = (97, 1003, 512, 700, 31)
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 97)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    report = reknit.save(f"{root}/ddp", state, wait=False).result(LIMIT_S)
    staged = sum(record.nbytes for record in report.phases if record.phase == "stage")
    assert reknit.close(LIMIT_S)
    return staged, report.total_nbytes


def test_four_replicas_stage_and_write_a_quarter_each(tmp_path: Path) -> None:
    shares = run(4, ddp_share, str(tmp_path))
    total = sum(staged for staged, _ in shares)
    for staged, _ in shares:
        assert 0.24 <= staged / total <= 0.26


class Failing:
    """An object whose own code fails."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("the tokenizer is gone")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def prepare_first(layout: str, root: str) -> str:
    """Prepare for saves, badly and then well; return the error of the bad call."""
    rank = dist.get_rank()
    trained = models.build(layout, steps=1)
    state, options = models.state(trained), reknit.SaveOptions(durability="process", timeout_s=60)
    try:
        wrong = {**state, "tokenizer": Failing()} if rank == 1 else state
        reknit.prepare(root, wrong, options=options)
    except (ValueError, reknit.ReknitError) as error:
        raised = f"{type(error).__name__}: {error}"
    reknit.prepare(root, state, options=options)
    agents, memory = agents_of(os.getpid()), arenas_mapped()
    assert (len(agents), len(memory)) == (1, 1)
    dist.barrier()
    assert os.listdir(root) == []
    for step in range(3):
        # The rank of this number saves only when the other has gone back to its training.
        if step == rank:
            dist.barrier()
        with Watched() as seen:
            save = reknit.save(f"{root}/{step}", state, step=step, wait=False, options=options)
        if step != rank:
            dist.barrier()
        assert seen.agreed == seen.planned == set()
        assert set(seen.said) == {"Begin", "Planned", "Filled"}
        assert save.result(LIMIT_S).warnings == ()
        if rank == 0:
            torch.save(models.truth(trained), f"{root}/{step}.truth")
        else:
            models.truth(trained)
        models.train_step(trained, step + 1)
    assert agents_of(os.getpid()) == agents
    assert arenas_mapped() == memory
    assert reknit.close(LIMIT_S)
    assert arenas_mapped() == []
    wait_until(lambda: agents_of(os.getpid()) == [], LIMIT_S)
    return raised


def arenas_mapped() -> list[str]:
    """Return the ranges of this process's memory that are arenas."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[0] for line in lines if "reknit-memory" in line]


def test_after_prepare_the_first_save_of_sharded_models_plans_nothing_and_waits_for_no_rank(
    tmp_path: Path,
) -> None:
    for raised in run(2, prepare_first, "fsdp2-2", str(tmp_path)):
        why = "tokenizer (Failing) could not be saved: ValueError: the tokenizer is gone [rank 1"
        assert raised.startswith(f"StateError: {why}")
    for wrong in run(2, load_back, "fsdp2-2", str(tmp_path)):
        assert wrong == []
