"""Every map leads to the names of the other library, and back without any loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import reknit
from reknit.errors import MismatchError
from reknit.integrations import model_maps
from reknit.transforms.apply import Transformed
from reknit.types.manifest import Catalog
from reknit.types.shard import TensorSpec
from tests import ranks
from tests.integrations.hugging_face import sharded_jobs, tiny
from tests.integrations.hugging_face.sizes import DENSE, EXPERTS, FFN, HIDDEN, PADDED
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.transforms import Rule

TITAN = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
WAYS: dict[str, tuple[Any, Any]] = {
    "transformer_engine": (
        lambda config: model_maps.hugging_face_to_megatron(config, padded_vocab_size=PADDED),
        model_maps.megatron_to_hugging_face,
    ),
    "local": (
        lambda config: model_maps.hugging_face_to_megatron(config, spec="local"),
        model_maps.megatron_to_hugging_face,
    ),
    "torchtitan": (model_maps.hugging_face_to_torchtitan, model_maps.torchtitan_to_hugging_face),
}
CASES = [(kind, way) for way in WAYS for kind in tiny.FAMILIES if way != "torchtitan" or kind in TITAN]


def shapes_after(rules: list[Rule], tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    specs = {name: TensorSpec(tuple(tensor.shape), "float32") for name, tensor in tensors.items()}
    catalog = Catalog(("m",), {"m": specs}, {"m": {}}, {}, lambda *_: {})
    return {n: spec.shape for n, spec in Transformed.of(rules, catalog).catalog.tensors["m"].items()}


def converted(rules: list[Rule], tensors: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a load makes of others by some rules."""
    made = {name: torch.full(shape, 7.0) for name, shape in shapes_after(rules, tensors).items()}
    reknit.save(path, {"m": tensors})
    reknit.load(path, {"m": made}, options=reknit.LoadOptions(transforms=rules))
    return made


def weights(kind: str) -> dict[str, torch.Tensor]:
    """Return the weights of a model, without second names of tied weights."""
    model = tiny.build(kind, seed=6)
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@table(("kind", "way"), CASES)
def test_weights_are_the_same_after_both_ways(kind: str, way: str, tmp_path: Path) -> None:
    there, back = WAYS[way]
    config, first = tiny.config(kind), weights(kind)
    between = converted(there(config), first, tmp_path / "there")
    assert not any(name.startswith(("model.", "lm_head")) for name in between if way != "torchtitan")
    assert_equal(converted(back(config), between, tmp_path / "back"), first)


@table("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"])
def test_the_names_in_files_are_those_that_the_library_writes(kind: str, tmp_path: Path) -> None:
    model = tiny.build(kind, seed=6)
    model.save_pretrained(tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    there = model_maps.hugging_face_to_megatron(model.config)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    between = converted(there, first, tmp_path / "model")
    files = converted(
        model_maps.megatron_to_hugging_face(model.config, files=True), between, tmp_path / "files"
    )
    assert_equal(files, written)
    assert_equal(converted(there, files, tmp_path / "again"), between)


@table(
    ("kind", "way", "expected"),
    [
        (
            "qwen3_moe",
            "transformer_engine",
            {
                "embedding.word_embeddings.weight": (PADDED, HIDDEN),
                "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
                "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
                "decoder.layers.0.mlp.linear_fc1.weight": (2 * DENSE, HIDDEN),
                "decoder.layers.1.pre_mlp_layernorm.weight": (HIDDEN,),
                "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight": (2 * FFN, HIDDEN),
            },
        ),
        (
            "deepseek_v3",
            "transformer_engine",
            {
                "decoder.layers.0.input_layernorm.weight": (HIDDEN,),
                "decoder.layers.1.pre_mlp_layernorm.weight": (HIDDEN,),
                "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight": (12,),
                "decoder.layers.1.mlp.router.expert_bias": (EXPERTS,),
            },
        ),
        (
            "gemma2",
            "transformer_engine",
            {
                "decoder.layers.1.self_attention.linear_proj.post_layernorm.weight": (HIDDEN,),
                "decoder.layers.1.mlp.linear_fc2.post_layernorm.weight": (HIDDEN,),
            },
        ),
        (
            "gpt_oss",
            "transformer_engine",
            {
                "decoder.layers.1.self_attention.core_attention.softmax_offset": (4,),
                "decoder.layers.1.mlp.router.bias": (EXPERTS,),
                "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.bias": (2 * FFN,),
            },
        ),
        (
            "gpt_oss",
            "torchtitan",
            {"layers.1.moe.routed_experts.inner_experts.mlp1_weight_EGD": (EXPERTS, 2 * FFN, HIDDEN)},
        ),
    ],
)
def test_names_and_shapes_are_those_of_the_other_library(
    kind: str, way: str, expected: dict[str, tuple[int, ...]]
) -> None:
    shapes = shapes_after(WAYS[way][0](tiny.config(kind)), weights(kind))
    assert {name: shapes.get(name) for name in expected} == expected


def test_a_tensor_that_a_map_does_not_know_is_an_error(tmp_path: Path) -> None:
    tensors = weights("llama")
    rules = model_maps.hugging_face_to_megatron(tiny.config("llama"))
    made = {name: torch.zeros(shape) for name, shape in shapes_after(rules, tensors).items()}
    tensors["model.layers.0.self_attn.o_proj.gate"] = torch.zeros(3)
    reknit.save(tmp_path / "more", {"m": tensors})
    with pytest.raises(MismatchError, match=r"o_proj\.gate"):
        reknit.load(tmp_path / "more", {"m": made}, options=reknit.LoadOptions(transforms=rules))


def test_tensors_that_are_one_in_the_target_may_have_two_names_if_they_are_equal(tmp_path: Path) -> None:
    rules = model_maps.torchtitan_to_hugging_face(tiny.config("qwen3"))
    first = weights("qwen3")
    tensors = converted(model_maps.hugging_face_to_torchtitan(tiny.config("qwen3")), first, tmp_path / "hf")
    options, model = reknit.LoadOptions(transforms=rules), tiny.build("qwen3", seed=1)
    tensors["lm_head.weight"] = tensors["tok_embeddings.weight"].clone()
    reknit.save(tmp_path / "equal", {"m": tensors})
    reknit.load(tmp_path / "equal", {"m": model}, options=options)
    assert_equal({name: model.state_dict()[name] for name in first}, first)
    tensors["lm_head.weight"][3, 4] += 1
    reknit.save(tmp_path / "different", {"m": tensors})
    with pytest.raises(MismatchError, match=r"lm_head\.weight"):
        reknit.load(tmp_path / "different", {"m": model}, options=options)


@table("kind", ["llama", "gpt_oss"])
def test_ranks_that_hold_parts_of_a_model_read_their_parts(kind: str, tmp_path: Path) -> None:
    first = tiny.build(kind, seed=6).state_dict()
    rules = model_maps.hugging_face_to_megatron(tiny.config(kind), padded_vocab_size=PADDED)
    reknit.save(tmp_path / "megatron", {"m": converted(rules, first, tmp_path / "first")})
    for found in ranks.run(2, sharded_jobs.load, kind, tmp_path / "megatron", warm="trainers"):
        assert_equal(found, dict(first))
