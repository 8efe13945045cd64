"""The rules from the models of torchtitan to the models of Hugging Face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.integrations.hugging_face.models import (
    FAMILIES,
    fuse,
    in_turns,
    renamed,
    router,
    stacked,
    transpose,
)

if TYPE_CHECKING:
    from reknit.integrations.hugging_face.models import Family, Model
    from reknit.transforms import Rule

_LAYER, _THERE = "layers.{i}.", "model.layers.{i}."

_OUTSIDE = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}

_NORMS = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}

_GROUPED = {
    "qkv_linear.wq.{p}": "q_proj.{p}",
    "qkv_linear.wk.{p}": "k_proj.{p}",
    "qkv_linear.wv.{p}": "v_proj.{p}",
    "wo.{p}": "o_proj.{p}",
    "q_norm.weight": "q_norm.weight",
    "k_norm.weight": "k_norm.weight",
    "sinks": "sinks",
}

_LATENT = {
    "wq.weight": "q_proj.weight",
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv_a.weight": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b.weight": "kv_b_proj.weight",
    "wo.weight": "o_proj.weight",
}

_FEED_FORWARD = {
    "w1.weight": "gate_proj.weight",
    "w3.weight": "up_proj.weight",
    "w2.weight": "down_proj.weight",
}

_EXPERTS = f"{_LAYER}moe.routed_experts.inner_experts."

BALANCE = f"{_LAYER}moe.expert_bias_E"
"""The bias by which torchtitan balances the load of experts in all families; Hugging Face has few of them."""


def torchtitan_rules(model: Model) -> list[Rule]:
    """Return the rules to Hugging Face's names.

    Raises `UsageError` for a family that torchtitan does not have.
    """
    family = model.family
    if not family.titan:
        known = ", ".join(name for name, one in FAMILIES.items() if one.titan)
        raise UsageError(
            f"there is no map between torchtitan and {model.kind} models", remedy=f"there is one for {known}"
        )
    attention = (f"{_LAYER}attention.", f"{_THERE}self_attn.")
    return [
        *renamed(_OUTSIDE),
        *renamed(_NORMS, _LAYER, _THERE),
        *renamed(_LATENT if family.latent else _GROUPED, *attention),
        *(_halves(model) if family.pairs else ()),
        *renamed(_FEED_FORWARD, f"{_LAYER}feed_forward.", f"{_THERE}{family.block}."),
        *(_experts(family) if family.experts else ()),
    ]


def _halves(model: Model) -> list[Rule]:
    """Return the rules that turn the pairs of each head into two halves."""
    heads = {"q_proj": model.heads, "k_proj": model.kv_heads}
    return [
        in_turns(f"{_THERE}self_attn.{name}.weight", 0, apart=True, repeat=number)
        for name, number in heads.items()
    ]


def _experts(family: Family) -> list[Rule]:
    first, second = stacked(family)
    rules = renamed({f"{_LAYER}moe.router.gate.weight": router(family)})
    if family.shared:
        shared = f"{_THERE}{family.block}.{family.shared}."
        rules += renamed(_FEED_FORWARD, f"{_LAYER}moe.shared_experts.", shared)
    if family.router_bias:
        bias = f"{_LAYER}moe.router.gate.bias" if family.experts == "turns" else BALANCE
        rules += renamed({bias: f"{_THERE}{family.block}.{family.router_bias}"})
    if family.experts == "turns":
        names = {
            "mlp1_weight_EGD": first,
            "mlp1_bias_EG": f"{first}_bias",
            "mlp2_weight_EDF": second,
            "mlp2_bias_ED": f"{second}_bias",
        }
        return [*rules, *renamed(names, _EXPERTS), transpose(first), transpose(second)]
    gate, up, down = (f"{_EXPERTS}{name}" for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
    return [*rules, fuse([gate, up], first, 1), *renamed({down: second})]
