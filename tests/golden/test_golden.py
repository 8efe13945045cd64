"""Checkpoints of every format version ever released load for ever, here and in other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest
from safetensors import safe_open

import reknit
from tests.golden.content import METADATA, RANKS, STEP, VALUES, arrays, register_golden, write

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("format_*"))


@pytest.fixture(params=[*VERSIONS, "today", "today_file_table", "today_moved"])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param in VERSIONS:
        register_golden()
        return HERE / str(request.param)
    write(str(tmp_path / "today"), file_table=request.param == "today_file_table")
    if request.param == "today_moved":
        reknit.cool(tmp_path / "today", tmp_path / "cold")
    return tmp_path / "today"


@pytest.fixture
def folder(golden: Path) -> Path:
    """Where the files of a checkpoint are."""
    moved_to = json.loads((golden / "manifest.json").read_bytes()).get("moved_to", str(golden))
    return Path(moved_to.replace("golden://", f"{HERE}/cold/"))


def test_there_is_a_golden_checkpoint_of_every_version() -> None:
    assert VERSIONS == ["format_1", "format_1_file_table", "format_1_moved"]
    for version in VERSIONS:
        features = json.loads((HERE / version / "manifest.json").read_bytes())["requires"]
        assert "_".join(["format_1", *features]) == version


def test_every_tensor_and_value_is_as_it_was_saved(golden: Path) -> None:
    report = reknit.verify(golden, "data")
    assert report.ok, report.problems
    with reknit.open(golden) as checkpoint:
        assert (checkpoint.step, checkpoint.metadata) == (STEP, METADATA)
        assert checkpoint.manifest.origin["world_size"] == RANKS
        assert checkpoint.values["extra"] == VALUES
        assert set(checkpoint.tensors["model"]) == {*arrays(), "tied"}
        for fqn, array in arrays().items():
            found = checkpoint.read("model", fqn)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes(), fqn
        assert checkpoint.read("model", "tied").tobytes() == arrays()["layers.0.[float32]"].tobytes()


def test_it_loads_into_a_state_of_one_process(golden: Path) -> None:
    state: dict[str, Any] = {
        "model": {fqn: np.zeros_like(array) for fqn, array in arrays().items()},
        "extra": dict.fromkeys(VALUES),
    }
    report = reknit.load(golden, state, strict=["!model/tied"])
    assert state["extra"] == VALUES
    assert report.unexpected == ("model/tied",)
    for fqn, array in arrays().items():
        assert state["model"][fqn].tobytes() == array.tobytes()


def test_other_tools_find_the_tensors_of_the_index_in_the_files(folder: Path) -> None:
    names = {}
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            names[str(file.relative_to(folder))] = set(opened.keys())
    assert len(names) == RANKS
    index = next(folder.glob("index.*.parquet"))
    rows = pd.read_parquet(index)
    assert set(rows["file"]) == set(names)
    assert sum(map(len, names.values())) == len(rows[rows["fqn"] != "tied"])
    with duckdb.connect() as database:
        answer = database.execute(
            "select sum(nbytes)::bigint, count(distinct fqn) from read_parquet(?) where fqn <> 'tied'",
            [str(index)],
        ).fetchall()
    assert answer == [(sum(array.nbytes for array in arrays().values()), len(arrays()))]
