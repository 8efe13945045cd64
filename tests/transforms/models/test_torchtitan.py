"""Checkpoints of torchtitan load into Hugging Face models and the other way round, with equal logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.transforms import models
from tests.optional import needs
from tests.transforms.models import tiny

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("torchtitan", "torchtitan")

TOLERANCE = 2e-5
"""For logits around one in float32; the two libraries add in different orders."""
KINDS = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.transforms.models import titan as built

    built.in_float32(monkeypatch)
    return built


def to_hugging_face(path: Path, kind: str) -> torch.nn.Module:
    model = tiny.build(kind, seed=3)
    options = reknit.LoadOptions(transforms=models.torchtitan_to_hugging_face(model.config))
    report = reknit.load(path, {"model": model}, options=options)
    assert not report.missing
    return model


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_has_equal_logits_in_both_directions(
    kind: str, fused: bool, titan: Any, tmp_path: Path
) -> None:
    if kind == "deepseek_v3" and not fused:
        pytest.skip("its queries, keys and values are never fused")
    ours = titan.build(kind, seed=1, fused=fused)
    reknit.save(tmp_path / "titan", {"model": ours})
    answer = titan.logits(ours)
    assert float(answer.std()) > 0.1
    assert torch.allclose(tiny.logits(to_hugging_face(tmp_path / "titan", kind)), answer, atol=TOLERANCE)

    first, other = tiny.build(kind, seed=4), titan.build(kind, seed=2, fused=fused)
    reknit.save(tmp_path / "hugging_face", {"model": first})
    options = reknit.LoadOptions(transforms=models.hugging_face_to_torchtitan(first.config))
    reknit.load(
        tmp_path / "hugging_face", {"model": other}, strict=["!model/*expert_bias_E"], options=options
    )
    assert torch.allclose(tiny.logits(first), titan.logits(other), atol=TOLERANCE)

    reknit.save(tmp_path / "again", {"model": other})
    again = to_hugging_face(tmp_path / "again", kind)
    for name, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
