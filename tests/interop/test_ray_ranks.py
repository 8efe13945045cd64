"""Imports by the processes of a Ray cluster: one checkpoint, and the errors of an import."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

import reknit
from reknit.errors import MissingExtraError, UsageError
from reknit.interop.ray_ranks import import_on_ray
from tests.integrations.ray_cluster import ENVIRONMENT, ROOT
from tests.optional import needs

if TYPE_CHECKING:
    from pathlib import Path

IMPORTS = """
import sys
from reknit.cli.main import main
from tests.integrations.ray_cluster import cluster
with cluster():
    for _ in range(2):
        print("exit code", main(["import", sys.argv[1], sys.argv[2], "--ray", "2"]), flush=True)
    print("exit code", main(["import", sys.argv[1], sys.argv[2] + "-more", "--ray", "9"]), flush=True)
"""


@needs("ray", "Ray")
def test_processes_of_a_cluster_import_together_and_their_error_is_that_of_the_import(
    tmp_path: Path,
) -> None:
    arrays = {f"w{n}": np.full(50_000, n, np.float32) for n in range(6)}
    save_file(arrays, tmp_path / "model.safetensors")
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            IMPORTS,
            str(tmp_path / "model.safetensors"),
            str(tmp_path / "own"),
        ],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == ["exit code 0", "exit code 2", "exit code 2"], done.stdout + done.stderr
    assert "there is a committed checkpoint" in done.stderr
    assert "the Ray cluster has 3 cores for 9 ranks" in done.stderr
    with reknit.open(tmp_path / "own") as checkpoint:
        for name, array in arrays.items():
            assert np.array_equal(checkpoint.read("model", name), array)


def test_an_impossible_number_and_a_missing_ray_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, -1, 1.5):
        with pytest.raises(UsageError, match="the number of ranks on Ray is a whole number"):
            import_on_ray(tmp_path / "a", tmp_path / "b", number)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match="Ray is not installed"):
        import_on_ray(tmp_path / "a", tmp_path / "b", 1)
