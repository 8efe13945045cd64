"""Checkpoints of Orbax, opened in place."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import reknit
from tests.optional import needs
from tests.running.examples import at_night

if TYPE_CHECKING:
    from pathlib import Path

SAVE_WITH_ORBAX = """
import sys
from pathlib import Path
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import reknit
folder, w = Path(sys.argv[1]), np.arange(24.0, dtype=np.float32).reshape(4, 6)
tree = {"params": {"w": w, "b": np.ones(3, ml_dtypes.bfloat16)}, "opt": [np.arange(4), np.float32(2.5)]}
for name, more in (("OCDBT", {}), ("zarr", {"use_ocdbt": False}), ("zarr3", {"use_zarr3": True})):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**more)) as saver:
        saver.save(folder / name, tree)
    with reknit.open(folder / name) as checkpoint:
        found = checkpoint.read_all(framework="numpy")
        assert np.array_equal(found["params"]["w"], w) and found["params"]["b"].dtype == ml_dtypes.bfloat16
        assert np.array_equal(found["opt"]["0"], np.arange(4)) and found["opt"]["1"] == 2.5
        part = checkpoint.read("params", "w", (slice(1, 3), slice(2, 5)))
        assert np.array_equal(part, w[1:3, 2:5])
target = {"w": np.zeros_like(w), "b": np.zeros(3, ml_dtypes.bfloat16)}
assert reknit.load(folder / "OCDBT", {"params": target}, items=["params"]).unchecked
assert np.array_equal(target["w"], w)
with ocp.CheckpointManager(folder / "run") as manager:
    both = ocp.args.Composite(state=ocp.args.StandardSave(tree), more=ocp.args.JsonSave({"a": 1}))
    manager.save(1, args=both)
    manager.wait_until_finished()
with reknit.open(folder / "run" / "1") as checkpoint:
    assert np.array_equal(checkpoint.read("state", "params/w"), w)
    assert (checkpoint.step, checkpoint.values["more"][""]) == (1, {"a": 1})
for path in (folder / "zarr").rglob(".zarray"):
    path.write_bytes(b"[" * 1000)
(folder / "OCDBT" / "manifest.ocdbt").write_bytes(b"\\x0c\\xdb:*" + b"\\xff" * 500)
for name in ("OCDBT", "zarr"):
    try:
        reknit.open(folder / name)
    except reknit.CorruptError:
        continue
    raise AssertionError(name)
"""


@needs("orbax", "Orbax")
@at_night("jax/test_orbax.py opens folders of Orbax, and damages them, by day")
def test_what_orbax_saved_is_opened_in_place_and_garbage_is_refused(tmp_path: Path) -> None:
    # In a process of its own: no process that forks others may have threads of JAX or tensorstore.
    subprocess.run([sys.executable, "-c", SAVE_WITH_ORBAX, str(tmp_path)], check=True)
    with pytest.raises(reknit.CheckpointNotFoundError, match="1 in it is a checkpoint of Orbax"):
        reknit.open(tmp_path / "run")
