"""Real checkpoints for tests, also with chunks as many ranks would write them."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.comm.group import SoloGroup
from reknit.engine.saving.save import save
from reknit.engine.saving.save_job import SaveJob
from reknit.monitor.phase import Recorder
from reknit.options import SaveOptions
from reknit.storage.registry import open_storage
from reknit.types.box import Box
from reknit.types.shard import Holdings, Shard, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


def save_in_boxes(
    path: Path, arrays: Mapping[str, NDArray[Any]], boxes: Mapping[str, Sequence[Box]], item: str = "model"
) -> None:
    """Save arrays of one item, each as the chunks that `boxes` names (default: whole)."""
    shards = [
        Shard(item, fqn, spec, box, (0,), np.asarray(array[box.slices()]))
        for fqn, array in arrays.items()
        for spec in [TensorSpec(array.shape, str(array.dtype))]
        for box in boxes.get(fqn, [Box.whole(array.shape)])
    ]
    storage = open_storage(path, durability="process")
    holdings = Holdings((item,), tuple(shards), ())
    job = SaveJob(
        collect=lambda: holdings,
        group=SoloGroup(0),
        storage=storage,
        options=SaveOptions(),
        recorder=Recorder("save"),
        step=1,
        origin={"world_size": 1},
    )
    save(job)
    storage.close()


def columns(shape: Sequence[int], parts: int) -> list[Box]:
    """Cut a matrix into boxes of whole columns, as tensor parallelism does."""
    rows, width = shape
    edges = [width * k // parts for k in range(parts + 1)]
    return [Box((0, a), (rows, b - a)) for a, b in pairwise(edges)]
