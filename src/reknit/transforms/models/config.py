"""Which model does a config of Hugging Face describe?  Its family, and the numbers that maps need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reknit.errors import UsageError, did_you_mean
from reknit.transforms.models.families import FAMILIES

if TYPE_CHECKING:
    from reknit.transforms.models.families import Family


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
