"""The numbers of the load benchmark come from its own arithmetic, not from the reports of reknit."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reknit
from benchmarks.load.geometry import BLOCK, needed
from benchmarks.load.metered_storage import Meter
from benchmarks.load.states import DDP_4, FSDP_2_TP_2, FSDP_4, TP_4, Layout, boxes
from reknit.storage.local.store import LocalStorage
from tests.running.examples import at_night, examples

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"embedding": (16, 8), "layers.0.wo": (8, 8), "layers.0.w1": (32, 8), "layers.0.norm": (8,)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save two tensors of 24 and 6 MiB, which lie one after the other in one file."""
    path = str(tmp_path_factory.mktemp("load") / "checkpoint")
    state = {"a": np.zeros((6, 1 << 20), np.float32), "b": np.zeros((3, 1 << 20), np.float16)}
    reknit.save(path, {"model": state}).result()
    return path


def _bytes_of(path: str, fqn: str, box: tuple[slice, ...]) -> tuple[str, set[int]]:
    """Return the file with a box of a tensor, and the offset of each of its elements there."""
    import pyarrow.parquet as parquet

    (index,) = Path(path).glob("index.*.parquet")
    (row,) = [row for row in parquet.read_table(index).to_pylist() if row["fqn"] == fqn]
    width = row["nbytes"] // prod(row["shape"])
    flat = np.arange(prod(row["shape"]), dtype=np.int64).reshape(row["shape"])[box]
    return row["file"], set((row["start"] + flat.reshape(-1) * width).tolist())


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[str, tuple[slice, ...]]:
    fqn, rows = draw(st.sampled_from((("a", 6), ("b", 3))))
    top = draw(st.integers(0, rows - 1))
    left = draw(st.integers(0, 1023)) << 10
    bottom = draw(st.integers(top + 1, rows))
    right = draw(st.integers(left + 1, min(left + 4096, 1 << 20)) | st.just(1 << 20))
    return fqn, (slice(top, bottom), slice(left, right))


@settings(max_examples=examples(10))
@given(wanted=_boxes())
def test_needed_bytes_and_blocks_are_those_found_element_by_element(
    checkpoint: str, wanted: tuple[str, tuple[slice, ...]]
) -> None:
    fqn, box = wanted
    need = needed(checkpoint, [(0, fqn, box)])
    file, starts = _bytes_of(checkpoint, fqn, box)
    width = 4 if fqn == "a" else 2
    assert need.nbytes == need.unique_nbytes == len(starts) * width
    blocks = {start // BLOCK for start in starts}
    size = Path(checkpoint, file).stat().st_size
    assert need.block_nbytes == sum(min(BLOCK, size - block * BLOCK) for block in blocks)
    ordered = np.sort(np.fromiter(starts, np.int64))
    assert need.runs == 1 + int((np.diff(ordered) - width >= BLOCK).sum())


def test_what_two_ranks_want_is_needed_twice_and_unique_once(checkpoint: str) -> None:
    box = (slice(0, 6), slice(0, 1 << 20))
    need = needed(checkpoint, [(0, "a", box), (1, "a", box)])
    assert need.nbytes == 2 * need.unique_nbytes == 48 << 20


def test_the_boxes_of_a_layout_cover_every_element_equally_often() -> None:
    cases: list[Layout] = [FSDP_4, TP_4, FSDP_2_TP_2, DDP_4]
    for layout in cases:
        counts = {fqn: np.zeros(shape, int) for fqn, shape in SHAPES.items()}
        for _, fqn, box in boxes(layout, SHAPES):
            counts[fqn][box] += 1
        for fqn, count in counts.items():
            divided = prod((layout.mesh or ())[axis] for _, axis in layout.cuts(fqn, count.ndim))
            assert set(count.reshape(-1).tolist()) == {layout.world // divided}


def test_the_metered_storage_has_what_a_folder_has(tmp_path: Path) -> None:
    inner = LocalStorage(tmp_path)
    ours = Meter().open(f"metered://1000000-host{tmp_path}/below", "process")
    missing = {name for name in dir(inner) if not name.startswith("_")} - set(dir(ours)) - {"evict"}
    assert missing == set()


@at_night("the parts of the benchmark run by day in the other tests here")
def test_the_benchmark_runs_through(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks/load/run.py"), "--quick", "--parts", "single"]
    done = subprocess.run(
        [*command, "--gib", "0.02", "--dir", str(tmp_path), "--out", str(out), "--timeout", "120"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result == json.loads(done.stdout)
    for kind in ("cold", "warm"):
        assert not [name for name, found in result["single"][kind].items() if "error" in str(found)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
