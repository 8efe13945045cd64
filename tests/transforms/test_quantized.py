"""A load never takes the elements of a quantized tensor as its values, for any options."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import reknit
from reknit import transforms
from reknit.integrations.hugging_face.export import export_hf
from reknit.transforms.quantized import Quantized, quantized
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FP8 = torch.float8_e4m3fn
SCALED: dict[str, dict[str, torch.Tensor]] = {
    "FP8 in blocks": {"weight": torch.ones(4, 4).to(FP8), "weight_scale_inv": torch.ones(1, 1)},
    "FP8 of compressed-tensors": {
        "weight": torch.ones(4, 4).to(FP8),
        "weight_scale": torch.ones(1),
        "input_scale": torch.ones(1),
    },
    "FP8 with a scale of the module": {"weight": torch.ones(4, 4).to(FP8), "scale": torch.ones(1, 1)},
    "integers of bitsandbytes": {"weight": torch.ones(4, 4, dtype=torch.int8), "SCB": torch.ones(4)},
    "four bits of bitsandbytes": {
        "weight": torch.ones(8, 1, dtype=torch.uint8),
        "weight.absmax": torch.ones(1),
        "weight.quant_map": torch.ones(16),
    },
    "GPTQ": {
        "qweight": torch.ones(1, 4, dtype=torch.int32),
        "qzeros": torch.ones(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 4),
    },
    "packed values of compressed-tensors": {
        "weight_packed": torch.ones(4, 1, dtype=torch.int32),
        "weight_scale": torch.ones(4, 1),
    },
    "MXFP4": {
        "weight_blocks": torch.ones(4, 1, 2, dtype=torch.uint8),
        "weight_scales": torch.ones(4, 1, dtype=torch.uint8),
    },
    "HQQ": {"W_q": torch.ones(4, 4, dtype=torch.uint8), "scale": torch.ones(4, 1), "zero": torch.ones(4, 1)},
    "torchao": {"_weight_qdata": torch.ones(4, 4, dtype=torch.int8), "_weight_scale": torch.ones(4, 1)},
    "quanto": {"weight._data": torch.ones(4, 4, dtype=torch.int8), "weight._scale": torch.ones(4, 1)},
}
LENIENT: dict[str, dict[str, Any]] = {
    "strictly": {},
    "leniently, with a cast": {"strict": False, "options": reknit.LoadOptions(cast=True)},
    "with a pattern": {"strict": ["model/*"], "options": reknit.LoadOptions(cast=True)},
    "without scales": {
        "strict": False,
        "options": reknit.LoadOptions(
            cast=True,
            transforms=[
                transforms.drop(f"0.{name}", optional=True)
                for name in ("weight_scale_inv", "weight_scale", "scale", "scales", "SCB", "_weight_scale")
            ],
        ),
    },
}


def folder_of(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    """Write a folder of Hugging Face with one quantized layer, and one that is not."""
    path.mkdir()
    state = {f"0.{name}": tensor for name, tensor in tensors.items()} | {"1.weight": torch.ones(4, 4)}
    save_file(state, path / "model.safetensors")
    return str(path)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


@table("how", LENIENT)
@table("kind", SCALED)
def test_no_option_loads_a_quantized_layer_into_floats(kind: str, how: str, tmp_path: Path) -> None:
    folder = folder_of(SCALED[kind], tmp_path / "hf")
    model = layers()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(reknit.MismatchError) as caught:
        reknit.load(folder, {"model": model}, **LENIENT[how])
    (line,) = (line for line in caught.value.message.splitlines() if "quantized: " in line)
    assert "model/0.weight: saved as" in line
    scale = re.search(r"its scale, (\S+)", line)
    assert scale is not None
    assert scale[1].removeprefix("model/0.") in SCALED[kind]
    assert "strict=False" not in str(caught.value)
    assert "cast=True" not in str(caught.value)
    assert all(map(torch.equal, before, model.parameters()))


@table("kind", SCALED)
def test_quantized_tensors_load_as_they_are_and_are_read_with_their_scales(kind: str, tmp_path: Path) -> None:
    folder = folder_of(SCALED[kind], tmp_path / "hf")
    target = {f"0.{name}": torch.zeros_like(tensor) for name, tensor in SCALED[kind].items()}
    state = {"model": {**target, "1.weight": torch.zeros(4, 4)}}
    reknit.load(folder, state)
    for name, tensor in SCALED[kind].items():
        assert torch.equal(target[f"0.{name}"].view(torch.uint8), tensor.view(torch.uint8))
    with pytest.raises(reknit.MismatchError) as caught:
        reknit.load(folder, {"model": layers()}, strict=False)
    call = re.search(r"reknit\.open\(.*\)\.read_all\(\)", str(caught.value))
    assert call is not None
    assert {f"0.{name}" for name in SCALED[kind]} < set(eval(call[0])["model"])


@table("kind", SCALED)
def test_an_export_to_another_dtype_keeps_the_scales_and_converts_the_rest(kind: str, tmp_path: Path) -> None:
    rest = {"layer.0.bias": torch.rand(4), "norm.weight": torch.rand(4), "head.weight": torch.rand(4, 4)}
    scales = {
        name: one + 1e-4 * torch.rand(one.shape) if one.dtype == torch.float32 else one
        for name, one in SCALED[kind].items()
    }
    beyond = {"attention.k_scale": torch.rand(1)}
    state = {f"layer.0.{name}": one for name, one in scales.items()} | beyond | rest
    path = reknit.save(tmp_path / "own", {"model": state}).path
    report = export_hf(path, tmp_path / "hf", dtype="bfloat16")
    found = load_file(tmp_path / "hf/model.safetensors")
    assert set(report.cast) == rest.keys()
    assert all(torch.equal(found[name], one.bfloat16()) for name, one in rest.items())
    for name in state.keys() - rest.keys():
        assert found[name].dtype == state[name].dtype
        assert torch.equal(found[name].view(torch.uint8), state[name].view(torch.uint8)), name


def test_a_norm_that_is_called_scale_is_converted_in_a_plain_model(tmp_path: Path) -> None:
    state = {"norm.scale": torch.rand(4), "mask": torch.ones(2, 2, dtype=torch.uint8)}
    path = reknit.save(tmp_path / "own", {"model": state}).path
    assert export_hf(path, tmp_path / "hf", dtype="float16").cast == ("norm.scale",)


def test_narrow_floats_without_a_scale_are_values_and_may_be_converted(tmp_path: Path) -> None:
    weight = torch.randn(4, 4).to(FP8)
    reknit.save(tmp_path / "own", {"model": {"weight": weight}})
    torch.save({"model": {"weight": weight}}, tmp_path / "file.pt")
    for path in (tmp_path / "own", tmp_path / "file.pt"):
        with pytest.raises(reknit.MismatchError, match="cast=True"):
            reknit.load(path, {"model": {"weight": torch.zeros(4, 4)}})
        state = {"model": {"weight": torch.zeros(4, 4)}}
        reknit.load(path, state, options=reknit.LoadOptions(cast=True))
        assert torch.equal(state["model"]["weight"], weight.float())


def test_items_that_are_tensors_have_their_scales_in_other_items(tmp_path: Path) -> None:
    reknit.save(tmp_path, {"w": torch.ones(4).to(FP8), "w_scale": 0.5, "step": 3})
    with pytest.raises(reknit.MismatchError, match="its scale, w_scale"):
        reknit.load(tmp_path, {"w": torch.zeros(4)}, strict=False, options=reknit.LoadOptions(cast=True))


def test_another_name_does_not_hide_a_scale(tmp_path: Path) -> None:
    folder = folder_of(SCALED["FP8 in blocks"], tmp_path / "hf")
    names = transforms.names({"model/0.weight": "model/0.kernel", "model/0.weight_scale_inv": "model/x"})
    model = {"0.kernel": torch.zeros(4, 4)}
    with pytest.raises(reknit.MismatchError, match="weight_scale_inv"):
        reknit.load(
            folder, {"model": model}, strict=False, options=reknit.LoadOptions(cast=True, transforms=[names])
        )


def test_layers_that_the_load_leaves_out_may_be_quantized(tmp_path: Path) -> None:
    folder = folder_of(SCALED["FP8 in blocks"], tmp_path / "hf")
    model = layers()
    report = reknit.load(folder, {"model": model}, options=reknit.LoadOptions(only=("model/1.*",)))
    assert report.restored == ("model/1.weight",)


def load_on_ranks(folder: str) -> str:
    model = layers()
    try:
        reknit.load(folder, {"model": model}, strict=False, options=reknit.LoadOptions(cast=True))
    except reknit.MismatchError as error:
        return error.message
    return "loaded"


def test_all_ranks_refuse_a_quantized_layer(tmp_path: Path) -> None:
    folder = folder_of(SCALED["FP8 in blocks"], tmp_path / "hf")
    one, other = run(2, load_on_ranks, folder)
    assert one == other
    assert "weight_scale_inv" in one


def test_an_array_of_numpy_is_as_strict_as_a_tensor(tmp_path: Path) -> None:
    folder = folder_of(SCALED["integers of bitsandbytes"], tmp_path / "hf")
    target = {"0.weight": np.zeros((4, 4), np.float32)}
    with pytest.raises(reknit.MismatchError, match=r"model/0\.SCB"):
        reknit.load(folder, {"model": target}, strict=False, options=reknit.LoadOptions(cast=True))


def found(wanted: dict[str, str], saved: dict[str, str], *more: str) -> dict[str, Quantized]:
    return dict(quantized(wanted, saved, [*saved, *more]))


@table(
    "saved",
    [
        {"m/a.weight": "float16", "m/a.weight_scale": "float32"},
        {"m/a.weight": "float8_e4m3fn", "m/b.weight_scale": "float32"},
        {"m/a.weight": "int64", "m/a.scale": "float32"},
        {"m/a.weight": "int64", "m/a.weight2_scale": "float32"},
        {"m/a.weight": "float8_e4m3fn", "m/scale.weight": "float32"},
        {"m/a.weight": "bool", "m/a.weight_scale": "float32"},
    ],
)
def test_a_scale_elsewhere_or_wide_values_are_not_quantized(saved: dict[str, str]) -> None:
    assert found({"m/a.weight": "float32"}, saved) == {}
    assert found({"m/weight": "int32"}, {"m/weight": "int8", "m/weight_scale": "float32"}) == {}


@table("end", ["_packed", "_blocks", "_quantized"])
def test_a_packed_tensor_may_have_a_scale_that_is_named_like_its_plain_form(end: str) -> None:
    packed = f"layer.w_scale{end}"
    saved = {packed: "int8", "layer.w_scale": "float32"}
    ((name, found),) = quantized({packed: "float32"}, saved, saved)
    assert (name, found) == (packed, Quantized(packed, "int8", "layer.w_scale"))


def test_a_weight_has_its_own_scale_before_that_of_its_inputs() -> None:
    saved = {"m/w": "float8_e5m2"}
    for names in (
        ["m/input_scale", "m/w_scale"],
        ["m/w_scale", "m/input_scale"],
        ["m/input_scale", "m/scale"],
    ):
        scale = found({"m/w": "float32"}, saved, *names)["m/w"].scale
        assert scale == next(name for name in names if "input" not in name)


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
    st.sampled_from([".", "/"]),
    st.sampled_from(["float8_e4m3fn", "int8", "uint8", "int32"]),
    st.sampled_from(["{}_scale", "{}_scale_inv", "{}.absmax", "{}.quant_map", "{}._scale", "{}/scale"]),
)
def test_a_scale_that_begins_with_a_name_belongs_to_it_at_any_depth(
    parts: list[str], separator: str, dtype: str, scale: str
) -> None:
    name = "m/" + separator.join(parts)
    assert found({name: "bfloat16"}, {name: dtype}, scale.format(name)) == {
        name: Quantized(name, dtype, scale.format(name))
    }
    assert found({name: "bfloat16"}, {name: dtype}, "n/" + scale.format("x")) == {}
    assert found({name: dtype}, {name: dtype}, scale.format(name)) == {}
