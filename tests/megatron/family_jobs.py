"""Jobs with models of Megatron that Hugging Face has too; Megatron is imported only in the ranks."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import reknit
from reknit.integrations import model_maps
from tests.integrations.hugging_face.sizes import PADDED

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.megatron.layouts import Layout


def save(kind: str, layout: Layout, path: Path) -> torch.Tensor:
    """Save a model of a family, and return its logits."""
    from tests.megatron import families

    model = families.build(kind, layout, seed=1)
    reknit.save(path, {"model": model})
    return families.logits(model)


def load(kind: str, layout: Layout, config: dict[str, Any], path: Path, again: Path) -> torch.Tensor:
    """Load a model of Hugging Face, save it `again` as one of Megatron, and return its logits."""
    from tests.megatron import families

    model = families.build(kind, layout, seed=2)
    rules = model_maps.hugging_face_to_megatron(config, padded_vocab_size=PADDED, spec="local")
    report = reknit.load(path, {"model": model}, options=reknit.LoadOptions(transforms=rules))
    assert not report.missing
    assert not report.unexpected
    reknit.save(again, {"model": model})
    return families.logits(model)


def both(
    kinds: dict[str, dict[str, Any]], layout: Layout, root: Path
) -> dict[str, tuple[torch.Tensor, torch.Tensor] | str]:
    """Save a model of each family, load one of Hugging Face, and return the logits of both, or the error."""
    answers: dict[str, tuple[torch.Tensor, torch.Tensor] | str] = {}
    for kind, config in kinds.items():
        paths = root / f"{kind}-hugging_face", root / f"{kind}-again"
        try:
            answers[kind] = (
                save(kind, layout, root / f"{kind}-megatron"),
                load(kind, layout, config, *paths),
            )
        except Exception as error:  # the test of the family fails with it
            answers[kind] = "".join(traceback.format_exception(error))
    return answers
