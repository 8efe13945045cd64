"""Configs select a map, or are refused with the reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from reknit.errors import UsageError
from reknit.integrations import model_maps
from tests.integrations.hugging_face import tiny
from tests.tables import table

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 29,
}
MAPS: list[Any] = [
    model_maps.megatron_to_hugging_face,
    model_maps.hugging_face_to_megatron,
    model_maps.torchtitan_to_hugging_face,
    model_maps.hugging_face_to_torchtitan,
]


@table("make", MAPS)
@table(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "no map for models with the model_type 'gpt2'"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": None}, "the families are llama, llama4_text"),
        ({"model_type": "gemma3", "text_config": {}}, "give its text_config"),
        ({"num_attention_heads": None}, "num_attention_heads of the config is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of the config is 0"),
        ({"vocab_size": "29"}, "vocab_size of the config is '29'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"attention_bias": True}, "does not have the bias of attention_bias=True"),
        ({"mlp_bias": True}, "does not have the bias of mlp_bias=True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ({"rope_interleave": False}, "no other rotary embeddings"),
    ],
)
def test_a_config_that_no_map_is_for_is_refused(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(LLAMA | changes)


@table(
    ("make", "message"),
    [
        *((partial(MAPS[0], wrong), "is not a config of a model") for wrong in ("llama", 3, None)),
        (partial(MAPS[2], LLAMA | {"model_type": "mixtral"}), "no map between torchtitan and mixtral models"),
        (partial(MAPS[1], LLAMA, padded_vocab_size=28), "cannot be padded to 28"),
        (partial(MAPS[1], LLAMA, spec="apex"), "'transformer_engine', 'local'"),
    ],
)
def test_what_a_map_cannot_do_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@table("kind", tiny.FAMILIES)
def test_an_object_and_its_dictionary_give_the_same_rules(kind: str) -> None:
    config = tiny.config(kind)
    assert model_maps.hugging_face_to_megatron(config) == model_maps.hugging_face_to_megatron(
        config.to_dict()
    )
