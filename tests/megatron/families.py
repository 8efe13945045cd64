"""Models of Megatron in the families that Hugging Face has too."""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from tests.integrations.hugging_face.sizes import (
    DENSE,
    EXPERTS,
    FFN,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    LAYERS,
    PADDED,
    WORDS,
    words,
)
from tests.megatron import gpt

if TYPE_CHECKING:
    from tests.megatron.layouts import Layout

_EXPERTS: dict[str, Any] = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": FFN,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
_GEMMA: dict[str, Any] = {"activation_func": partial(F.gelu, approximate="tanh")}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama4_text": {
        **_EXPERTS,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": FFN,
        "moe_layer_freq": [0, 1],
        "rotary_interleaved": True,
    },
    "mistral": {},
    "mixtral": _EXPERTS,
    "qwen2": {"add_qkv_bias": True},
    "qwen2_moe": {
        **_EXPERTS,
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
    },
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": {**_EXPERTS, "qk_layernorm": True, "moe_layer_freq": [0, 1]},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "qk_layernorm": True},
    "deepseek_v3": {
        **_EXPERTS,
        "num_query_groups": HEADS,
        "moe_layer_freq": [0, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": FFN,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "rope",
    },
    "gpt_oss": {
        **_EXPERTS,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "softmax_type": "learnable",
    },
}
TIED = {"qwen3", "gemma2", "gemma3_text"}


class ZeroCenteredNorm(torch.nn.Module):
    """A norm whose weights are added to one; Megatron has it in Transformer Engine only."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class LinearAndNorm(RowParallelLinear):  # type: ignore[misc]
    """A linear layer and the norm that follows it, by the names that Megatron Bridge gives them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.post_layernorm = ZeroCenteredNorm(self.config, self.output_size)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out, bias = super().forward(input_)
        return self.post_layernorm(out), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        norm = make_sharded_tensors_for_checkpoint(
            self.post_layernorm.state_dict(keep_vars=True), f"{prefix}post_layernorm.", {}, sharded_offsets
        )
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | norm


class WideAttention(torch.nn.Module):
    """Attention whose values are narrower than its keys, which Megatron has in Transformer Engine only."""

    def __init__(self, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def _layers(kind: str, config: TransformerConfig) -> TransformerBlockSubmodules:
    specs = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=kind == "llama4_text"
    )
    if config.multi_latent_attention:
        multi_latent_attention.HAVE_TE = False  # it looks for classes that are missing without it
        for spec in specs:
            spec.submodules.self_attention.submodules.core_attention = WideAttention
    if not kind.startswith("gemma"):
        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=WrappedTorchNorm)
    for spec in specs:
        parts, norm = spec.submodules, ZeroCenteredNorm
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        parts.mlp.submodules.linear_fc2 = LinearAndNorm
        attention = parts.self_attention.submodules
        attention.linear_proj = LinearAndNorm
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=ZeroCenteredNorm)


def build(kind: str, layout: Layout, *, seed: int) -> GPTModel:
    """Return a small model of a family, with weights that hide nothing."""
    gpt.start(layout)
    model_parallel_cuda_manual_seed(seed)
    settings = SETTINGS[kind]
    make = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    common: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": HEAD,
        "ffn_hidden_size": DENSE,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "add_bias_linear": False,
        "init_method_std": 0.2,
    }
    config = make(**(common | settings))
    model = GPTModel(
        config,
        _layers(kind, config),
        vocab_size=PADDED,
        max_sequence_length=16,
        share_embeddings_and_output_weights=kind in TIED,
        parallel_output=False,
        position_embedding_type="none" if make is MLATransformerConfig else "rope",
    )
    for module in model.modules():
        if hasattr(module, "rotary_pos_emb"):
            module.rotary_pos_emb.cp_group = None
    if kind.startswith("gemma"):
        model.embedding.register_forward_hook(lambda *args: args[2] * sqrt(HIDDEN))
    with torch.no_grad():
        for number, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
            generator = torch.Generator().manual_seed(seed * 1000 + number)  # the same on all ranks
            if "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("bias", "softmax_offset")):
                tensor.normal_(0.0, 0.2, generator=generator)
    return model.eval()


def logits(model: GPTModel) -> torch.Tensor:
    """Return the logits of a model, without the padding of the vocabulary."""
    rows = words()
    positions = torch.arange(rows.shape[1])[None].expand_as(rows)
    mask = torch.tril(torch.ones(1, 1, rows.shape[1], rows.shape[1])) < 0.5
    with torch.no_grad():
        answer: torch.Tensor = model(rows, positions, mask)[..., :WORDS]
    return answer
