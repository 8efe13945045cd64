"""A damaged folder of DCP, or of ByteCheckpoint, is never read with a wrong value in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reknit
from tests.integrations.formats.damage import ADDED, CUT, EMPTIED, REMOVED, SWAPPED, damages, wrong_in_silence
from tests.ranks import run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

SAVED = Path(__file__).parent / "bytecheckpoint" / "fsdp"
# A byte that flips in a tensor, or in a name, is not shown by these formats.
KINDS = (REMOVED, EMPTIED, CUT, SWAPPED, ADDED)


def save(path: str) -> None:
    """Save parts of two ranks, of which the first has one row more, and values beside them."""
    mesh = init_device_mesh("cpu", (2,))
    cut = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [Shard(0)])
    whole = torch.arange(4, dtype=torch.int64)
    dcp.save({"model": {"cut": cut, "whole": whole}, "step": 3, "note": "text"}, checkpoint_id=path)


def test_no_damage_of_one_file_is_read_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    run(2, save, str(folder))
    with reknit.open(folder) as checkpoint:
        whole = checkpoint.read_all()
    seen = set()
    for damage, broken in damages(folder, tmp_path, kinds=KINDS):
        assert not wrong_in_silence(broken, whole), damage
        seen.add(damage.split()[0])
    assert seen == {*KINDS}


def test_no_damage_of_a_file_of_bytecheckpoint_is_read_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(SAVED, folder)
    with reknit.open(folder) as checkpoint:
        whole = checkpoint.read_all()
    for damage, broken in damages(folder, tmp_path, kinds=KINDS):
        assert not wrong_in_silence(broken, whole), damage
