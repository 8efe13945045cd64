"""Checkpoints of Megatron load into Hugging Face models and the other way round, with equal logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import reknit
from tests import ranks
from tests.megatron import llama_jobs as llama
from tests.megatron.layouts import Layout

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 2e-5
"""For logits around one in float32; the two libraries add in different orders."""


def hugging_face(*, moe: bool, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": llama.HIDDEN,
        "num_hidden_layers": llama.LAYERS,
        "num_attention_heads": llama.HEADS,
        "num_key_value_heads": llama.GROUPS,
        "head_dim": llama.HIDDEN // llama.HEADS,
        "intermediate_size": llama.FFN,
        "vocab_size": llama.WORDS,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "attn_implementation": "eager",
        "initializer_range": 0.2,
    }
    if not moe:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    experts: dict[str, Any] = {
        "moe_intermediate_size": llama.FFN,
        "num_experts": llama.EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = model(llama.words()).logits
    return answer


@pytest.mark.parametrize(
    ("moe", "layout"),
    [(False, Layout(2, tp=2)), (True, Layout(2, experts=llama.EXPERTS, ep=2))],
    ids=["llama-tp2", "qwen3-moe-ep2"],
)
def test_logits_are_those_of_the_other_library(moe: bool, layout: Layout, tmp_path: Path) -> None:
    answers = ranks.run(2, llama.save, layout, str(tmp_path / "megatron"), moe, warm="megatron")
    model = hugging_face(moe=moe, seed=3)
    report = reknit.load(
        tmp_path / "megatron", {"model": model}, options=reknit.LoadOptions(transforms=llama.RULES)
    )
    assert report.unexpected == ()
    assert float(answers[0].std()) > 0.1
    assert torch.allclose(logits(model), answers[0], atol=TOLERANCE)

    other = hugging_face(moe=moe, seed=4)
    assert not torch.allclose(logits(other), answers[0], atol=0.05)
    reknit.save(tmp_path / "hugging_face", {"model": other})
    back = ranks.run(
        2, llama.load_from_hugging_face, layout, str(tmp_path / "hugging_face"), moe, warm="megatron"
    )
    assert torch.allclose(logits(other), back[0], atol=TOLERANCE)
