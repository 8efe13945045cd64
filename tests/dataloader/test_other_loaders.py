"""Loaders of other projects, the real ones: their positions are enough to go on anywhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from reknit.dataloader import ConsumedSamples
from reknit.frameworks.registry import collect
from tests.dataloader.source_kinds import installed
from tests.frameworks.checkpoint import Checkpoint, assemble, load
from tests.running.examples import at_night


@pytest.mark.filterwarnings("ignore")
def test_a_grain_dataset_goes_on_by_its_position() -> None:
    grain = installed("grain")
    whole = grain.MapDataset.range(0, 66).shuffle(seed=3)

    def make(rank: int, size: int) -> ConsumedSamples[Any]:
        def begin(position: int) -> Any:
            return whole[position:][rank::size].batch(2).to_iter_dataset()

        return ConsumedSamples(begin, batch_size=2, size=size)

    seen: list[int] = []
    checkpoint: Checkpoint | None = None
    for size, steps in ((3, 4), (2, 3), (5, 1), (1, None)):
        job = [make(rank, size) for rank in range(size)]
        for rank, one in enumerate(job):
            if checkpoint is not None:
                load({"data": one}, checkpoint, rank, size)
        seen += [int(n) for one in job for batch in islice(one, steps) for n in batch]
        checkpoint = assemble([collect({"data": one}, rank, size) for rank, one in enumerate(job)])
        for one in job:
            next(one, None)  # lost in the crash
    assert sorted(seen) == list(range(66))


@at_night("the dataset of Grain, which needs no process of its own")
def test_mosaic_streaming_says_one_position_for_all_ranks(tmp_path: Path) -> None:
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("streaming is not installed")
    # In a process of its own: other tests here would find the stand-in for torchvision.
    call = [sys.executable, "-W", "ignore", "-m", "tests.dataloader.mosaic", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(call, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    first, rest = json.loads(done.stdout.splitlines()[-1])
    assert len(first) == 20
    assert sorted(first + rest) == list(range(64))


def test_loaders_of_torch_are_not_imported_with_the_others() -> None:
    code = "import reknit.dataloader, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
