"""The aims of all benchmarks: each belongs to a row that is measured, and says how far a row is away."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.aims import AIMS, Aim, Judged, judged
from benchmarks.cold import run as cold
from benchmarks.load import ratios as load
from benchmarks.paper import stalls
from benchmarks.planning import run as planning
from benchmarks.storage import ours
from benchmarks.storage import run as storage
from benchmarks.storage.places import PLACES
from benchmarks.unchanged import run as unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _cold() -> Iterator[str]:
    call = {"median": 1.0, "last": {"own_modules": 1, "agent": {"private_mib": 1.0, "threads": 1}}}
    pairs = [
        {"ranks": ranks, "mib": mib, "call": what, **dict.fromkeys(("reknit", *cold.RIVALS), call)}
        for ranks, mib, what in cold.PAIRS
    ]
    start = {"import reknit, s": 1.0, "reknit --help, s": 1.0}
    for cache in ("warm", "dropped"):
        found = cold.rows({"page_cache": cache, "pairs": pairs, "alone": [], "start": start})
        yield from (name for name, _ in found)


def _planning() -> Iterator[str]:
    args = argparse.Namespace(fsdp2=[1024], tensors=500, dp=[8, 70, 782], dcp=[])
    times = {"all_s": 1.0, "manifest_nbytes": 1}
    job = {
        "root_s": 1.0,
        "index_nbytes": 1,
        "first": times,
        "same_plans": times,
        "plan_per_rank_s": {"median": 1.0},
    }
    loads = [{"ranks": dp * 128, "root_s": 1.0} for dp in (9, *args.dp[1:])]
    result = {"jobs": dict.fromkeys(planning.jobs(args), job), "growth": {"exponent": 1.0}, "loads": loads}
    yield from (name for name, _ in planning.rows(result))


def _stalls() -> Iterator[str]:
    for workload in stalls.WORKLOADS:
        for place in workload.places:
            yield from (row.what for row in stalls.rows_of(workload, place, {key: {} for key in stalls.WHAT}))


def _unchanged() -> Iterator[str]:
    cases = [f"{case}{after}" for case in unchanged.CASES for after in ("", unchanged.RESTARTED)]
    yield from (name for name, _ in unchanged.rows({key: [(1.0, 1.0)] for key in cases}))


def _storage() -> Iterator[str]:
    rows = [{"place": place, "what": what, "ratio": 1.0} for place in PLACES for what, _, _ in storage.ROWS]
    yield from (name for name, _ in storage.ratios(rows))


NAMES = {
    "cold": _cold,
    "planning": _planning,
    "paper stalls": _stalls,
    "unchanged": _unchanged,
    "storage": _storage,
}
"""The benchmarks whose rows have names without a run; `test_table` has those of the table."""


@pytest.mark.parametrize("bench", NAMES)
def test_each_aim_is_measured_by_a_row_and_no_figure_alone_has_two(bench: str) -> None:
    names = list(NAMES[bench]())
    for aim in AIMS:
        if aim.bench == bench:
            assert any(fnmatchcase(name, aim.row) for name in names), aim
    for name in names:
        assert len({aim.over for aim in (each.aim for each in judged(bench, name, {}, ()))}) <= 1, name
        assert sum(aim.bench == bench and fnmatchcase(name, aim.row) for aim in AIMS) <= 1, name


def test_each_aim_of_a_load_has_a_ratio_and_each_benchmark_is_known() -> None:
    names = [ratio.what.replace("{}", "*") for ratio in load.RATIOS]
    for aim in AIMS:
        if aim.bench == "load":
            assert any(fnmatchcase(aim.row, name) or fnmatchcase(name, aim.row) for name in names), aim
        else:
            assert aim.bench in NAMES or aim.bench.startswith("table "), aim


def test_an_aim_is_judged_by_the_best_of_ours_and_the_best_that_it_names() -> None:
    figures = {
        "reknit": [2.0, 4.0],
        "lazy": [9.0, 9.0],
        "DCP a": [1.0, 1.0],
        "DCP b": [4.0, 4.0],
        "other": [0.1, 0.1],
    }
    (found,) = judged(
        "table single", "1 GiB, 1 rank: peak memory of a load / bytes owned", figures, ("reknit", "lazy")
    )
    assert found.value == 3.0
    dcp, read = judged("table single", "1 MB, 1 rank: warm load", figures, ("reknit", "lazy"))
    assert (dcp.value, read.value, read.met) == (3.0, None, None)
    assert not list(judged("table single", "another row", figures, ("reknit",)))


def test_an_aim_says_how_near_it_is_and_why_it_is_missed() -> None:
    most, least = Aim("a", "b", 2.0, why="it waits"), Aim("a", "b", 0.9, "raw*", least=True)
    assert Judged(most, 2.0).text == "2, aim <= 2: met"
    assert Judged(most, 3.0).text == "3, aim <= 2: NOT met, 1.5 of the aim; it waits"
    assert Judged(least, 0.95).text == "0.95 of raw, aim >= 0.9: met"
    assert Judged(least, 0.45).text == "0.45 of raw, aim >= 0.9: NOT met, 0.5 of the aim; no reason found"
    assert Judged(least, None).text == "aim >= 0.9: not measured"


def test_a_checkpoint_beside_the_raw_client_has_the_same_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    data: Any = np.arange(1 << 16, dtype=np.uint8)
    found, url = np.zeros_like(data), str(tmp_path / "saved")
    side = ours.Whole()
    with ThreadPoolExecutor(2) as pool:
        side.put(url, data, pool)
        side.get(url, found, pool)
        side.remove(url, data, pool)
    assert (found == data).all()
    assert not [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
