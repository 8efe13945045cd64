"""The content of the golden checkpoints: made by rule, so that no copy of it has to be kept beside them.

`python -m tests.golden.content FOLDER` writes a checkpoint with the reknit of today.  With `--file-table` its
index lists the files, as that of a job of many ranks does.  With `--moved` its files have moved to
`golden://NAME`, which is the folder `cold/NAME` here.  A golden checkpoint in the repository is never written
again: it stands for the checkpoints that users have on their disks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import ml_dtypes
import numpy as np

import reknit
from reknit.engine.stored import manifest_content
from reknit.options import SaveOptions
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.world import run_ranks
from reknit.types.box import Box
from reknit.types.shard import Alias, Blob, Holdings, Shard, TensorSpec
from tests.engine.held import save_held, task_at

if TYPE_CHECKING:
    from reknit.comm.group import Group
    from reknit.options import Durability

RANKS = 2
STEP = 1234
METADATA = {"run": "golden", "tags": [1, 2.5, None]}
VALUES = {"epoch": 3, "lr": 2.5e-4, "tuple": (1, "two"), "set": {1, 2}, "big": 1 << 100, "bytes": b"\x00\xff"}
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int8",
    "uint16",
    "int64",
    "bool",
    "complex128",
)


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of the item `model`, by fqn."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    for number, name in enumerate(DTYPES):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        pattern: np.ndarray[Any, Any] = (np.arange(7 * 5 * dtype.itemsize) * 37 + number).astype(np.uint8)
        pattern = pattern & 1 if name == "bool" else pattern
        made[f"layers.{number}.[{name}]"] = pattern.view(dtype).reshape(7, 5)
    made["scalar"] = np.array(42, np.int64)
    made["empty"] = np.zeros((0, 3), np.float32)
    return made


def holdings(rank: int) -> Holdings:
    """Return the holdings of a rank: rows of the matrices, a copy of the rest, a value of its own."""
    shards = []
    for fqn, array in arrays().items():
        spec = TensorSpec(array.shape, array.dtype.name)
        box, replicas = Box.whole(array.shape), tuple(range(RANKS))
        if array.size > 1:
            box, replicas = (Box((0, 0), (4, 5)), Box((4, 0), (3, 5)))[rank], (rank,)
        shards.append(Shard("model", fqn, spec, box, replicas, np.asarray(array[box.slices()])))
    blobs = [Blob("extra", fqn, value) for fqn, value in VALUES.items()]
    blobs.append(Blob("rng", "", [rank, "own"], {"rank": rank}))
    aliases = (Alias("model", "tied", "layers.0.[float32]"),)
    return Holdings(("model", "extra", "rng"), tuple(shards), tuple(blobs), aliases)


def write(folder: str, *, file_table: bool = False) -> None:
    """Write a golden checkpoint with two ranks; `file_table` lists its files in the index, small as it is."""

    def rank(group: Group) -> None:
        options, origin = SaveOptions(timeout_s=30), {"world_size": RANKS}
        task = task_at(LocalStorage(folder), group, options, step=STEP, origin=origin, metadata=METADATA)
        save_held(lambda: holdings(group.rank), task)

    most = -1 if file_table else manifest_content.MAX_LISTED_FILES
    with mock.patch.object(manifest_content, "MAX_LISTED_FILES", most):
        run_ranks(RANKS, rank)
    assert reknit.verify(folder, "data").ok


def open_golden(url: str, durability: Durability) -> LocalStorage:
    """Open the store of moved checkpoints."""
    return LocalStorage(Path(__file__).parent / "cold" / url.removeprefix("golden://"))


def register_golden() -> None:
    """Register the scheme of moved checkpoints in this process."""
    register("golden", open_golden)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write(str(path), file_table="--file-table" in sys.argv)
    if "--moved" in sys.argv:
        register_golden()
        reknit.cool(path, f"golden://{path.name}")
