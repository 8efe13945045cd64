"""Remedies of errors of the integrations: a case causes an error, and runs the code that its remedy has."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import reknit
from tests import ranks
from tests.followed import said
from tests.optional import needs


def dcp(folder: str) -> None:
    """Follow the remedies of the writer and the reader of DCP."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from reknit.integrations.dcp import Reader, Writer

    torch_dcp: Any = import_module("torch.distributed.checkpoint")

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            return super().create_local_plan()

    state = {"w": torch.arange(4.0)}
    names = {"Writer": Writer, "Reader": Reader, "path": f"{folder}/a", "DefaultStager": DefaultStager}
    names["StagingOptions"] = StagingOptions
    writer = eval(
        said(lambda: torch_dcp.async_save(state, storage_writer=Writer()), r"Writer\(path\)"), names
    )
    torch_dcp.async_save(state, storage_writer=writer).result()
    reader = eval(said(lambda: torch_dcp.load(state, storage_reader=Reader()), r"Reader\(path\)"), names)
    state["w"].zero_()
    torch_dcp.load(state, storage_reader=reader)
    assert state["w"].tolist() == [0, 1, 2, 3]
    assert said(lambda: torch_dcp.load(state, storage_reader=Reader()), "pass checkpoint_id")
    torch_dcp.load(state, storage_reader=Reader(), checkpoint_id=f"{folder}/a")
    elsewhere = {"storage_writer": Writer(f"{folder}/b"), "checkpoint_id": f"{folder}/c"}
    assert said(lambda: torch_dcp.async_save(state, **elsewhere).result(), "the path to Writer alone")
    torch_dcp.async_save(state, storage_writer=Writer(f"{folder}/c")).result()

    def planned(**more: Any) -> None:
        given = {"storage_writer": Writer(f"{folder}/d"), "planner": Planner()}
        torch_dcp.async_save(state, **given, **more).result()

    call = said(planned, r"async_stager=.*\)\)")
    eval(f"planned({call})", names | {"planned": planned})
    assert reknit.open(f"{folder}/d").tensors


def accelerate(folder: str) -> None:
    """Follow the remedy of a run beside folders of Accelerate."""
    from accelerate import Accelerator

    from reknit.integrations.accelerate import resume

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(f"{folder}/run/old")
    checkpointer = reknit.Checkpointer(f"{folder}/run", wait=True)
    calls = said(lambda: resume(accelerator, checkpointer), r"accelerator\.load_state.*start=0\)")
    names = {"accelerator": accelerator, "checkpointer": checkpointer, "resume": resume}
    weight = next(model.parameters()).detach()
    saved = weight.clone()
    weight.zero_()
    for call in calls.split(", then "):
        eval(call, names)
    assert torch.equal(weight, saved)


def transformers(folder: str) -> None:
    """Follow the remedies of a training that would begin beside other work."""
    from transformers import Trainer

    from tests.integrations.hf_runs import trainer

    quick: dict[str, Any] = {"max_steps": 1, "save_steps": 1}

    def made(at: str, **checkpoints: Any) -> Any:
        return trainer(f"{folder}/{at}", checkpoints={"wait": True, **checkpoints}, **quick)

    for at, kind in (("natives", Trainer), ("others", Trainer), ("steps", None)):
        trainer(f"{folder}/{at}", kind, **quick).train()
    quick["max_steps"] = 2
    for at, go_on in (("natives", True), ("others", False), ("steps", True)):
        call = said(made(at).train, rf"train\(resume_from_checkpoint={go_on}\)")
        eval(f"trainer.{call}", {"trainer": made(at)})
    given = said(made("steps").train, r"checkpoints=(\{.*?\})").partition("=")[2]
    made("steps", **eval(given)).train()


def lightning(folder: str) -> None:
    """Follow the remedies of a training that would begin beside other work."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    from reknit.integrations.lightning import ReknitCheckpoint
    from tests.integrations import lightning_hooks_job as jobs

    def begin(at: str, **given: Any) -> Any:
        path = given.pop("ckpt_path", None)
        checkpoint = ReknitCheckpoint(f"{folder}/{at}", every_n_epochs=1, **given)
        return jobs.train(checkpoint, [], path=path, max_epochs=2)

    jobs.train(ModelCheckpoint(f"{folder}/files", every_n_epochs=1), [], path=None, max_epochs=1)
    begin("steps")
    Path(f"{folder}/other").mkdir()
    torch.save({"w": torch.ones(2)}, f"{folder}/other/weights.pt")
    for at, words in (
        ("files", r"ckpt_path='[^']*'"),
        ("other", "resume=False"),
        ("steps", 'ckpt_path="last"'),
        ("steps", "later_steps='move'"),
    ):
        given = said(lambda at=at: begin(at), words)  # type: ignore[misc]
        eval(f"begin({at!r}, {given})", {"begin": begin})


CASES = {
    "dcp": (dcp, "plain"),
    "accelerate": (accelerate, "accelerate"),
    "transformers": (transformers, "trainers"),
    "lightning": (lightning, "lightning"),
}


@pytest.mark.parametrize(
    "name",
    [
        "dcp",
        pytest.param("accelerate", marks=needs("accelerate", "accelerate")),
        pytest.param("transformers", marks=[needs("transformers", "transformers")]),
        pytest.param("lightning", marks=needs("lightning", "lightning")),
    ],
)
def test_a_remedy_of_an_integration_can_be_followed(name: str, tmp_path: Path) -> None:
    follow, warm = CASES[name]
    ranks.run(1, follow, str(tmp_path), warm=warm, joined=name == "dcp")
