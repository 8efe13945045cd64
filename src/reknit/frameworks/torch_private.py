"""Which parts of torch does reknit use that torch does not promise?  These, and no others."""

from __future__ import annotations

import sys
from typing import Any


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def split_factor(placement: Any) -> int | None:
    """Return the split factor of a strided DTensor placement, or None for any other placement."""
    module = sys.modules["torch.distributed.tensor.placement_types"]
    if isinstance(placement, module._StridedShard):
        return int(placement.split_factor)
    return None


def chunk_list(tensor: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """Return (offsets, sizes) as a DTensor's local tensor claims them, or None when it does not say."""
    hook = getattr(tensor._local_tensor, "__create_chunk_list__", None)
    if hook is None:
        return None
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in hook()]


def hides_data(kind: type) -> bool:
    """Tell whether a type of tensor handles operations itself, so that its memory is not its values."""
    import torch

    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def group_name(group: Any) -> str:
    """Return the name that all members of a process group know it by."""
    return str(group.group_name)
