from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from reknit.types.box import Box
from reknit.types.shard import Shard, Strided, TensorSpec

SPEC, BOX = TensorSpec((4, 3), "float32"), Box((1, 0), (2, 3))


def test_a_strided_shard_is_a_view_of_live_memory_when_it_is_asked_for() -> None:
    storage = torch.arange(20.0)
    memory = storage[2:]
    shard = Shard("m", "w", SPEC, BOX, (0,), Strided(memory, (2, 3), (1, 2), 4))
    assert shard.data.tolist() == [[6, 8, 10], [7, 9, 11]]
    storage[8] = -1
    assert shard.data[0, 1] == -1
    shard.data[1, 2] = -2
    assert storage[11] == -2


def test_shards_are_equal_whatever_their_memory_and_never_change() -> None:
    shard = Shard("m", "w", SPEC, BOX, (0,), np.zeros((2, 3), np.float32))
    other = Shard("m", "w", TensorSpec((4, 3), "float32"), Box((1, 0), (2, 3)), (0,), torch.ones(2, 3))
    assert shard == other
    assert len({shard, other}) == 1
    assert shard != Shard("m", "w", SPEC, BOX, (0, 1), shard.memory)
    assert shard != Shard("m", "v", SPEC, BOX, (0,), shard.memory)
    assert shard != "m"
    assert "0." not in repr(shard)
    for kept, name in ((shard, "fqn"), (SPEC, "dtype"), (BOX, "lengths")):
        with pytest.raises(AttributeError):
            setattr(kept, name, None)
    for twin in (pickle.loads(pickle.dumps(shard)), copy.deepcopy(shard)):
        assert twin == shard
        assert np.array_equal(twin.data, shard.data)
