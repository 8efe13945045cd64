"""One process takes the model out of a checkpoint of many ranks, with little memory beside the model."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reknit.engine.saving.save import save
from reknit.engine.saving.save_job import SaveJob
from reknit.frameworks import registry
from reknit.monitor.phase import Recorder
from reknit.options import SaveOptions
from reknit.storage.local.store import LocalStorage
from reknit.testing.world import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.comm.group import Group

RANKS, MODEL_MIB, INFLIGHT_MIB, SLACK_MIB = 4, 64, 16, 24

READING = """
import sys
import reknit
from reknit.options import MIB

def peak_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

options = reknit.LoadOptions(inflight_nbytes=int(sys.argv[2]) * MIB)
with reknit.open(sys.argv[1], options=options) as checkpoint:
    checkpoint.read("model", "warm")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = peak_kib()
    tensors = checkpoint.read_all(["model"], framework="numpy")["model"]
    after = peak_kib()
assert all((tensors[f"w{rank}"] == rank).all() for rank in range(4))
print((after - before) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for sizes of memory")
def test_the_model_alone_takes_its_own_memory_and_what_may_be_in_flight(tmp_path: Path) -> None:
    size = MODEL_MIB * (1 << 20) // RANKS // 4

    def rank(group: Group) -> None:
        state = {
            "model": {f"w{group.rank}": np.full(size, group.rank, np.float32), "warm": np.zeros(8)},
            "optimizer": {f"m{group.rank}": np.ones(3 * size, np.float32)},
        }
        options = SaveOptions(durability="process")
        save(
            SaveJob(
                lambda: registry.collect(state, group.rank, group.size),
                group,
                LocalStorage(str(tmp_path / "ck"), durability="process"),
                options,
                Recorder("save", group.rank),
            )
        )

    run_ranks(RANKS, rank)
    command = [sys.executable, "-c", READING, str(tmp_path / "ck"), str(INFLIGHT_MIB)]
    extra_mib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert MODEL_MIB <= extra_mib <= MODEL_MIB + INFLIGHT_MIB + SLACK_MIB
