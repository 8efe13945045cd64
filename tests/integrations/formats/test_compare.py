from __future__ import annotations

import numpy as np
import pytest
import torch

import reknit
from reknit.integrations.formats.export import StreamPiece
from reknit.integrations.formats.verify import Named, read_back, require_equal, require_same_values
from reknit.types.shard import TensorSpec

SPEC = TensorSpec((4,), "int16")
PIECES = [StreamPiece(0, np.array([1, 2], np.int16)), StreamPiece(0, np.array([3, 4], np.int16))]
WANTED = {0: Named("w", SPEC), 1: Named("none", TensorSpec((0, 2), "float32"))}
NONE = read_back(torch.zeros(0, 2))


def test_equal_bits_pass_and_a_difference_names_the_tensor() -> None:
    numbers = torch.tensor([1, 2, 3, 4], dtype=torch.int16)
    require_equal(WANTED, PIECES, [read_back(numbers), NONE].__getitem__)
    changed = numbers + torch.tensor([0, 0, 0, 1], dtype=torch.int16)
    for found in (changed, numbers[:3], numbers.long(), numbers.reshape(2, 2)):
        with pytest.raises(reknit.CorruptError, match="'w'"):
            require_equal(WANTED, PIECES, [read_back(found), NONE].__getitem__)
    with pytest.raises(reknit.CorruptError, match="'none'"):
        require_equal(WANTED, PIECES, [read_back(numbers), read_back(torch.zeros(2, 0))].__getitem__)


def test_a_tensor_that_was_not_compared_to_its_end_is_a_difference() -> None:
    found = read_back(torch.tensor([1, 2, 3, 4], dtype=torch.int16))
    with pytest.raises(reknit.CorruptError, match="'w'"):
        require_equal(WANTED, PIECES[:1], [found, NONE].__getitem__)


def test_values_are_compared_with_their_types() -> None:
    require_same_values({"a": 1, "b": float("nan")}, {"a": 1, "b": float("nan"), "c": 2})
    for found in ({"a": True}, {"a": 2}, {}):
        with pytest.raises(reknit.CorruptError, match="a in the export"):
            require_same_values({"a": 1}, found)
