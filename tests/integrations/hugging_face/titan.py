"""Small models of torchtitan, of the families and sizes of `tiny`, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import sqrt
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers
from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.module import Module

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

_INIT: dict[str, Any] = {
    name: nn.init.zeros_ for name in ("weight", "bias", "sinks", "w1_EFD", "w2_EDF", "w3_EFD")
} | {name: nn.init.zeros_ for name in ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")}


class PlainAttention(Module):  # type: ignore[misc]
    """Causal attention in float32 without a compiler, which returns the weights' sums to sinks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, **more: Any
    ) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * (scale or 1 / sqrt(q.shape[-1]))
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(1, 2)
        transform = more.get("out_transform")
        return transform(out, scores.logsumexp(-1).transpose(1, 2)) if transform else out


def _norm(size: int) -> Any:
    return RMSNorm.Config(normalized_shape=size, eps=1e-6, param_init=_INIT)


def _linear(rows: int, columns: int, *, bias: bool = False) -> Any:
    return Linear.Config(in_features=columns, out_features=rows, bias=bias, param_init=_INIT)


def _around(dim: int = HIDDEN) -> dict[str, Any]:
    return {
        "dim": dim,
        "vocab_size": WORDS,
        "tok_embeddings": Embedding.Config(num_embeddings=WORDS, embedding_dim=dim, param_init=_INIT),
        "norm": _norm(dim),
        "lm_head": _linear(WORDS, dim),
    }


def _grouped(rope: Any, *, fused: bool, norms: bool = False) -> Any:
    return make_gqa_config(
        dim=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        head_dim=HEAD,
        wqkv_param_init=_INIT,
        wo_param_init=_INIT,
        inner_attention=PlainAttention.Config(),
        fuse_qkv=fused,
        rope=rope,
        qk_norm=_norm(HEAD) if norms else None,
    )


def _dense() -> Any:
    return make_ffn_config(dim=HIDDEN, hidden_dim=DENSE, w1_param_init=_INIT, w2w3_param_init=_INIT)


def _qwen_experts() -> Any:
    router = make_router_config(
        dim=HIDDEN, num_experts=EXPERTS, gate_param_init=_INIT, top_k=2, score_func="softmax", route_norm=True
    )
    experts = make_routed_experts_config(
        dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS, top_k=2, param_init=_INIT, comm_backend="standard"
    )
    return make_moe_config(num_experts=EXPERTS, router=router, routed_experts=experts)


def _layers(block: Any, number: int = LAYERS, **parts: Any) -> list[Any]:
    return [
        block.Config(attention_norm=_norm(HIDDEN), ffn_norm=_norm(HIDDEN), **parts) for _ in range(number)
    ]


def _gpt_oss(*, fused: bool) -> Any:
    rope = CosSinRoPE.Config(dim=HEAD, max_seq_len=64)
    if fused:
        linear: Any = FusedQKVLinear.Config(
            head_dim=HEAD,
            n_heads=HEADS,
            n_kv_heads=GROUPS,
            wqkv=_linear((HEADS + 2 * GROUPS) * HEAD, HIDDEN, bias=True),
        )
    else:
        linear = QKVLinear.Config(
            head_dim=HEAD,
            wq=_linear(HEADS * HEAD, HIDDEN, bias=True),
            wkv=_linear(GROUPS * HEAD, HIDDEN, bias=True),
        )
    attention = Attention.Config(
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        head_dim=HEAD,
        dim=HIDDEN,
        qkv_linear=linear,
        wo=_linear(HIDDEN, HEADS * HEAD, bias=True),
        inner_attention=PlainAttention.Config(),
        param_init=_INIT,
        rope=rope,
    )
    experts = RoutedExperts.Config(
        inner_experts=GptOssGroupedExperts.Config(
            dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS, param_init=_INIT
        ),
        token_dispatcher=make_token_dispatcher_config(
            num_experts=EXPERTS, top_k=2, comm_backend="standard", hidden_dim=HIDDEN
        ),
    )
    router = make_router_config(
        dim=HIDDEN,
        num_experts=EXPERTS,
        gate_param_init=_INIT,
        top_k=2,
        score_func="softmax",
        route_norm=True,
        bias=True,
    )
    moe = GptOssMoE.Config(
        num_experts=EXPERTS, load_balance_coeff=1e-3, routed_experts=experts, router=router
    )
    return GptOssModel.Config(
        **_around(), layers=_layers(GptOssTransformerBlock, attention=attention, moe=moe)
    )


def _deepseek() -> Any:
    layers = build_mla_moe_layers(
        n_layers=LAYERS,
        n_dense_layers=1,
        dim=HIDDEN,
        n_heads=HEADS,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        mscale=1.0,
        dense_hidden_dim=DENSE,
        moe_hidden_dim=FFN,
        num_experts=EXPERTS,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        router_num_expert_groups=2,
        router_num_limited_groups=1,
        router_route_scale=2.5,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=_INIT,
        norm_init=_INIT,
        depth_init=lambda _: _INIT,
        depth_experts_init=lambda _: _INIT,
        rope=ComplexRoPE.Config(dim=4, max_seq_len=64),
    )
    for layer in layers:
        layer.attention.inner_attention = PlainAttention.Config()
    return DeepSeekV3Model.Config(**_around(), layers=layers, mtp_layers=[])


def _config(kind: str, *, fused: bool) -> Any:
    turned, halves = (rope.Config(dim=HEAD, max_seq_len=64) for rope in (ComplexRoPE, CosSinRoPE))
    if kind == "llama":
        layers = _layers(
            Llama3TransformerBlock, attention=_grouped(turned, fused=fused), feed_forward=_dense()
        )
        return Llama3Model.Config(**_around(), layers=layers)
    if kind.startswith("qwen3"):
        block = partial(_layers, Qwen3TransformerBlock, attention=_grouped(halves, fused=fused, norms=True))
        if kind == "qwen3":
            return Qwen3Model.Config(
                **_around(), enable_weight_tying=True, layers=block(feed_forward=_dense())
            )
        layers = block(1, feed_forward=_dense()) + block(1, moe=_qwen_experts())
        return Qwen3Model.Config(**_around(), layers=layers)
    return _gpt_oss(fused=fused) if kind == "gpt_oss" else _deepseek()


def build(kind: str, *, seed: int, fused: bool = True) -> nn.Module:
    """Return a small model of a family, with weights that hide nothing."""
    model: nn.Module = _config(kind, fused=fused).build()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-6
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("expert_bias_E") and kind != "deepseek_v3":
                tensor.zero_()
            elif not name.endswith(("cache", "tokens_per_expert_E")):
                tensor.normal_(0.0, 0.2, generator=generator)
    return model.eval()


def in_float32() -> None:
    """Let experts compute in float32, where torchtitan rounds to bfloat16, so that logits can be compared."""
    tensors: Any = torch.Tensor
    tensors.bfloat16 = lambda tensor: tensor
    experts: Any
    for experts in (GroupedExperts, GptOssGroupedExperts):
        experts._grouped_mm = lambda _, **parts: _grouped_mm(**parts)


def _grouped_mm(A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    starts = [0, *offs.tolist()]
    runs = [A[a:b] @ B_t[e] for e, (a, b) in enumerate(pairwise(starts))]
    return torch.cat([*runs, A.new_zeros(len(A) - starts[-1], B_t.shape[-1])])


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits of a model."""
    with torch.no_grad():
        answer: torch.Tensor = model(words())
    return answer
