"""torchtitan's own trainer saves and resumes by reknit: layouts, kills, policies, Hugging Face's format."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import UsageError
from reknit.runs import load_step
from tests.integrations import torchtitan_job
from tests.integrations.random_death import death
from tests.optional import needs
from tests.ranks import run
from tests.running.examples import at_night
from tests.runs.owners import Owner
from tests.torchrun import pieces

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
OWN = ROOT / ".venv" / "torchtitan" / "bin" / "python"
TITAN = needs("torchtitan", "torchtitan")
FSDP_TP = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
FSDP = {"data_parallel_shard_degree": 2}
PIPELINE = {**FSDP, "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}

run_titan = partial(run, warm="torchtitan")


def _truth(trainer: Any) -> dict[str, Any]:
    """Return the whole state: weights, moments, counters."""
    found: dict[str, Any] = {"step": trainer.step, "epoch": trainer.lr_schedulers.state_dict()["last_epoch"]}
    for part in trainer.model_parts:
        found |= {f"model.{name}": value for name, value in part.state_dict().items()}
    found |= {f"optimizer.{name}": value for name, value in trainer.optimizers.state_dict().items()}
    return pieces.wholes(found)


def _require_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert equal, name


def _train(
    folder: str, steps: int, parallel: dict[str, Any], seed: int | None = None, **checkpoint: Any
) -> Any:
    trainer = torchtitan_job.trainer_of(folder, steps, parallel, **checkpoint)
    if seed is not None and dist.get_rank() == 1:
        dies, step = death(seed, 3, 5), trainer.train_step

        def one(*arguments: Any) -> None:
            step(*arguments)
            dies(trainer.step)

        trainer.train_step = one
    try:
        loaded: list[int] = []
        load = trainer.checkpointer.load

        def noted(step: int) -> None:
            load(step)
            loaded.append(trainer.step)

        trainer.checkpointer.load = noted
        trainer.train()
        trainer.close()
    except RuntimeError:
        if seed is None:
            raise
        os._exit(1)  # the peer is dead; agents go on
    return loaded[0], _truth(trainer)


def _resumed(folder: str) -> None:
    expected = _train(f"{folder}/whole", 4, {})[1]
    _train(f"{folder}/cut", 2, {})
    loaded, found = _train(f"{folder}/cut", 4, {})
    assert loaded == 2
    _require_equal(expected, found)


@TITAN
def test_a_run_resumes_bitwise(tmp_path: Path) -> None:
    run_titan(1, _resumed, str(tmp_path))


@TITAN
@pytest.mark.parametrize(
    ("ranks", "parallel", "fewer", "other"),
    [pytest.param(2, FSDP, 1, {}, id="2-1"), pytest.param(4, FSDP_TP, 2, FSDP, id="4-2")],
)
def test_a_killed_run_resumes_bitwise_and_on_another_number_of_ranks(
    tmp_path: Path, ranks: int, parallel: dict[str, Any], fewer: int, other: dict[str, Any]
) -> None:
    whole, root = str(tmp_path / "whole"), str(tmp_path / "root")
    expected = run_titan(ranks, _train, whole, 8, parallel)[0][1]
    run_titan(ranks, _train, root, 40, parallel, 2, some_die=True)
    reknit.latest(f"{root}/checkpoint", pending="wait", timeout_s=60)
    committed = [step.step for step in reknit.steps(f"{root}/checkpoint")]
    assert committed
    newest = max(step for step in committed if step is not None)
    for loaded, found in run_titan(ranks, _train, root, 8, parallel):
        assert loaded == newest
        _require_equal(expected, found)
    # torchtitan's loader does not change its data-parallel degree
    train = _train if other else partial(_train, exclude_from_loading=["dataloader"])
    for loaded, found in run_titan(fewer, train, root, 8, other):
        assert loaded == 8
        _require_equal(expected, found)


@pytest.mark.skipif(not OWN.exists(), reason="torchtitan's environment is not there; scripts/setup makes it")
@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="the tests run in torchtitan's environment")
@pytest.mark.timeout(600)
@at_night("it has an environment and a trainer of its own; tests of other trainers resume by day")
def test_a_run_resumes_in_the_environment_of_torchtitan(tmp_path: Path) -> None:
    """At night, all tests of this file run there."""
    call = f"from {__name__} import resume_alone; resume_alone({str(tmp_path)!r})"
    ran = subprocess.run(
        [str(OWN), "-c", call],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def resume_alone(folder: str) -> None:
    """Resume a run in this process, which is a rank alone, without the imports of pytest and its forks."""
    torchtitan_job.on_cpu()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    _resumed(folder)


def _stepped(folder: str) -> Any:
    """Step the optimizers of a pipeline with made gradients: its schedule needs a newer torch than 2.13."""
    trainer = torchtitan_job.trainer_of(folder, 5, PIPELINE)
    for number, part in enumerate(trainer.model_parts):
        for parameter in part.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 + number)
    trainer.optimizers.step()
    trainer.lr_schedulers.step()
    trainer.step = 2
    assert trainer.checkpointer.save(2)
    trainer.close()
    return _truth(trainer)


def _only_loaded(folder: str, parallel: dict[str, Any]) -> Any:
    trainer = torchtitan_job.trainer_of(folder, 5, parallel)
    assert trainer.checkpointer.load()
    trainer.close()
    return _truth(trainer)


@TITAN
def test_the_stages_of_a_pipeline_load_into_a_model_without_one(tmp_path: Path) -> None:
    expected = run_titan(4, _stepped, str(tmp_path))[0]
    _require_equal(expected, run_titan(4, _only_loaded, str(tmp_path), FSDP_TP)[0])


def _policies(folder: str) -> None:
    trainer = torchtitan_job.trainer_of(
        folder, 6, interval=3, enable_first_step_checkpoint=True, last_save_model_only=True,
        export_dtype="bfloat16", async_mode="disabled",
    )  # fmt: skip
    steps = trainer.checkpointer
    trainer.train()
    assert [one.step for one in reknit.steps(steps.folder)] == [3, 6]  # two are kept
    assert not steps.save(7)
    with reknit.open(f"{steps.folder}/step_00000006") as last:
        assert last.items == ("model",)
        assert {spec.dtype for spec in last.tensors["model"].values()} == {"bfloat16"}
    trainer.close()

    again = torchtitan_job.trainer_of(folder, 6, load_step=3, exclude_from_loading=["lr_scheduler"])
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_step.logger, "log", lambda level, text, *parts: lines.append(text % parts))
        assert again.checkpointer.load(3)
    (line,) = lines
    assert line.startswith(f"resumed from {steps.folder}/step_00000003 (step 3, saved by 1 rank, loaded by 1")
    assert (again.step, again.lr_schedulers.state_dict()["last_epoch"]) == (3, 0)
    with pytest.raises(reknit.CheckpointNotFoundError, match="step 4"):
        again.checkpointer.load(4)
    again.checkpointer.config.exclude_from_loading = ["absent"]
    with pytest.raises(reknit.UsageError, match="absent"):
        again.checkpointer.load(3)
    again.close()

    only = torchtitan_job.trainer_of(folder, 6, load_only=True, load_step=3)
    assert only.checkpointer.load(3)
    assert not only.checkpointer.save(6, last_step=True)
    only.close()

    model = torchtitan_job.trainer_of(
        f"{folder}/new",
        6,
        initial_load_path=f"{folder}/checkpoint/step_00000003",
        initial_load_model_only=True,
    )
    assert model.checkpointer.load()
    assert model.step == 0
    assert torch.equal(model.model_parts[0].norm.weight, only.model_parts[0].norm.weight)
    model.close()

    seed = torchtitan_job.trainer_of(f"{folder}/seed", 6, last_save_model_only=True)
    assert seed.checkpointer.save(0, last_step=True)
    seed.close()
    grown = torchtitan_job.trainer_of(f"{folder}/seed", 6)
    assert grown.checkpointer.load()
    assert grown.step == 0
    grown.close()

    disabled = torchtitan_job.trainer_of(f"{folder}/none", 6, enable=False)
    assert not disabled.checkpointer.load()
    assert not disabled.checkpointer.save(3)
    disabled.close()


@TITAN
def test_the_fields_of_the_config_decide_what_is_saved_kept_and_loaded(tmp_path: Path) -> None:
    run_titan(1, _policies, str(tmp_path))


def _hugging_face(folder: str) -> None:
    trainer = torchtitan_job.trainer_of(
        folder, 2, interval=1, last_save_model_only=True, last_save_in_hf=True
    )
    trainer.train()
    trainer.close()
    path = f"{folder}/checkpoint/step-2"
    assert any(name.endswith(".safetensors") for name in os.listdir(path))
    assert reknit.latest(f"{folder}/checkpoint", pending="wait") == f"{folder}/checkpoint/step_00000001"
    other = torchtitan_job.trainer_of(
        f"{folder}/other", 2, initial_load_path=path, initial_load_in_hf=True, initial_load_model_only=True
    )
    assert other.checkpointer.load()
    mine, theirs = (one.model_parts[0].state_dict() for one in (trainer, other))
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    other.close()


@TITAN
def test_weights_leave_and_enter_in_the_format_of_hugging_face(tmp_path: Path) -> None:
    run_titan(1, _hugging_face, str(tmp_path))


def _from_torch(folder: str) -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    theirs = torchtitan_job.config_of(folder, 2, {}, {})
    theirs.checkpoint = CheckpointManager.Config(enable=True, interval=1, last_save_model_only=False)
    trainer = theirs.build()
    trainer.train()
    trainer.close()
    beside = torchtitan_job.trainer_of(folder, 4)
    with pytest.raises(UsageError, match=r"step-2 is one of torchtitan's own") as refused:
        beside.checkpointer.load()
    beside.close()
    (named,) = re.findall(r"initial_load_path to '([^']*)'", str(refused.value.remedy))
    ours = torchtitan_job.trainer_of(f"{folder}/ours", 2, initial_load_path=named)
    assert ours.checkpointer.load()
    assert ours.step == 2
    _require_equal(_truth(trainer), _truth(ours))
    ours.close()


@TITAN
def test_a_run_begins_with_a_checkpoint_of_torchtitans_own_manager(tmp_path: Path) -> None:
    run_titan(1, _from_torch, str(tmp_path))


def _refused(cause: Callable[[], Any], words: str) -> str:
    """Return a remedy of an error of torchtitan's trainer, in which `words` must stand."""
    with pytest.raises(reknit.ReknitError) as caught:
        cause()
    remedy = str(caught.value.remedy)
    assert words in remedy
    return remedy


def _remedies(folder: str) -> None:
    def trained(at: str, steps: int, library: Any = None, **checkpoint: Any) -> Any:
        fields = {name: checkpoint.pop(name) for name in ("hf_assets_path",) if name in checkpoint}
        adapter = checkpoint.pop("adapter", True)
        config = torchtitan_job.config_of(f"{folder}/{at}", steps, {}, checkpoint)
        config.model_spec.state_dict_adapter = config.model_spec.state_dict_adapter if adapter else None
        for name, value in fields.items():
            setattr(config, name, value)
        if library is not None:
            config.checkpoint = library.Config(enable=True, interval=1, last_save_model_only=False)
        trainer = config.build()
        try:
            loads: list[bool] = []
            load = trainer.checkpointer.load
            trainer.checkpointer.load = lambda step: loads.append(load(step))
            trainer.train()
            return loads, [one.step for one in reknit.steps(f"{folder}/{at}/checkpoint")]
        finally:
            trainer.close()

    from torchtitan.components.checkpointer import CheckpointManager

    step, kept = {"interval": 1}, {"interval": 1, "keep_latest_k": 0}
    for at, name in (("theirs", "step-1"), ("renamed", "iter_1")):
        trained(at, 1, CheckpointManager)
        os.rename(f"{folder}/{at}/checkpoint/step-1", f"{folder}/{at}/checkpoint/{name}")
        remedy = _refused(lambda at=at: trained(at, 2, **step), f"/{name}'")  # type: ignore[misc]
        found = re.search(
            r"set checkpoint.(initial_load_path) to '(.*)' and checkpoint.(initial_load_model_only) to "
            r"False; to begin anew, set another checkpoint.(folder)$",
            remedy,
        )
        assert found, remedy
        assert trained(at, 2, **step, **{found[1]: found[2], found[3]: False}) == ([True], [2])
        assert trained("anew", 1, **step, **{found[4]: at}) == ([False], [])
        assert reknit.latest(f"{folder}/anew/{at}")

    trained("ours", 2, **kept)
    remedy = _refused(lambda: trained("ours", 3, exclude_from_loading=["absent"]), "the states are [")
    states = ast.literal_eval(remedy.removeprefix("the states are "))
    assert trained("ours", 3, exclude_from_loading=states[:1], **kept) == ([True], [1, 2, 3])
    trained("part", 2, last_save_model_only=True, **kept)
    assert _refused(lambda: trained("part", 3, **kept), "checkpoint.exclude_from_loading leaves whole states")
    others = [name for name in states if name != "model"]
    assert trained("part", 1, exclude_from_loading=others, load_only=True, **kept) == ([True], [1, 2])
    owner = Owner(f"{folder}/ours/checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reknit.engine.stored.heartbeat.time", SimpleNamespace(sleep=lambda _: owner.beat()))
        assert _refused(lambda: trained("ours", 4, **kept), "other_run='take_over'")
        assert trained("ours", 4, load_only=True) == ([True], [1, 2, 3])
        assert trained("ours", 4, other_run="take_over", **kept) == ([True], [1, 2, 3, 4])

    hugging = {"last_save_model_only": True, "last_save_in_hf": True}
    assert _refused(lambda: trained("hf", 1, adapter=False, **hugging), "last_save_in_hf to False")
    assert trained("plain", 1, adapter=False, **hugging | {"last_save_in_hf": False})[1] == [1]
    trained("hf", 1, **hugging)
    path = f"{folder}/hf/checkpoint/step-1"
    begins: dict[str, Any] = {"initial_load_in_hf": True, "initial_load_model_only": True, **step}
    assert _refused(
        lambda: trained("a", 1, hf_assets_path="", **begins), "initial_load_path or hf_assets_path"
    )
    assert trained("a", 1, hf_assets_path=path, **begins) == ([True], [1])
    assert trained("b", 1, hf_assets_path="", initial_load_path=path, **begins) == ([True], [1])
    assert _refused(lambda: trained("c", 1, adapter=False, **begins), "initial_load_in_hf to False")
    begins |= {"initial_load_in_hf": False, "initial_load_path": f"{folder}/ours/checkpoint/step_00000003"}
    assert trained("c", 1, adapter=False, **begins) == ([True], [1])


@TITAN
def test_a_remedy_can_be_followed_in_the_config(tmp_path: Path) -> None:
    run_titan(1, _remedies, str(tmp_path))
