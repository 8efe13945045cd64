"""Token sets of any size that take no time to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Repeated:
    """`num_samples` samples of `length` tokens, cut out of one array."""

    def __init__(self, num_samples: int, length: int) -> None:
        self._num_samples, self._length = num_samples, length
        self._tokens = np.random.default_rng(0).integers(0, 50_000, size=length + 4096, dtype=np.int32)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> NDArray[np.int32]:
        start = number % 4096
        return self._tokens[start : start + self._length]


class Varied:
    """Samples whose lengths vary, as those of documents do."""

    def __init__(self, num_samples: int, mean: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._lengths = np.maximum(rng.lognormal(np.log(mean), 0.9, num_samples), 1).astype(np.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, number: int) -> NDArray[np.int32]:
        return np.arange(self._lengths[number], dtype=np.int32)
