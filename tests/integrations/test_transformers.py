"""reknit.integrations.transformers with the real Trainer: exact resumes, deaths, limits, pushes."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import reknit
from reknit.errors import CheckpointExistsError, UsageError
from tests import ranks
from tests.integrations.hf_runs import (
    Samples,
    after_each_step,
    interrupted,
    llama,
    same,
    trainer,
    training_state,
)
from tests.integrations.random_death import death
from tests.optional import needs
from tests.running.examples import at_night

pytestmark = [needs("transformers", "transformers"), needs("accelerate", "accelerate")]
EXAMPLE = Path(__file__).parents[2] / "examples/trainers/hf_trainer.py"

run = partial(ranks.run, warm="trainers", joined=False)


def steps_of(folder: Path | str) -> list[int | None]:
    return [step.step for step in reknit.steps(Path(folder, "_reknit"))]


# Two ranks, one of which dies.


def trained(folder: str, seed: int | None, resume: bool, batch: int) -> tuple[int, Any] | None:
    """Train on each rank; return the first step and the state, or None if a rank died."""
    began: list[int] = []

    def reached(number: int) -> None:
        began.append(number)
        time.sleep(0.05)  # steps as short as this model's would all be over before a death
        while number == 3 and reknit.latest(f"{folder}/_reknit") is None:
            time.sleep(0.05)  # agents that have not met yet would wait for a dead one

    made = trainer(folder, model=llama(dropout=0.0), per_device_train_batch_size=batch)
    made.add_callback(after_each_step(reached))
    if seed is not None and os.environ["RANK"] == "1":
        made.add_callback(after_each_step(death(seed, 3, 5)))
    try:
        made.train(resume_from_checkpoint=resume)
    except Exception:
        if seed is None:
            raise
        return None
    return began[0], training_state(made)


@pytest.mark.parametrize("seed", [1])
def test_after_a_death_a_run_goes_on_from_a_committed_step_on_any_number_of_ranks(
    seed: int, tmp_path: Path
) -> None:
    whole = run(2, trained, str(tmp_path / "whole"), None, False, 4)
    died, alone = tmp_path / "died", tmp_path / "alone"
    ends = run(2, trained, str(died), seed, False, 4, some_die=True)
    assert ends == [None, ranks.Died(-signal.SIGKILL)]
    newest = reknit.latest(died / "_reknit", pending="wait", timeout_s=60)
    assert newest is not None
    committed = int(newest[-8:])
    for name in ("_reknit/step_00000099", "checkpoint-99"):  # saves that never came to an end
        shutil.copytree(newest, died / name)
    (died / "_reknit/step_00000099/manifest.json").unlink()
    shutil.copytree(died, alone)
    again = run(2, trained, str(died), None, True, 4)
    assert [first for first, _ in again] == [committed + 1] * 2
    assert [same(one, other) for (_, one), (_, other) in zip(again, whole, strict=True)] == [True, True]
    ((first, state),) = run(1, trained, str(alone), None, True, 8)
    assert first == committed + 1
    for name, tensor in state["weights"].items():  # sums of gradients in another order
        torch.testing.assert_close(tensor, whole[0][1]["weights"][name], rtol=1e-3, atol=1e-4)


# One process.


def with_a_scaler(kind: Any) -> Any:
    """Return a trainer of a kind whose scaler changes its scale every two steps, also on the CPU."""

    class Scaled(kind):  # type: ignore[misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    return Scaled


def as_without_reknit(folder: str) -> Any:
    from transformers import Trainer

    from reknit.integrations.transformers import ReknitTrainer

    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "weight_decay": 0.1}
    found = []
    for kind, name in ((Trainer, "stock"), (ReknitTrainer, "whole"), (ReknitTrainer, "cut")):
        made = trainer(f"{folder}/{name}", with_a_scaler(kind), **options)
        if name == "cut":
            interrupted(made, 7)
            reknit.latest(f"{folder}/cut/_reknit", pending="wait")
            made = trainer(f"{folder}/{name}", with_a_scaler(kind), **options)
            made.train(resume_from_checkpoint=True)
        else:
            made.train()
        found.append((training_state(made), made.accelerator.scaler.get_scale(), made.state.log_history))
    made.save_model(f"{folder}/final")
    return found


def test_a_resumed_run_ends_like_one_of_transformers_without_an_interruption(tmp_path: Path) -> None:
    ((stock, whole, cut),) = run(1, as_without_reknit, str(tmp_path))
    assert same(stock[0], whole[0])
    assert same(whole[0], cut[0])
    assert stock[1] == whole[1] == cut[1] == 16.0 * 2**4
    assert sorted(os.listdir(tmp_path / "cut")) == ["_reknit"]
    assert steps_of(tmp_path / "cut") == [2, 4, 6, 8]
    checkpoint = reknit.open(tmp_path / "cut/_reknit/step_00000008")
    assert set(checkpoint.items) == {"model", "optimizer", "scheduler", "scaler", "rng", "trainer"}


def loaded_again(folder: str) -> tuple[Any, Any, Any]:
    from transformers import AutoModelForCausalLM

    from reknit.integrations.hugging_face.export import export_hf

    made = trainer(folder, max_steps=2)
    made.train()
    made.save_model(f"{folder}/final")
    export_hf(f"{folder}/_reknit/step_00000002", f"{folder}/export")
    made.model.config.save_pretrained(f"{folder}/export")
    again = [AutoModelForCausalLM.from_pretrained(f"{folder}/{name}") for name in ("final", "export")]
    return made.model.state_dict(), again[0].state_dict(), again[1].state_dict()


def test_from_pretrained_takes_the_result_and_an_exported_step(tmp_path: Path) -> None:
    ((trained, *found),) = run(1, loaded_again, str(tmp_path))
    for state in found:
        assert state.keys() == trained.keys()
        assert all(torch.equal(tensor, trained[name]) for name, tensor in state.items())


def limited(folder: str) -> Any:
    from transformers import Trainer

    from reknit.integrations.transformers import ReknitTrainer

    found = []
    for kind, name in ((Trainer, "stock"), (ReknitTrainer, "ours")):
        made = trainer(
            f"{folder}/{name}",
            kind,
            save_total_limit=2,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset=torch.utils.data.Subset(Samples(), range(4)),
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,  # so that the first step is the best
        )
        made.train()
        best = made.state.best_model_checkpoint, made.state.best_global_step, made.state.best_metric
        found.append((best, made.model.state_dict()))
    return found


def test_the_limit_and_the_best_step_are_those_of_transformers(tmp_path: Path) -> None:
    (((stock, before), (ours, weights)),) = run(1, limited, str(tmp_path))
    assert ours[0] == str(tmp_path / "ours/_reknit/step_00000002")
    assert ours[1:] == stock[1:]
    assert steps_of(tmp_path / "ours") == [2, 8]
    assert sorted(os.listdir(tmp_path / "stock")) == ["checkpoint-2", "checkpoint-8"]
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


def elsewhere(folder: str) -> Any:
    """Resume from damaged, foreign and given steps."""
    from transformers import Trainer

    from reknit.integrations.transformers import get_last_checkpoint

    found: dict[str, Any] = {"none": get_last_checkpoint(folder)}
    made = trainer(folder)
    made.train()
    found["whole"] = training_state(made)
    for path in Path(folder, "_reknit/step_00000008/optimizer").iterdir():
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    for name, where in (("damaged", True), ("given", f"{folder}/_reknit/step_00000004")):
        made = trainer(folder)
        made.train(resume_from_checkpoint=where)
        found[name] = training_state(made)
    found["last"] = get_last_checkpoint(folder)
    with pytest.raises(CheckpointExistsError, match="step"):
        trainer(folder).train()
    with pytest.raises(UsageError, match="neither a step of this run"):
        trainer(folder).train(resume_from_checkpoint=f"{folder}/step_00000004")
    trainer(f"{folder}/stock", Trainer, max_steps=8, save_steps=4).train()
    made = trainer(f"{folder}/stock")
    made.train(resume_from_checkpoint=f"{folder}/stock/checkpoint-4")
    found["native"] = training_state(made)  # whose interval of saves, too, comes from the checkpoint
    return found


def test_other_places_to_resume_from(tmp_path: Path) -> None:
    (found,) = run(1, elsewhere, str(tmp_path))
    assert found["none"] is None
    assert found["last"] == str(tmp_path / "_reknit/step_00000008")
    for name in ("damaged", "given", "native"):
        assert same(found[name], found["whole"]), name
    assert steps_of(tmp_path / "stock") == [8]


def preempted(folder: str) -> Any:
    from reknit.policies import every, on_preemption

    def notice(number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    made = trainer(folder, save_strategy="no", checkpoints={"save": every(steps=2) | on_preemption()})
    made.callback_handler.callbacks.insert(0, after_each_step(notice))
    made.train()
    return made.state.global_step


def test_a_policy_adds_saves_and_ends_a_run_that_is_preempted(tmp_path: Path) -> None:
    (step,) = run(1, preempted, str(tmp_path))
    assert steps_of(tmp_path) == [2, step]
    assert step in (3, 4)


class Hub:
    """A hub that records the calls, and the files that a push would send."""

    def __init__(self) -> None:
        self.pushes: list[tuple[str | None, list[str]]] = []

    def create_repo(self, name: str, **_: Any) -> Any:
        return type("Repo", (), {"repo_id": name})

    def upload_folder(self, *, folder_path: str, path_in_repo: str | None = None, **options: Any) -> Any:
        from huggingface_hub.utils._paths import filter_repo_objects

        files = [path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file()]
        kept = filter_repo_objects(map(str, files), ignore_patterns=options.get("ignore_patterns"))
        self.pushes.append((path_in_repo, sorted(kept)))
        return type("Job", (), {"done": lambda _: True})()


def pushed(folder: str, strategy: str) -> Any:
    import transformers.trainer

    hub = Hub()
    vars(transformers.trainer)["hf_api"] = lambda: hub
    made = trainer(
        folder, max_steps=2, push_to_hub=True, hub_model_id="me/tiny", hub_strategy=strategy, hub_token="x"
    )
    made.train()
    return hub.pushes


def test_a_push_has_the_weights_and_the_step_that_was_asked_for(tmp_path: Path) -> None:
    (((place, files), (step, parts)),) = run(1, pushed, str(tmp_path), "all_checkpoints")
    assert place is None
    assert {"model.safetensors", "config.json", "training_args.bin"} <= set(files)
    assert not [name for name in files if "_reknit" in name]
    assert step == "step_00000002"
    assert "manifest.json" in parts


def sharded(folder: str) -> Any:
    return trainer(
        folder,
        model=llama(dropout=0.0),
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=8 // int(os.environ["WORLD_SIZE"]),
    )


def whole_weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor().clone() for name, tensor in made.model.state_dict().items()}


def on_shards(folder: str) -> Any:
    (whole := sharded(f"{folder}/whole")).train()
    interrupted(sharded(f"{folder}/cut"), 5)
    reknit.latest(f"{folder}/cut/_reknit", pending="wait")
    if os.environ["RANK"] == "0":
        shutil.copytree(f"{folder}/cut", f"{folder}/alone")
    torch.distributed.barrier()
    (cut := sharded(f"{folder}/cut")).train(resume_from_checkpoint=True)
    cut.save_model(f"{folder}/final")
    return type(cut.model_wrapped).__name__, whole_weights(whole), whole_weights(cut)


def on_all(folder: str) -> Any:
    (made := sharded(folder)).train(resume_from_checkpoint=True)
    return whole_weights(made)


def test_fsdp2_through_accelerate_resumes_on_any_number_of_ranks(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ((kind, whole, cut), _) = run(2, on_shards, str(tmp_path))
    assert kind == "FSDPLlamaForCausalLM"
    assert all(torch.equal(cut[name], tensor) for name, tensor in whole.items())
    final = load_file(tmp_path / "final/model.safetensors")
    assert all(torch.equal(cut[name], tensor) for name, tensor in final.items())
    (alone,) = run(1, on_all, str(tmp_path / "alone"))
    for name, tensor in whole.items():
        torch.testing.assert_close(alone[name], tensor, rtol=1e-3, atol=1e-4)


# The example.


def example(folder: str, seed: int | None) -> bool:
    """Run the example; the process dies at a random moment if there is a seed."""
    import transformers

    if seed is not None:
        made = vars(transformers)["Trainer"].__init__
        reached = death(seed, 6, 9)

        def slowly(number: int) -> None:
            time.sleep(0.05)
            while number == 6 and reknit.latest(f"{folder}/_reknit") is None:
                time.sleep(0.05)
            reached(number)

        def with_death(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            self.add_callback(after_each_step(slowly))

        vars(transformers)["Trainer"].__init__ = with_death
    sys.argv = ["hf_trainer.py", folder, "--steps", "12"]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return True


@at_night("runs of two ranks die by day, and docs/howto/transformers.md has the calls of the example")
def test_the_example_goes_on_after_a_death(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert run(1, example, str(tmp_path / "whole"), None) == [True]
    assert run(1, example, str(tmp_path / "died"), 3, some_die=True) == [ranks.Died(-signal.SIGKILL)]
    assert not (tmp_path / "died/model.safetensors").exists()
    assert run(1, example, str(tmp_path / "died"), None) == [True]
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "died"))
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert steps_of(tmp_path / "died") == [10, 12]
