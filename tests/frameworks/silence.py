"""No collectives while something is tested: those of torch raise, and others are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode


class Silence:
    """Makes every collective of torch an error, and counts the collectives below Python."""

    _NAMES = (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_gather_single",
        "all_reduce",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather_object",
        "recv",
        "reduce_scatter_tensor",
        "send",
    )

    def __enter__(self) -> Silence:
        self._mode: Any = CommDebugMode()  # type: ignore[no-untyped-call]
        self._patch = pytest.MonkeyPatch()
        for name in self._NAMES:
            self._patch.setattr(dist, name, self._refuse, raising=False)
        for name in ("full_tensor", "redistribute"):
            self._patch.setattr(DTensor, name, self._refuse)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._patch.undo()
        assert self._mode.get_total_counts() == 0

    @staticmethod
    def _refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called")
