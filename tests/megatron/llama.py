"""Models of Megatron that Hugging Face has too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.megatron import gpt
from tests.megatron.llama_jobs import EXPERTS, FFN, GROUPS, HEADS, HIDDEN, LAYERS, PADDED, WORDS, words

if TYPE_CHECKING:
    from tests.megatron.layouts import Layout


def build(layout: Layout, *, moe: bool, seed: int) -> GPTModel:
    gpt.start(layout)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    experts: dict[str, Any] = {}
    if moe:
        experts = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": FFN,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "qk_layernorm": True,
        }
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=FFN,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        add_bias_linear=False,
        init_method_std=0.2,
        **experts,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if moe else None, qk_layernorm=moe, normalization="RMSNorm"
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=16,
        share_embeddings_and_output_weights=False,
        parallel_output=False,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb.cp_group = None
    with torch.no_grad():  # norms begin as ones, which would hide mistakes
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    return model


def logits(model: GPTModel) -> torch.Tensor:
    """Return the logits of a model, without the padding of the vocabulary."""
    rows = words()
    positions = torch.arange(rows.shape[1])[None].expand_as(rows)
    mask = torch.tril(torch.ones(1, 1, rows.shape[1], rows.shape[1])) < 0.5
    with torch.no_grad():
        answer: torch.Tensor = model(rows, positions, mask)[..., :WORDS]
    return answer
