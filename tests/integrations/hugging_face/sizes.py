"""The sizes of small models, for those of every library."""

from __future__ import annotations

import torch

HIDDEN, HEADS, GROUPS, HEAD, FFN, DENSE, EXPERTS, LAYERS, WORDS, PADDED = 32, 4, 2, 8, 24, 40, 4, 2, 29, 32


def words() -> torch.Tensor:
    """Return two rows of words."""
    return torch.randint(3, WORDS, (2, 10), generator=torch.Generator().manual_seed(5))
