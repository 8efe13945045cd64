"""Fresh arrays to read into, in the library that the caller asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import MissingExtraError, UsageError
from reknit.types.dtype import numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty(lengths: Sequence[int], dtype: str, framework: str) -> Any:
    """Return an uninitialised array on the CPU; `framework` is ``"numpy"`` or ``"torch"``."""
    if framework == "numpy":
        return np.empty(tuple(lengths), numpy_dtype(dtype))
    if framework != "torch":
        raise UsageError(f"framework is 'numpy' or 'torch', not {framework!r}")
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(
            "torch is not installed", remedy="pip install 'reknit[torch]', or read with framework='numpy'"
        ) from error
    return torch.empty(tuple(lengths), dtype=getattr(torch, dtype))
