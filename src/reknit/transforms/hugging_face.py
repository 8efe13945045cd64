"""Ready-made rules: the names and cuts of Megatron-Core's GPT models in Hugging Face's models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.errors import UsageError
from reknit.keywords import checked_call
from reknit.transforms.cuts import Cuts, Split, Stack
from reknit.transforms.pattern import Pattern
from reknit.transforms.rules import Rename, Resize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.transforms.base import Rule

_LAYER, _THERE = "decoder.layers.{i}", "model.layers.{i}"


@checked_call
def megatron_to_hugging_face(
    *,
    heads: int,
    kv_heads: int,
    vocab_size: int | None = None,
    padded_vocab_size: int | None = None,
    fused_norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
) -> list[Rule]:
    """Return the rules from a Megatron-Core GPT model to Hugging Face's Llama, Qwen2, Qwen3, or Qwen3-MoE.

    `heads` and `kv_heads` are the numbers of query and of key-value heads.  `vocab_size` is that of the
    Hugging Face model where Megatron padded the vocabulary, to `padded_vocab_size`, which only the way back
    needs.  `reknit.transforms.inverted` turns the rules round; only there the option `fused_norms` counts.
    It names the layer norms that Megatron saves under the name of the linear layer that follows: by default
    all.  With Transformer Engine, it is all but the norm before experts,
    ``fused_norms=("input_layernorm",)``.

    Names are those of a loaded `transformers` (5 or newer) model, with all experts of a layer in one tensor.
    Raises `UsageError` for numbers that do not fit.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(
            f"{heads} query heads cannot share {kv_heads} key-value heads evenly",
            remedy="give num_attention_heads and num_key_value_heads of the model",
        )
    return [
        *_vocabulary(vocab_size, padded_vocab_size),
        *_attention(heads // kv_heads, kv_heads),
        *_norms(fused=fused_norms),
        *_mlp(),
        *_experts(),
    ]


def _rename(source: str, target: str) -> Rule:
    return Rename((Pattern(source),), (Pattern(target),), optional=True)


def _vocabulary(size: int | None, padded: int | None) -> list[Rule]:
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
    }
    rules = [_rename(source, target) for source, target in names.items()]
    if size is not None:
        both = [(Pattern(name),) for name in names.values()]
        rules += [Resize(name, name, size, 0, grows=False, back=padded, optional=True) for name in both]
    return rules


def _attention(per_group: int, groups: int) -> list[Rule]:
    here, there = f"{_LAYER}.self_attention", f"{_THERE}.self_attn"
    # In its own order, group by group, so that tensor parallelism cuts between groups.
    cuts = Cuts(0, (per_group, 1, 1), groups)
    fused: list[Rule] = [
        Split(
            (Pattern(f"{here}.linear_qkv.{kind}"),),
            tuple(Pattern(f"{there}.{letter}_proj.{kind}") for letter in "qkv"),
            cuts,
            optional=kind == "bias",
        )
        for kind in ("weight", "bias")
    ]
    return [
        *fused,
        _rename(f"{here}.linear_proj.{{p}}", f"{there}.o_proj.{{p}}"),
        _rename(f"{here}.q_layernorm.{{p}}", f"{there}.q_norm.{{p}}"),
        _rename(f"{here}.k_layernorm.{{p}}", f"{there}.k_norm.{{p}}"),
    ]


def _norms(*, fused: Sequence[str]) -> list[Rule]:
    """Return the rules for the layer norms, with the names by which Megatron may have saved each.

    Turned round, the last of them comes first, and takes all.
    """
    names = {
        "input_layernorm": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        "post_attention_layernorm": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    }
    rules = [_rename("decoder.final_layernorm.weight", "model.norm.weight")]
    for there, here in names.items():
        order = reversed(here) if there in fused else here
        rules += [_rename(f"{_LAYER}.{name}", f"{_THERE}.{there}.weight") for name in order]
    return rules


def _mlp() -> list[Rule]:
    rules: list[Rule] = []
    for here, there in (("mlp", "mlp"), ("mlp.shared_experts", "mlp.shared_expert")):
        halves = tuple(Pattern(f"{_THERE}.{there}.{name}_proj.weight") for name in ("gate", "up"))
        first = Pattern(f"{_LAYER}.{here}.linear_fc1.weight")
        rules.append(Split((first,), halves, Cuts(0, (1, 1), 1), optional=True))
        rules.append(_rename(f"{_LAYER}.{here}.linear_fc2.weight", f"{_THERE}.{there}.down_proj.weight"))
    return rules


def _experts() -> list[Rule]:
    here = f"{_LAYER}.mlp.experts.local_experts.{{e}}"
    first, second = (Pattern(f"{here}.linear_fc{n}.weight") for n in (1, 2))
    return [
        _rename(f"{_LAYER}.mlp.router.weight", f"{_THERE}.mlp.gate.weight"),
        _rename(f"{_LAYER}.mlp.shared_experts.gate_weight", f"{_THERE}.mlp.shared_expert_gate.weight"),
        Stack(first, Pattern(f"{_THERE}.mlp.experts.gate_up_proj"), "e", optional=True),
        Stack(second, Pattern(f"{_THERE}.mlp.experts.down_proj"), "e", optional=True),
    ]
