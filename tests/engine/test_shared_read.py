from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from reknit.comm.group import SoloGroup
from reknit.engine.sharing import shared_read
from reknit.engine.sharing.shared_read import SharedRead
from reknit.options import LoadOptions
from reknit.planner.load import Granularity
from reknit.types.box import Box
from tests.engine.saved import fresh, saved
from tests.engine.test_read import reader_of
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    import pytest

BLOCK = 64


def test_how_fast_a_store_is_shows_in_a_large_read_however_many_small_ones_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in one_by_one(range(5)):
        monkeypatch.setattr(shared_read, "WORTH_NBYTES", 1)
        arrays = {f"small{k}": np.zeros(100, np.uint8) for k in range(30)} | {
            "large": np.zeros(1000, np.uint8)
        }
        chunks = [[Box.whole(array.shape)] for array in arrays.values()]
        storage = fresh("rate")
        checkpoint = saved(arrays, chunks, storage, BLOCK, random.Random(seed))
        wanted = [(number, Box((0,), (3,))) for number in range(30)] + [(30, Box.whole((1000,)))]
        targets = [np.ones(box.lengths, np.uint8) for _, box in wanted]
        reader = reader_of(checkpoint, wanted, targets, Granularity(1, 0, 1 << 20))
        options = LoadOptions(share="auto", verify="off")
        mine = SharedRead.begin(SoloGroup(), None, reader, checkpoint.index.files, options)
        try:
            offer = mine.offer()
        finally:
            mine.close()
        index = checkpoint.index
        assert storage.asked == [(index.files[index.file[30]], int(index.start[30]), BLOCK)]
        assert offer.read_rate > 0
