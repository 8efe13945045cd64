"""One process takes the model out of a checkpoint of many ranks, with little memory beside the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.frameworks import registry
from reknit.options import SaveOptions
from reknit.storage.local.store import LocalStorage
from reknit.testing.world import run_ranks
from tests.engine.held import save_held, task_at
from tests.ranks import run

if TYPE_CHECKING:
    from collections.abc import Callable

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
        storage = LocalStorage(str(tmp_path / "ck"), durability="process")
        task = task_at(storage, group, SaveOptions(durability="process"))
        save_held(lambda: registry.collect(state, group.rank, group.size), task)

    run_ranks(RANKS, rank)
    command = [sys.executable, "-c", READING, str(tmp_path / "ck"), str(INFLIGHT_MIB)]
    extra_mib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert MODEL_MIB <= extra_mib <= MODEL_MIB + INFLIGHT_MIB + SLACK_MIB


VALUES_MIB, OF_RANK_MIB = 128, 80


def large_value(kind: str, nbytes: int) -> object:
    """Return a value of a kind whose file has so many bytes."""
    makers: dict[str, Callable[[int], object]] = {"bytes": bytes, "bytearray": bytearray, "text": "a".__mul__}
    if kind == "list":
        return [bytes(1 << 16)] * (nbytes >> 16)
    if kind == "texts":
        return np.full(nbytes >> 5, "sentence")
    if kind == "of the rank":
        small = [np.ones(1 << 12) for _ in range(nbytes >> 16)]
        return reknit.PerRank({"large": np.ones(nbytes >> 4), "small": small})
    return makers[kind](nbytes)


def load_large_value(folder: str, kind: str) -> int:
    """Load a large value, and return the MiB that this takes at most."""
    state = {"values": {"deep": {"x": large_value(kind, 0)}}}
    reknit.load(f"{folder}/small", state)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_kib("VmRSS")
    reknit.load(f"{folder}/large", state)
    after = memory_kib("VmHWM")
    value: Any = state["values"]["deep"]["x"]
    assert isinstance(value, reknit.PerRank) or len(value) == len(large_value(kind, VALUES_MIB << 20))  # type: ignore[arg-type]
    return (after - before) // 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for sizes of memory")
@pytest.mark.parametrize("kind", ["bytes", "bytearray", "text", "list", "texts", "of the rank"])
def test_large_values_take_the_size_of_their_file_and_little_more(kind: str, tmp_path: Path) -> None:
    for name, nbytes in (("small", 1 << 16), ("large", VALUES_MIB << 20)):
        reknit.save(tmp_path / name, {"values": {"deep": {"x": large_value(kind, nbytes)}}})
    (extra_mib,) = run(1, load_large_value, str(tmp_path), kind, joined=False)
    assert extra_mib <= VALUES_MIB + 64


def values_of_rank(nbytes: int, fill: int) -> dict[str, Any]:
    """Return a state with `nbytes` of values that ranks share, and as much in values of this rank."""
    import torch

    tensors = {number: torch.full((1 << 13,), float(fill)) for number in range(nbytes >> 16)}
    mine = {"large": torch.full((nbytes >> 3,), float(fill)), "small": tensors}
    return {"shared": {"x": bytes([fill]) * nbytes}, "mine": reknit.PerRank(mine)}


def save_large_values(folder: str) -> None:
    for name, nbytes in (("small", 1 << 16), ("large", OF_RANK_MIB << 20)):
        reknit.save(f"{folder}/{name}", values_of_rank(nbytes, 1))


def load_large_values(folder: str) -> int:
    """Load large values on a rank, and return the MiB that this takes at most."""
    reknit.load(f"{folder}/small", values_of_rank(1 << 16, 0))
    target = values_of_rank(1 << 16, 0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_kib("VmRSS")
    reknit.load(f"{folder}/large", target)
    after = memory_kib("VmHWM")
    assert target["shared"]["x"] == bytes([1]) * (OF_RANK_MIB << 20)
    mine = target["mine"].value
    assert (mine["large"] == 1).all()
    assert all((one == 1).all() for one in mine["small"].values())
    return (after - before) // 1024


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for sizes of memory")
def test_large_values_of_several_ranks_take_the_size_of_their_files_and_little_more(tmp_path: Path) -> None:
    run(2, save_large_values, str(tmp_path))
    for extra_mib in run(2, load_large_values, str(tmp_path)):
        assert extra_mib <= 2 * OF_RANK_MIB + 64
