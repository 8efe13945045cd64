"""Small models of Hugging Face, one of each family that has a map, with weights that hide nothing."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.integrations.hugging_face.sizes import (
    DENSE,
    EXPERTS,
    FFN,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    LAYERS,
    WORDS,
    words,
)

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _ROPE,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPARSE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": FFN,
}
_GEMMA = {"query_pre_attn_scalar": HEAD, "sliding_window": 64, "tie_word_embeddings": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama4_text": {
        "intermediate_size": FFN,
        "intermediate_size_mlp": DENSE,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "no_rope_layers": [1, 1],
        "attn_temperature_tuning": False,
    },
    "mistral": {"sliding_window": None},
    "mixtral": {"intermediate_size": FFN, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {**_SPARSE, "shared_expert_intermediate_size": 16},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {**_SPARSE, "mlp_only_layers": [0]},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {
        **_GEMMA,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {
        "moe_intermediate_size": FFN,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "gpt_oss": {
        "intermediate_size": FFN,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "full_attention"],
    },
}


def config(kind: str, **changes: Any) -> Any:
    """Return the config of a small model of a family."""
    fields = _COMMON | FAMILIES[kind] | changes
    if kind == "deepseek_v3":
        fields.pop("head_dim")
    return transformers.AutoConfig.for_model(kind, **fields)


def build(kind: str, *, seed: int, **changes: Any) -> Any:
    """Return a small model of a family: no weight, bias or norm has a value that it could have by chance."""
    library: Any = transformers.AutoModelForCausalLM
    model = library.from_config(config(kind, **changes), attn_implementation="eager")
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0.0, 0.2, generator=generator)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits of a model."""
    with torch.no_grad():
        answer: torch.Tensor = model(words()).logits
    return answer
