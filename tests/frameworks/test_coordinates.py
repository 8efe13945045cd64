"""Events have the place of a rank in the parallel grid, as its framework records it."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reknit
from reknit.monitor.figures import event_columns
from reknit.monitor.operations import read_operations
from reknit.monitor.text import remarks
from tests.ranks import run
from tests.running.examples import at_night

EXAMPLE = Path(__file__).parents[2] / "examples" / "monitoring" / "slow_ranks.py"


def saved_by_sixteen(folder: str) -> None:
    runpy.run_path(str(EXAMPLE))["saved"](folder, 1, wait=True)


@pytest.mark.alone  # it measures which ranks are slow
@at_night("monitor/test_reports.py names slow ranks by day, from events with known times")
def test_of_sixteen_ranks_all_views_name_the_slow_disk_and_the_full_buffer(tmp_path: Path) -> None:
    events = tmp_path / "events"
    run(16, saved_by_sixteen, str(tmp_path), timeout=300)

    (operation,), *_ = read_operations([str(events)])
    slow = next(line for line in remarks(operation) if line.startswith("slow in write "))
    found = re.findall(r"rank \d+ \([^)]*\)", slow)
    assert sorted(found[:2]) == ["rank 14 (dp 3, tp 2)", "rank 5 (dp 1, tp 1)"], slow

    columns = event_columns(operation.events)
    seconds = np.nan_to_num(columns.seconds()[columns.lanes.index("write")])
    brightest = [columns.ranks[row] for row in np.argsort(seconds)[-2:]]
    assert sorted(brightest) == [5, 14]
    assert [columns.places[5], columns.places[14]] == [{"dp": 1, "tp": 1}, {"dp": 3, "tp": 2}]


def saved_and_loaded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    weight: Any = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0), Shard(1)])
    events = f"{folder}/events/"
    for wait in (True, False):
        options = reknit.SaveOptions(events=events)
        reknit.save(f"{folder}/{wait}", {"w": weight}, step=1, wait=wait, options=options).result(60)
    reknit.load(f"{folder}/True", {"w": weight}, options=reknit.LoadOptions(events=events))
    assert reknit.close(60)


def test_ranks_of_a_mesh_are_where_it_has_them(tmp_path: Path) -> None:
    run(2, saved_and_loaded, str(tmp_path))
    lines = [line for path in (tmp_path / "events").iterdir() for line in path.read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    assert len(list((tmp_path / "events").iterdir())) == 4, "a trainer and an agent on each rank"
    found = {
        (event["process"], event["action"], event["rank"], tuple(event["coordinate"].items()))
        for event in events
        if event.get("phase") in ("collect", "write", "read")
    }
    assert found == {
        (process, action, rank, (("dp", 0), ("tp", rank)))
        for process, action in (("trainer", "save"), ("agent", "save"), ("trainer", "load"))
        for rank in range(2)
    }


def test_without_a_mesh_no_place_is_known(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    path = tmp_path / "events.jsonl"
    reknit.save(tmp_path / "x", {"w": torch.ones(2)}, options=reknit.SaveOptions(events=str(path)))
    assert reknit.sinks.flush(60)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert {str(event["coordinate"]) for event in events if "phase" in event} == {"{}"}
