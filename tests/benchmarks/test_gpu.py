"""The benchmark of devices runs on any device, and reports that it needs one on a machine without."""

from __future__ import annotations

import json
import statistics
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu import run
from benchmarks.gpu.measure import Bench
from tests.accelerator import installed
from tests.devices import every_device
from tests.running.examples import at_night

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TINY = ["--gib", "0.002", "--width", "128", "--batch", "8", "--rounds", "1"]


@every_device
@at_night("torchrun/test_on_devices.py saves and loads on devices by day")
def test_the_benchmark_runs_on_a_device_and_gives_no_speed_of_a_simulated_one(
    device_type: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "checkpoints", tmp_path / "out.json"
    folder.mkdir()
    assert run.main([*TINY, "--dir", str(folder), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["device"].startswith(f"{device_type}:0")
    assert len(result["rows"]) == len(run.ROWS)
    assert set(result["memory MiB"]) == {"kept from the first save on", "save eager", "save lazy", "load"}
    assert result["simulated"] is (installed() is not None)
    for row in result["rows"]:
        assert ("s" in row) is not result["simulated"], row
    assert list(folder.iterdir()) == []
    table = capfd.readouterr().err
    assert ("it has no speed" in table) is result["simulated"]


def test_without_a_device_the_benchmark_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert run.main([]) == 0
    reported = capsys.readouterr()
    assert "nothing was measured: torch" in reported.err
    assert list(json.loads(reported.out)) == ["skipped"]


def test_ratios_are_those_of_each_round_to_the_slowest_limit() -> None:
    bench = Bench.__new__(Bench)
    bench.times = {"load": [3.0, 8.0, 5.0], "read": [1.0, 4.0, 1.0], "memcpy to device": [2.0, 1.0, 5.0]}
    bench.window, bench.link = 7, SimpleNamespace(nbytes=10_000_000_000, is_pinned=False)  # type: ignore[assignment]
    found = {row["what"]: row for row in run.rows(bench, simulated=False)}
    load = found["load"]
    assert (load["s"], load["GB/s"]) == (5.0, 2.0)
    assert load["ratio"] == statistics.median([3 / 2, 8 / 4, 5 / 5])
    assert "s" not in found["7 training steps"]
