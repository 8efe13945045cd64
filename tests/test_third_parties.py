"""Plug-ins of other distributions, which are installed, and found without a change of reknit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parent / "third_party"
SCRIPT = """
import sys
import numpy as np, reknit
from row_tables import Table
from vault_store import reads

state = {"model": {"w": np.arange(8.0)}, "table": Table(0, 1, value=100.0, lookups=7)}
reknit.save(f"vault://{sys.argv[1]}/step_1", state)
part = Table(1, 4)
reknit.load(f"vault://{sys.argv[1]}/step_1", {"table": part})
assert part.blocks[2][0, 0] == 102.0 and part.lookups == 7
assert reads

reknit.save(f"{sys.argv[1]}/plain", {"model": {"w": np.arange(8.0).reshape(2, 4)}})
"""
READ = """
import sys
import numpy as np, reknit
with reknit.open(sys.argv[1]) as tiny:
    assert tiny.manifest.other.kind == "Tiny"
    assert np.array_equal(tiny.read("model", "w"), np.arange(8.0).reshape(2, 4))
target = {"w": np.zeros((2, 4))}
reknit.load(sys.argv[1], {"model": target})
assert target["w"][1, 3] == 7.0
assert reknit.verify(sys.argv[1]).ok
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the packages as a user does, into a folder of their own."""
    folder = tmp_path_factory.mktemp("third_parties")
    shutil.copytree(ROOT, folder / "sources")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    places = sorted(str(path) for path in (folder / "sources").iterdir())
    command = [*pip, "--no-build-isolation", "--no-index", "--target", str(folder / "site"), *places]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    assert done.returncode == 0, done.stderr
    return folder / "site"


def run(site: Path, *arguments: str | Path) -> str:
    path = os.pathsep.join([str(site), *sys.path])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_store_a_framework_a_format_and_a_command_of_others_work(site: Path, tmp_path: Path) -> None:
    run(site, "-c", SCRIPT, tmp_path)
    assert run(site, "-m", "reknit", "count", tmp_path / "plain") == "8\n"
    run(site, "-m", "reknit", "export", "Tiny", tmp_path / "plain", tmp_path / "tiny")
    run(site, "-c", READ, tmp_path / "tiny")
    assert "Count the numbers in a checkpoint" in run(site, "-m", "reknit", "--help")
    assert "vault-store 1.0 (for vault://)" in run(site, "-m", "reknit", "--version")
