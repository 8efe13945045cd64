"""The lists of some ranks as a column, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from reknit.planner.columns import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike


def blocks_of(lists: Sequence[ArrayLike]) -> Blocks:
    """Return a list of numbers for each rank as one column."""
    arrays = [np.asarray(one, np.int64).reshape(-1) for one in lists]
    sizes = np.array([len(one) for one in arrays], np.int64)
    values = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
    return Blocks(values, sizes, np.arange(len(sizes))).distinct()
