"""A run that trains adapters saves nothing else, and resumes on its own base only; also one of TRL."""

from __future__ import annotations

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


def adapted(folder: str, base: str) -> Any:
    return trainer(folder, model=with_lora(llama(name=base), modules_to_save=["lm_head"]))


def tuned(folder: str) -> Any:
    (whole := adapted(f"{folder}/whole", "tiny/base")).train()
    interrupted(adapted(f"{folder}/cut", "tiny/base"), 5)
    (cut := adapted(f"{folder}/cut", "tiny/base")).train(resume_from_checkpoint=True)
    cut.save_model(f"{folder}/final")
    return training_state(whole)["weights"], same(training_state(whole), training_state(cut))


def loaded_again(folder: str) -> Any:
    from peft import PeftModel

    with pytest.raises(MismatchError, match=r"adapters of .*'tiny/base'.*'tiny/other'"):
        adapted(f"{folder}/cut", "tiny/other").train(resume_from_checkpoint=True)
    with pytest.raises(MismatchError, match="this model has None"):
        trainer(f"{folder}/cut").train(resume_from_checkpoint=True)
    return PeftModel.from_pretrained(llama(name="tiny/base"), f"{folder}/final").state_dict()


def test_adapters_alone_are_saved_and_resumed_bitwise(tmp_path: Path) -> None:
    ((weights, *ends), (_, *others)) = run(2, tuned, str(tmp_path))
    assert [*ends, *others] == [True, True]
    checkpoint = reknit.open(tmp_path / "cut/_reknit/step_00000008")
    trained = {name for name in weights if ".default." in name}
    assert set(checkpoint.tensors["model"]) == trained
    assert any("lora_A" in name for name in trained)
    assert any("lm_head" in name for name in trained)
    (loaded,) = run(1, loaded_again, str(tmp_path))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.items())


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


def saved_by_libraries(folder: str) -> None:
    model = llama(name="tiny/base")
    model.save_pretrained(f"{folder}/one")
    model.save_pretrained(f"{folder}/sharded", max_shard_size="1KB")
    with_lora(model).save_pretrained(f"{folder}/adapter")


def test_what_hugging_face_libraries_saved_is_opened_in_place(tmp_path: Path) -> None:
    run(1, saved_by_libraries, str(tmp_path))
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    read = {}
    for name, what in (("one", "Hugging Face"), ("sharded", "Hugging Face"), ("adapter", "PEFT")):
        with reknit.open(tmp_path / name) as checkpoint:
            assert checkpoint.manifest.origin["format"] == what
            assert checkpoint.values["config"]
            read[name] = checkpoint.read_all(["model"])["model"]
    assert read["one"].keys() == read["sharded"].keys()
    assert all(read["one"][key].equal(read["sharded"][key]) for key in read["one"])
    assert any("lora_A" in key for key in read["adapter"])
