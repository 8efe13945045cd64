"""Jobs with models that Hugging Face has too; Megatron is imported only in the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import reknit
from reknit import transforms

if TYPE_CHECKING:
    from tests.megatron.layouts import Layout

HIDDEN, HEADS, GROUPS, FFN, EXPERTS, LAYERS, WORDS, PADDED = 32, 4, 2, 48, 4, 2, 29, 32


RULES = transforms.megatron_to_hugging_face(
    heads=HEADS, kv_heads=GROUPS, vocab_size=WORDS, padded_vocab_size=PADDED
)


def words() -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 10), generator=torch.Generator().manual_seed(5))


def save(layout: Layout, path: str, moe: bool) -> torch.Tensor:
    from tests.megatron import llama

    model = llama.build(layout, moe=moe, seed=1)
    answer = llama.logits(model)
    reknit.save(path, {"model": model})
    return answer


def load_from_hugging_face(layout: Layout, path: str, moe: bool) -> torch.Tensor:
    from tests.megatron import llama

    model = llama.build(layout, moe=moe, seed=2)
    options = reknit.LoadOptions(transforms=transforms.inverted(RULES))
    report = reknit.load(path, {"model": model}, options=options)
    assert not report.missing
    assert not report.unexpected
    return llama.logits(model)
