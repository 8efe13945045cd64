"""Jobs with models of torchtitan that Hugging Face has too; torchtitan is imported only in the rank."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import reknit
from reknit.integrations import model_maps

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def both(
    cases: dict[str, tuple[str, bool, dict[str, Any]]], root: Path
) -> dict[str, tuple[torch.Tensor, torch.Tensor] | str]:
    """Save a model of each case, load one of Hugging Face, and return the logits of both, or the error.

    A case is a family, whether queries, keys and values are fused, and the config.
    """
    from tests.integrations.hugging_face import titan

    titan.in_float32()
    answers: dict[str, tuple[torch.Tensor, torch.Tensor] | str] = {}
    for case, (kind, fused, config) in cases.items():
        try:
            first, other = (titan.build(kind, seed=seed, fused=fused) for seed in (1, 2))
            reknit.save(root / f"{case}-titan", {"model": first})
            options = reknit.LoadOptions(transforms=model_maps.hugging_face_to_torchtitan(config))
            strict = ["!model/*expert_bias_E"] if kind in {"qwen3_moe", "gpt_oss"} else True
            reknit.load(root / f"{kind}-hugging_face", {"model": other}, strict=strict, options=options)
            reknit.save(root / f"{case}-again", {"model": other})
            answers[case] = titan.logits(first), titan.logits(other)
        except Exception as error:  # the test of the case fails with it
            answers[case] = "".join(traceback.format_exception(error))
    return answers
