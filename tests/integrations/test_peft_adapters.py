"""A run that trains adapters saves nothing else, and resumes on its own base only; also one of TRL."""

from __future__ import annotations

import shutil
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.errors import MismatchError
from tests import ranks
from tests.integrations.hf_runs import Samples, interrupted, llama, same, trainer, training_state, with_lora
from tests.optional import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs("transformers", "transformers"), needs("peft", "peft")]
run = partial(ranks.run, warm="trainers", joined=False)


def tuned(folder: str, stop: int | None, resume: bool) -> Any:
    model = with_lora(llama(name="tiny/base"), modules_to_save=["lm_head"])
    made = trainer(folder, model=model)
    if stop is not None:
        return interrupted(made, stop)
    made.train(resume_from_checkpoint=resume)
    made.save_model(f"{folder}/final")
    return training_state(made)


def from_adapters(folder: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(llama(name="tiny/base"), folder).state_dict()


def on_another_base(folder: str) -> None:
    made = trainer(folder, model=with_lora(llama(name="tiny/other"), modules_to_save=["lm_head"]))
    with pytest.raises(MismatchError, match=r"adapters of .*'tiny/base'.*'tiny/other'"):
        made.train(resume_from_checkpoint=True)
    with pytest.raises(MismatchError, match="this model has None"):
        trainer(folder).train(resume_from_checkpoint=True)


def test_adapters_alone_are_saved_and_resumed_bitwise(tmp_path: Path) -> None:
    whole = run(2, tuned, str(tmp_path / "whole"), None, False)
    run(2, tuned, str(tmp_path / "cut"), 5, False)
    newest = reknit.latest(tmp_path / "cut/_reknit", pending="wait")
    assert newest is not None
    checkpoint = reknit.open(newest)
    assert set(checkpoint.tensors["model"]) == {
        name for name in whole[0]["weights"] if ".default." in name and ("lora_" in name or "lm_head" in name)
    }
    shutil.copytree(tmp_path / "cut", tmp_path / "other")
    cut = run(2, tuned, str(tmp_path / "cut"), None, True)
    assert [same(one, other) for one, other in zip(whole, cut, strict=True)] == [True, True]
    (loaded,) = run(1, from_adapters, str(tmp_path / "cut/final"))
    assert all(torch.equal(tensor, whole[0]["weights"][name]) for name, tensor in loaded.items())
    run(1, on_another_base, str(tmp_path / "other"))


def fine_tuned(folder: str) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from reknit.integrations.transformers import ReknitTrainerMixin

    transformers: Any = import_module("transformers")
    trl: Any = import_module("trl")

    class MyTrainer(ReknitTrainerMixin, trl.SFTTrainer):  # type: ignore[misc]
        pass

    samples = Dataset.from_dict({"input_ids": [Samples()[i]["input_ids"].tolist() for i in range(40)]})
    words = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"
    )

    def made(name: str) -> Any:
        args = trl.SFTConfig(
            output_dir=f"{folder}/{name}", max_steps=8, save_steps=2, per_device_train_batch_size=4,
            learning_rate=1e-2, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_length=6,
        )  # fmt: skip
        found: Any = MyTrainer(
            model=with_lora(llama()), args=args, train_dataset=samples, processing_class=tokenizer
        )
        found.log = lambda *_, **__: None
        return found

    (whole := made("whole")).train()
    interrupted(made("cut"), 5)
    reknit.latest(f"{folder}/cut/_reknit", pending="wait")
    (cut := made("cut")).train(resume_from_checkpoint=True)
    return training_state(whole), training_state(cut)


@needs("trl", "trl")
def test_a_trainer_of_trl_inherits_it(tmp_path: Path) -> None:
    ((whole, cut),) = run(1, fine_tuned, str(tmp_path))
    assert same(whole, cut)
    steps = reknit.steps(tmp_path / "cut/_reknit")
    assert [step.step for step in steps] == [2, 4, 6, 8]
    assert set(steps[-1].items) == {"model", "optimizer", "scheduler", "rng", "trainer"}
