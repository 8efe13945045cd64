"""The rules from the GPT models of Megatron-Core to the models of Hugging Face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from reknit.integrations.hugging_face.models import (
    in_turns,
    renamed,
    router,
    split,
    stack,
    stacked,
    transpose,
    trim,
)

if TYPE_CHECKING:
    from reknit.integrations.hugging_face.models import Family, Model
    from reknit.transforms import Rule

Spec = Literal["transformer_engine", "local"]
SPECS = ("transformer_engine", "local")

_LAYER, _THERE = "decoder.layers.{i}.", "model.layers.{i}."
_EXPERT = f"{_LAYER}mlp.experts.local_experts.{{e}}."

_VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}

_GROUPED = {
    "linear_proj.{p}": "o_proj.{p}",
    "q_layernorm.weight": "q_norm.weight",
    "k_layernorm.weight": "k_norm.weight",
    "core_attention.softmax_offset": "sinks",
}

_LATENT = {
    "linear_q_proj.weight": "q_proj.weight",
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
}

_LATENT_NORMS = {
    "local": {"q_layernorm.weight": "q_a_layernorm.weight", "kv_layernorm.weight": "kv_a_layernorm.weight"},
    "transformer_engine": {
        "linear_q_up_proj.layer_norm_weight": "q_a_layernorm.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm.weight",
    },
}

_POST_NORMS = {
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
}

# The norm before attention, and that before the feed-forward: by itself, or in the linear layer that follows.
_ALONE = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
_FUSED = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")


def megatron_rules(model: Model, *, padded: int | None = None, spec: Spec | None = None) -> list[Rule]:
    """Return the rules to Hugging Face's names.

    With `spec`, they only take the names of norms in models of this layer spec, so they can be inverted.
    `padded` is the size of the vocabulary that the inverse pads to.
    """
    return [
        *renamed(_VOCABULARY),
        *(trim(name, model.vocab_size, padded) for name in _VOCABULARY.values() if padded or not spec),
        *_attention(model, spec),
        *renamed({"decoder.final_layernorm.weight": "model.norm.weight"}),
        *_norms(model, spec),
        *_feed_forward(model),
        *(_experts(model.family) if model.family.experts else ()),
    ]


def _attention(model: Model, spec: Spec | None) -> list[Rule]:
    here, there = f"{_LAYER}self_attention.", f"{_THERE}self_attn."
    if model.family.latent:
        norms = [names for kind, names in _LATENT_NORMS.items() if spec in {None, kind}]
        return [rule for names in (_LATENT, *norms) for rule in renamed(names, here, there)]
    # In its own order, group by group, so that tensor parallelism cuts between groups.
    parts = (model.heads // model.kv_heads, 1, 1)
    fused = [
        split(
            f"{here}linear_qkv.{kind}",
            [f"{there}{letter}_proj.{kind}" for letter in "qkv"],
            parts,
            model.kv_heads,
        )
        for kind in ("weight", "bias")
    ]
    return [*fused, *renamed(_GROUPED, here, there)]


def _norms(model: Model, spec: Spec | None) -> list[Rule]:
    """Return the rules for the norms of layers: by all names that models have, or by those of one spec."""
    second = "pre_feedforward_layernorm" if model.family.four_norms else "post_attention_layernorm"
    targets = ("input_layernorm.weight", f"{second}.weight")
    rules = renamed(_POST_NORMS, _LAYER, _THERE) if model.family.four_norms else []
    if spec is None:
        return rules + [
            rule
            for names in (_ALONE, _FUSED)
            for rule in renamed(dict(zip(names, targets, strict=True)), _LAYER, _THERE)
        ]
    first = _ALONE[0] if model.family.latent else _FUSED[0]
    rules += renamed({first: targets[0]}, _LAYER, _THERE)
    for number, sparse in enumerate(model.sparse):
        alone = sparse if spec == "transformer_engine" else model.family.latent
        here, there = _LAYER.replace("{i}", str(number)), _THERE.replace("{i}", str(number))
        rules += renamed({(_ALONE if alone else _FUSED)[1]: targets[1]}, here, there)
    return rules


def _feed_forward(model: Model) -> list[Rule]:
    family, rules = model.family, []
    blocks = {"mlp": family.block}
    if family.shared:
        blocks["mlp.shared_experts"] = f"{family.block}.{family.shared}"
    for here, there in blocks.items():
        halves = [f"{_THERE}{there}.{name}_proj.weight" for name in ("gate", "up")]
        rules.append(split(f"{_LAYER}{here}.linear_fc1.weight", halves, (1, 1)))
        rules += renamed({f"{here}.linear_fc2.weight": f"{there}.down_proj.weight"}, _LAYER, _THERE)
    if family.shared:
        gate = {"mlp.shared_experts.gate_weight": f"{family.block}.{family.shared}_gate.weight"}
        rules += renamed(gate, _LAYER, _THERE)
    if family.router_bias:
        bias = "bias" if family.experts == "turns" else "expert_bias"
        rules += renamed({f"mlp.router.{bias}": f"{family.block}.{family.router_bias}"}, _LAYER, _THERE)
    return rules


def _experts(family: Family) -> list[Rule]:
    first, second = stacked(family)
    rules = [
        *renamed({f"{_LAYER}mlp.router.weight": router(family)}),
        stack(f"{_EXPERT}linear_fc1.weight", first),
        stack(f"{_EXPERT}linear_fc2.weight", second),
    ]
    if family.experts == "turns":
        rules += [
            stack(f"{_EXPERT}linear_fc1.bias", f"{first}_bias"),
            stack(f"{_EXPERT}linear_fc2.bias", f"{second}_bias"),
            in_turns(first, 1),
            in_turns(f"{first}_bias", 1),
        ]
    if family.experts != "rows":
        rules += [transpose(first), transpose(second)]
    return rules
