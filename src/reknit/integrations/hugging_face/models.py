"""The family and the numbers of a model, by its Hugging Face config, and rules for its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from reknit import transforms
from reknit.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.transforms import Rule


def renamed(names: Mapping[str, str], before: str = "", after: str = "") -> list[Rule]:
    """Return the rules for other names, each with its prefixes `before` and `after`."""
    return [transforms.rename(before + old, after + new, optional=True) for old, new in names.items()]


def split(source: str, targets: Sequence[str], parts: Sequence[int], repeat: int = 1) -> Rule:
    """Return the rule that cuts the rows of a tensor."""
    return transforms.split(source, targets, parts=parts, repeat=repeat, optional=True)


def fuse(sources: Sequence[str], target: str, dim: int) -> Rule:
    """Return the rule that joins tensors of the same shape along a dimension."""
    return transforms.fuse(sources, target, dim=dim, optional=True)


def stack(source: str, target: str) -> Rule:
    """Return the rule that joins the tensors of all experts `e`."""
    return transforms.stack(source, target, over="e", optional=True)


def unstack(source: str, target: str) -> Rule:
    """Return the rule that takes a tensor of all experts `e` apart."""
    return transforms.unstack(source, target, over="e", optional=True)


def transpose(name: str) -> Rule:
    """Return the rule that exchanges the rows and columns of every expert."""
    return transforms.transpose(name, order=(0, 2, 1), optional=True)


def in_turns(name: str, dim: int, *, apart: bool = False, repeat: int = 1) -> Rule:
    """Return the rule that interleaves two halves, or lays them one after the other (`apart`)."""
    turned = transforms.deinterleave if apart else transforms.interleave
    return turned(name, dim=dim, repeat=repeat, optional=True)


def trim(name: str, size: int, padded: int | None) -> Rule:
    """Return the rule that removes the padding of a vocabulary."""
    return transforms.trim(name, size, was=padded, optional=True)


_LAYER = "model.layers.{i}."


def router(family: Family) -> str:
    """Return the name of the weight of the router."""
    return f"{_LAYER}{family.block}.{family.router}.weight"


def stacked(family: Family) -> tuple[str, str]:
    """Return the names of the stacked experts: gate and up, and down."""
    experts = f"{_LAYER}{family.block}.experts"
    return f"{experts}.gate_up_proj", f"{experts}.down_proj"


def file_rules(family: Family) -> list[Rule]:
    """Return the rules from the names in models to those in files, which differ for experts only."""
    if not family.file_experts:
        return []
    place, (gate, up, down) = family.file_experts
    here = f"{_LAYER}{place}."
    first, second = stacked(family)
    return [
        unstack(first, f"{here}gate_up"),
        split(f"{here}gate_up", [f"{here}{gate}.weight", f"{here}{up}.weight"], (1, 1)),
        unstack(second, f"{here}{down}.weight"),
        *(renamed({router(family): _LAYER + family.file_router}) if family.file_router else ()),
    ]


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


@dataclass(frozen=True)
class Model:
    """A model: its family, numbers of query and key-value heads, size of the vocabulary, and kinds of layers.

    `tied` is whether the output head is the embedding.  `sparse` is, for each layer, whether the layer has
    experts.
    """

    kind: str
    family: Family
    heads: int
    kv_heads: int
    vocab_size: int
    tied: bool
    sparse: tuple[bool, ...]


def read_config(config: object) -> Model:
    """Return the model of a config: an object of `transformers`, or the dictionary in `config.json`.

    Raises `UsageError` for an unknown family, and for fields that are missing or that no map is for.
    """
    fields = _fields(config)
    kind, family = _family(fields)
    _refuse(fields, kind, family)
    heads = _number(fields, "num_attention_heads")
    groups = heads if fields.get("num_key_value_heads") is None else _number(fields, "num_key_value_heads")
    if heads % groups:
        raise UsageError(
            f"{heads} query heads cannot share {groups} key-value heads evenly",
            remedy="correct num_attention_heads and num_key_value_heads of the config",
        )
    return Model(
        kind=kind,
        family=family,
        heads=heads,
        kv_heads=groups,
        vocab_size=_number(fields, "vocab_size"),
        tied=bool(fields.get("tie_word_embeddings", kind.startswith("gemma"))),
        sparse=_sparse(fields, family, _number(fields, "num_hidden_layers")),
    )


def _fields(config: Any) -> dict[str, Any]:
    fields = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
    if not isinstance(fields, Mapping):
        raise UsageError(
            f"a {type(config).__name__} is not a config of a model",
            remedy="give model.config of transformers, or the dictionary in config.json",
        )
    return dict(fields)


def _family(fields: Mapping[str, Any]) -> tuple[str, Family]:
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return kind, FAMILIES[kind]
    if isinstance(fields.get("text_config"), Mapping):
        remedy = "it describes more than a language model: give its text_config"
    else:
        near = did_you_mean(str(kind), FAMILIES)
        remedy = f"the families are {', '.join(FAMILIES)}" + (f"; {near}" if near else "")
    raise UsageError(f"there is no map for models with the model_type {kind!r}", remedy=remedy)


def _refuse(fields: Mapping[str, Any], kind: str, family: Family) -> None:
    """Raise `UsageError` for a field that changes the tensors of a model in a way that no map is for."""
    if fields.get("quantization_config"):
        raise UsageError(
            f"the {kind} model of this config is quantized, and maps are for plain weights",
            remedy="dequantize the weights, and remove quantization_config from the config",
        )
    for name, value in fields.items():
        if "bias" in name and value is True and name not in family.biases:
            raise UsageError(f"the map for {kind} models does not have the bias of {name}=True")
    if fields.get("rope_interleave") is False:
        raise UsageError(f"the map for {kind} models has no other rotary embeddings than interleaved ones")


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise UsageError(f"{name} of the config is {value!r}, and not a number above 0")
    return value


def _sparse(fields: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts."""
    if not family.experts:
        return (False,) * layers
    listed = fields.get("moe_layers")
    step = fields.get("decoder_sparse_step") or fields.get("interleave_moe_layer_step") or 1
    dense = fields.get("mlp_only_layers") or ()
    first = fields.get("first_k_dense_replace") or 0
    return tuple(
        n in listed if listed is not None else n >= first and n not in dense and (n + 1) % step == 0
        for n in range(layers)
    )
