"""A run that begins or continues: from its own steps, and never in silence from 0 beside other work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import reknit
from reknit import Checkpointer, PerRank
from reknit.errors import CheckpointExistsError, MismatchError, UsageError
from reknit.integrations.lightning import step as lightning_folder
from reknit.policies import every
from reknit.testing.world import run_ranks
from tests.runs.pieces import numbers, resumed, saved, state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reknit.comm.group import Group

W = torch.arange(1000.0, dtype=torch.float64)


def target() -> dict[str, Any]:
    return {"model": {"w": np.zeros(1000)}}


def files_of_torch(root: Path) -> str:
    for step in (5, 10):
        torch.save({"model": {"w": W + step}}, root / f"step-{step}.pt")
    return "step-10.pt"


def folders_with_files_of_torch(root: Path) -> str:
    for step in (9, 10):
        (root / f"epoch_{step}").mkdir()
        torch.save({"model": {"w": W + step}}, root / f"epoch_{step}" / "last.ckpt")
    return "epoch_10/last.ckpt"


def folders_of_hugging_face(root: Path) -> str:
    for step in (5, 10):
        (root / f"checkpoint-{step}").mkdir()
        save_file({"w": W + step}, root / f"checkpoint-{step}" / "model.safetensors")
    return "checkpoint-10"


def folders_of_dcp_with_names_of_steps(root: Path) -> str:
    for step in (5, 10):
        content = {"model": {"w": W + step}, "step": step}
        dcp.save(content, checkpoint_id=root / f"step_{step:08d}", no_dist=True)
    return "step_00000010"


def folders_of_fsdp(root: Path) -> str:
    for step in (5, 10):
        place = root / f"checkpoint-{step}" / "pytorch_model_fsdp_0"
        dcp.save({"model": {"w": W + step}}, checkpoint_id=place, no_dist=True)
    return "checkpoint-10"


KINDS = [
    files_of_torch,
    folders_with_files_of_torch,
    folders_of_hugging_face,
    folders_of_dcp_with_names_of_steps,
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("make", "ranks"), list(zip(KINDS, (1, 2, 1, 2), strict=True)))
def test_a_run_does_not_begin_at_0_beside_checkpoints_of_others_unless_that_is_said(
    tmp_path: Path, make: Callable[[Path], str], ranks: int
) -> None:
    newest = tmp_path / make(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    def refused(group: Group) -> str:
        with Checkpointer(tmp_path, group=group) as run, pytest.raises(UsageError) as caught:
            run.resume(target())
        return str(caught.value)

    for said in run_ranks(ranks, refused):
        assert f"{newest} is a" in said
        assert f"resume(state, start='{newest}')" in said
    assert sorted(tmp_path.rglob("*")) == before

    def begun(group: Group) -> tuple[int, int, float]:
        with Checkpointer(tmp_path, group=group) as run:
            assert run.resume(target(), start=0) == 0
        into = target()
        with Checkpointer(tmp_path, wait=True, group=group) as run:
            first = run.resume(into, start=newest)
            run.save(first + 100, into)
        with Checkpointer(tmp_path, group=group) as run:
            following = run.resume(target())
        return first, following, into["model"]["w"][3]

    first = 11 if make is folders_of_dcp_with_names_of_steps else 0  # the others record none
    assert run_ranks(ranks, begun) == [(first, first + 101, 13.0)] * ranks


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_of_fsdp_are_earlier_work_and_their_parts_open(tmp_path: Path) -> None:
    newest = tmp_path / folders_of_fsdp(tmp_path)
    with Checkpointer(tmp_path) as run, pytest.raises(UsageError) as caught:
        run.resume(target())
    assert f"{newest} is a checkpoint of Accelerate or transformers with shards of FSDP" in str(caught.value)
    assert f"accelerator.load_state('{newest}')" in str(caught.value.remedy)
    assert lightning_folder_refuses(tmp_path)
    held = target()
    reknit.load(newest / "pytorch_model_fsdp_0", held)
    assert held["model"]["w"][3] == 13.0


def lightning_folder_refuses(root: Path) -> bool:
    try:
        lightning_folder.refuse_others(str(root), fsspec.filesystem("file"))
    except UsageError:
        return True
    return False


def arrays(place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    np.savez(place, w=np.zeros(3))


def model_of_hugging_face(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"w": W}, folder / "model.safetensors")


WEIGHTS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda root: None,
    "npz": lambda root: arrays(root / "base.npz"),
    "npz in a folder": lambda root: arrays(root / "v2" / "base.npz"),
    "npy": lambda root: np.save(root / "data.npy", np.zeros(3)),
    "GGUF": lambda root: (root / "base.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(64)),
    "safetensors": lambda root: save_file({"w": W}, root / "base-00002-of-00002.safetensors"),
    "a model": lambda root: model_of_hugging_face(root / "Llama-3-8B"),
    "a model in the folder itself": model_of_hugging_face,
}


def test_weights_from_which_a_run_may_start_are_not_earlier_work(tmp_path: Path) -> None:
    for kind, make in WEIGHTS.items():
        root = tmp_path / kind
        root.mkdir()
        make(root)
        assert not lightning_folder_refuses(root), kind
        with Checkpointer(root, wait=True) as run:
            assert run.steps() == []
            assert run.latest() is None
            assert run.resume(target()) == 0, kind
            run.save(0, target())
        with Checkpointer(root, wait=True) as run:
            assert run.resume(target()) == 1, kind


def model_of_a_trainer(root: Path) -> None:
    model_of_hugging_face(root / "last")
    (root / "last" / "trainer_state.json").write_text("{}")


def file_behind_weights(root: Path) -> None:
    for number in range(1, 7):
        save_file({"w": W}, root / f"model-0000{number}-of-00006.safetensors")
    torch.save({"w": W}, root / "last.pt")


WORK: dict[str, Callable[[Path], object]] = {
    "a numbered npz": lambda root: arrays(root / "ckpt_10.npz"),
    "a numbered model": lambda root: model_of_hugging_face(root / "checkpoint-10"),
    "weights in a numbered folder": lambda root: arrays(root / "epoch_3" / "w.npz"),
    "a model beside the state of its trainer": model_of_a_trainer,
    "a file of torch behind many files of weights": file_behind_weights,
}


def test_weights_of_a_step_are_earlier_work(tmp_path: Path) -> None:
    for kind, make in WORK.items():
        root = tmp_path / kind
        root.mkdir()
        make(root)
        assert lightning_folder_refuses(root), kind
        with Checkpointer(root) as run, pytest.raises(UsageError, match="no step of this run below"):
            pytest.fail(f"{kind}: {run.resume(target())}")


def test_own_steps_count_and_not_the_start_nor_files_of_others(tmp_path: Path) -> None:
    saved(tmp_path / "run", 3)
    files_of_torch(tmp_path / "run")
    held = state()
    with Checkpointer(tmp_path / "run") as run:
        assert run.resume(held, start=tmp_path / "absent") == 4
    assert held["model"]["w"][0] == 3.0


def test_a_start_that_lacks_an_item_is_refused_with_calls_that_lose_nothing_later(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.full((4,), 2.0)}}, place := tmp_path / "base.pt")
    held = {"model": {"w": torch.zeros(4)}, "more": {"v": torch.zeros(2)}}
    with Checkpointer(tmp_path / "run", wait=True) as run:
        with pytest.raises(MismatchError, match="more") as refused:
            run.resume(held, start=place)
        assert f"resume(state, start=0), and if that returns 0, reknit.load({str(place)!r}, state" in str(
            refused.value.remedy
        )
        assert "`items`" in str(refused.value.remedy)
        assert run.resume(held, start=0) == 0
        reknit.load(place, held, items=["model"])
        run.save(0, held)
    assert held["model"]["w"].tolist() == [2.0] * 4


def test_a_folder_of_another_kind_of_files_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs-1").mkdir()
    (tmp_path / "logs-1" / "events.txt").write_text("step 10")
    assert resumed(tmp_path)[0] == 0


def test_a_start_is_a_place_or_0(tmp_path: Path) -> None:
    start: Any
    for start in ("", True, 3, ["runs"]):
        with Checkpointer(tmp_path) as run, pytest.raises(UsageError, match="start is"):
            run.resume(state(), start=start)


def test_a_used_folder_is_refused_before_the_first_step_and_not_at_the_first_save(tmp_path: Path) -> None:
    saved(tmp_path, 500)

    def work(group: Group) -> None:
        with Checkpointer(tmp_path, save=every(steps=1000), group=group) as run:
            with pytest.raises(CheckpointExistsError, match="step 500"):
                run.should_save(1)
            with pytest.raises(CheckpointExistsError, match="step 500"):
                run.save(1, state())
        with Checkpointer(tmp_path, save=every(steps=1000), group=group) as run:
            assert not run.should_save(501)
        with Checkpointer(tmp_path, save=every(steps=1000), group=group) as run:
            run.load(state(), 500)
            assert not run.should_save(501)
        with Checkpointer(tmp_path, save=every(steps=1000), later_steps="move", group=group) as run:
            assert not run.should_save(1)

    for ranks in (1, 2):
        run_ranks(ranks, work)


def test_a_resume_has_a_report_and_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def own(group: Group, number: int = 0) -> dict[str, Any]:
        return {"model": {"w": np.zeros(10)}, "rng": PerRank({"seen": group.rank + number})}

    def save(group: Group) -> None:
        with Checkpointer(tmp_path, wait=True, group=group) as run:
            run.save(7, own(group))

    def resume(group: Group) -> Any:
        with Checkpointer(tmp_path, group=group) as run:
            assert run.report is None
            assert run.resume(own(group)) == 8
            return run.report

    run_ranks(2, save)
    for ranks, level in ((2, logging.INFO), (3, logging.WARNING)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "reknit"):
            reports = run_ranks(ranks, resume)
        assert {(report.step, report.saved_by) for report in reports} == {(7, 2)}
        (line,) = [each for each in caplog.records if each.message.startswith("resumed from")]
        assert line.levelno == level
        assert f"{tmp_path}/step_00000007 (saved by 2 ranks, loaded by {ranks} ranks): " in line.message
        assert "the next step is 8" in line.message
        assert ("rng" in line.message) == (ranks == 3)
    assert numbers(tmp_path) == [7]


def test_a_remark_of_one_rank_is_in_the_log_of_rank_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(group: Group) -> None:
        own: dict[str, Any] = {"model": {"w": np.zeros(10)}, "extra": {"f": None, "g": None}}
        with Checkpointer(tmp_path, wait=True, group=group) as run:
            run.save(7, own)
            if group.rank == 1:
                own["extra"].update(f=print, g=print)
            run.resume(own)

    run_ranks(2, work)
    (line,) = [each.message for each in caplog.records if each.message.startswith("resumed from")]
    assert "extra/f and 1 more: it is a function" in line


def test_a_resume_that_loads_nothing_says_nothing_of_an_earlier_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, wait=True) as run:
        run.save(1, state())
        assert run.resume(state()) == 2
        reknit.delete(tmp_path / "step_00000001")
        caplog.clear()
        with caplog.at_level(logging.INFO, "reknit"):
            assert run.resume(state()) == 0
        assert run.report is None
    assert "resumed from" not in caplog.text
