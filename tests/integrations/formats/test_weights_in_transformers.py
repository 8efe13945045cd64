from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import reknit
from reknit.integrations.hugging_face.export import export_hf

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = torch.arange(20).reshape(2, 10)


def tiny(*, tie: bool) -> tuple[transformers.LlamaConfig, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tie,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return config, model.eval()


def reloaded(out: Path) -> tuple[Any, dict[str, Any]]:
    loader: Any = transformers.AutoModelForCausalLM
    model, loading = loader.from_pretrained(out, output_loading_info=True)
    return model.eval(), {name: found for name, found in loading.items() if found}


@pytest.mark.parametrize(
    ("tie", "keep_tied", "limit"), [(False, False, 5000), (True, False, 10**9), (True, True, 5000)]
)
def test_transformers_computes_the_same_logits_from_an_export(
    tmp_path: Path, tie: bool, keep_tied: bool, limit: int
) -> None:
    config, model = tiny(tie=tie)
    reknit.save(tmp_path / "c", {"model": model})
    report = export_hf(tmp_path / "c", tmp_path / "out", max_shard_nbytes=limit, keep_tied=keep_tied)
    assert report.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tie and not keep_tied else {})
    config.save_pretrained(tmp_path / "out")
    again, complaints = reloaded(tmp_path / "out")
    assert complaints == {}
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_an_export_has_the_files_and_names_of_save_pretrained(tmp_path: Path) -> None:
    for tie in (False, True):
        _, model = tiny(tie=tie)
        model = model.to(torch.bfloat16)
        place = tmp_path / str(tie)
        reknit.save(place / "c", {"model": model})
        export_hf(place / "c", place / "ours")
        model.save_pretrained(place / "theirs")
        ours, theirs = reloaded_tensors(place / "ours"), reloaded_tensors(place / "theirs")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def reloaded_tensors(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    assert {path.name for path in out.glob("*.safetensors*")} == {"model.safetensors"}
    return load_file(out / "model.safetensors")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_peft_loads_an_adapter_as_its_own(tmp_path: Path, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file

    _, base = tiny(tie=False)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], **options)
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    reknit.save(tmp_path / "c", {"model": adapted})
    adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    export_hf(tmp_path / "c", tmp_path / "ours", adapter="default", config_from=tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = peft.PeftModel.from_pretrained(tiny(tie=False)[1], tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, adapted.eval()(TOKENS).logits)
