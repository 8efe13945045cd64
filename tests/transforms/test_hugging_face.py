"""The ready-made rules lead from models of transformers to Megatron's names and back, and lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import reknit
from reknit import transforms
from reknit.errors import UsageError
from reknit.transforms.apply import Transformed
from reknit.types.manifest import Catalog
from reknit.types.shard import TensorSpec

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **EXPERTS)),
}


RULES = transforms.megatron_to_hugging_face(heads=4, kv_heads=2, vocab_size=40, padded_vocab_size=64)


def offered(steps: list[transforms.Rule], model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    specs = {n: TensorSpec(tuple(v.shape), "float32") for n, v in model.state_dict().items()}
    catalog = Catalog(("m",), {"m": specs}, {"m": {}}, {}, lambda *_: {})
    return {n: spec.shape for n, spec in Transformed.of(steps, catalog).catalog.tensors["m"].items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_becomes_one_of_megatron_and_itself_again(name: str, tmp_path: Any) -> None:
    model, other = MODELS[name](), MODELS[name]()
    there = transforms.inverted(RULES)
    shapes = offered(there, model)
    assert shapes["embedding.word_embeddings.weight"] == (64, 32)
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (64, 32)
    if name == "qwen3_moe":
        assert shapes["decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"] == (32, 32)
    else:
        assert shapes["decoder.layers.0.mlp.linear_fc1.weight"] == (96, 32)
    assert not any(fqn.startswith("model.") for fqn in shapes)
    megatron = {fqn: torch.zeros(shape) for fqn, shape in shapes.items()}
    reknit.save(tmp_path / "hf", {"m": model})
    reknit.load(tmp_path / "hf", {"m": megatron}, options=reknit.LoadOptions(transforms=there))
    reknit.save(tmp_path / "mc", {"m": megatron})
    reknit.load(tmp_path / "mc", {"m": other}, options=reknit.LoadOptions(transforms=RULES))
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_norms_may_stand_by_themselves() -> None:
    apart = transforms.megatron_to_hugging_face(heads=4, kv_heads=2, fused_norms=())
    shapes = offered(transforms.inverted(apart), MODELS["llama"]())
    assert shapes["decoder.layers.0.input_layernorm.weight"] == (32,)
    assert shapes["decoder.layers.0.pre_mlp_layernorm.weight"] == (32,)


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot share"):
        transforms.megatron_to_hugging_face(heads=6, kv_heads=4)
