"""How do the models of one kind differ from others in Hugging Face's library?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """The names and layouts of the models of one `model_type`; the defaults are those of Llama.

    `latent`: queries, keys and values are compressed (MLA), not grouped.
    `block`: the name of the feed-forward in a layer; `router` and `shared` are names in it.
    `experts`: the layout of stacked experts: none, the rows or the columns of gate and up one after the
    other, or their columns in turn.
    `file_experts`: the place of an expert in files, and the names of its gate, up and down, if files have
    each expert by itself.
    `file_router`: the name of the weight of the router in files, if that differs.
    `router_bias`: the name in `block` of the bias of the router, None without such a bias.
    `four_norms`: norms also follow attention and feed-forward.
    `biases`: fields of the config that may be true, of all that are named after a bias.
    `titan`: whether torchtitan has such a model.
    `pairs`: whether rotary embeddings turn pairs of neighbours there.
    """

    latent: bool = False
    block: str = "mlp"
    router: str = "gate"
    shared: str = ""
    experts: Literal["", "rows", "columns", "turns"] = ""
    file_experts: tuple[str, tuple[str, str, str]] | None = None
    file_router: str = ""
    router_bias: str | None = None
    four_norms: bool = False
    biases: tuple[str, ...] = ()
    titan: bool = False
    pairs: bool = False


_EACH = ("mlp.experts.{e}", ("gate_proj", "up_proj", "down_proj"))

FAMILIES = {
    "llama": Family(titan=True, pairs=True),
    "llama4_text": Family(block="feed_forward", router="router", shared="shared_expert", experts="columns"),
    "mistral": Family(),
    "mixtral": Family(
        experts="rows",
        file_experts=("block_sparse_moe.experts.{e}", ("w1", "w3", "w2")),
        file_router="block_sparse_moe.gate.weight",
    ),
    "qwen2": Family(),
    "qwen2_moe": Family(shared="shared_expert", experts="rows", file_experts=_EACH, biases=("qkv_bias",)),
    "qwen3": Family(titan=True),
    "qwen3_moe": Family(experts="rows", file_experts=_EACH, titan=True),
    "gemma2": Family(four_norms=True),
    "gemma3_text": Family(four_norms=True),
    "deepseek_v3": Family(
        latent=True,
        shared="shared_experts",
        experts="rows",
        file_experts=_EACH,
        router_bias="gate.e_score_correction_bias",
        titan=True,
    ),
    "gpt_oss": Family(
        router="router", experts="turns", router_bias="router.bias", biases=("attention_bias",), titan=True
    ),
}
"""The families, by `model_type`."""
